"""The loader, end to end, on a device."""

import pytest
import torch
from fake_session import FakeDaemon, make_shards
from loader_helpers import whole

from gpufeed.loaders import DataLoader, ShardDataset, to_device
from gpufeed.loaders.batchslots import take_apart_retired


@pytest.fixture
def daemon():
    made = FakeDaemon(make_shards([40, 40, 40]))
    yield made
    made.close()


def loader_of(daemon, **options):
    dataset = ShardDataset("fake://", decode=whole, shuffle="none")
    return DataLoader(dataset, batch_size=8, session_factory=daemon.open_session, **options)


@pytest.mark.parametrize("options", [
    {"num_workers": 0},
    {"num_workers": 2, "multiprocessing_context": "fork"},
    {"num_workers": 2, "multiprocessing_context": "spawn"},
])  # fmt: skip
def test_every_batch_reaches_the_device_whole(daemon, options):
    torch.ones(1, device="cuda")
    plain = loader_of(daemon)
    wanted = {}
    for batch in plain:
        wanted |= dict(zip(batch["key"], batch["head"].clone(), strict=True))
    plain.close()
    loader = loader_of(daemon, register_slots=True, **options)
    side = torch.cuda.Stream()
    seen = {}
    for epoch in range(3):
        for number, batch in enumerate(loader):
            moved = to_device(batch, "cuda", stream=side if number % 2 else None)
            for key, head in zip(moved["key"], moved["head"], strict=True):
                seen[epoch, key] = head
    del batch, moved
    assert loader.stats()["registered_slots_count"] > 0
    loader.close()
    torch.cuda.synchronize()
    take_apart_retired()
    assert loader.stats()["registered_slots_count"] == 0
    assert len(seen) == 3 * len(wanted)
    assert all(torch.equal(head.cpu(), wanted[key]) for (_, key), head in seen.items())


def test_pin_memory_gives_torch_s_own_pinned_memory(daemon):
    loader = loader_of(daemon, pin_memory=True)
    assert all(batch["head"].is_pinned() for batch in loader)
    assert loader.stats()["registered_slots_count"] == 0
    loader.close()
