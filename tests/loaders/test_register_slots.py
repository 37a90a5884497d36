"""The loader with registered slots over a fake accelerator, and `pin_memory` as torch has it."""

import gc
import warnings

import pytest
import torch
from fake_device import MAIN, FakeHostMemory, FakeStreams
from fake_session import FakeDaemon, make_shards
from loader_helpers import keys_of, whole

from gpufeed.cachefs.errors import DeviceError, UsageError
from gpufeed.loaders import DataLoader, ShardDataset
from gpufeed.loaders.batchslots import take_apart_retired
from gpufeed.loaders.hostmem import PinnedBudget
from gpufeed.loaders.pinning import SlotPinning


@pytest.fixture
def daemon():
    made = FakeDaemon(make_shards([40, 40]))
    yield made
    made.close()


@pytest.fixture
def device(monkeypatch):
    """Streams and memory of the loaders that are made from now on."""
    host, streams = FakeHostMemory(), FakeStreams()

    def pinning():
        return SlotPinning(host, streams, PinnedBudget())

    monkeypatch.setattr("gpufeed.loaders.engine.SlotPinning", pinning)
    return host, streams


def loader_of(daemon, **options):
    dataset = ShardDataset("fake://", decode=whole, shuffle="none")
    return DataLoader(dataset, batch_size=4, session_factory=daemon.open_session, **options)


def copy_later(streams, loader, tensor):
    """A copy that the device makes only when it is told to."""
    ring = loader._engine._resources.ring
    slot = ring.slot_of(tensor.data_ptr())
    if slot is None:
        return [tensor.clone()]
    offset = tensor.data_ptr() - ring._memory.ctypes.data
    raw = ring._mapping
    result = []
    shape, size = tensor.shape, tensor.numel()
    streams.submit(
        MAIN,
        lambda: result.append(
            torch.frombuffer(bytearray(raw[offset : offset + size]), dtype=torch.uint8).view(shape)
        ),
    )
    return result


@pytest.mark.parametrize("num_workers", [0, 2])
def test_copies_that_lag_behind_the_loader_see_their_own_batches(daemon, device, num_workers):
    host, streams = device
    loader = loader_of(daemon, register_slots=True, num_workers=num_workers)
    wanted, copies = [], []
    for epoch in range(3):
        for number, batch in enumerate(loader):
            wanted.append(batch["head"].clone())
            copies.append(copy_later(streams, loader, batch["head"]))
            del batch
            if (number + epoch) % 3 == 0:
                streams.run(MAIN, 2)
    stats = loader.stats()
    assert stats["registered_slots_count"] > 0
    assert stats["registered_bytes"] == sum(host.ranges.values())
    assert stats["gated_copies_count"] > 0
    assert stats["waiting_slots_count"] > 0
    streams.run(MAIN)
    assert len(copies) == 60
    assert all(torch.equal(copy[0], batch) for copy, batch in zip(copies, wanted, strict=True))
    loader.close()
    assert host.ranges == {}
    assert loader.stats()["registered_slots_count"] == 0


def test_a_loader_that_is_closed_with_copies_under_way_lets_go_later(daemon, device):
    host, streams = device
    loader = loader_of(daemon, register_slots=True)
    for batch in loader:
        copy_later(streams, loader, batch["head"])
        del batch
    loader.close()
    assert host.ranges
    streams.run(MAIN)
    take_apart_retired()
    assert host.ranges == {}


def test_a_device_that_failed_is_told_by_the_next_batch(daemon, device):
    host, streams = device
    loader = loader_of(daemon, register_slots=True)
    iterator = iter(loader)
    for _ in range(3):
        copy_later(streams, loader, next(iterator)["head"])
    streams.broken = True
    with pytest.raises(DeviceError, match="fake device"):
        next(iterator)
    streams.broken = False
    streams.run(MAIN)
    assert len(keys_of(loader)) == 80
    del iterator
    loader.close()
    gc.collect()
    assert host.ranges == {}


def test_without_cuda_registering_changes_nothing(daemon):
    loader = loader_of(daemon, register_slots=True, num_workers=2)
    assert len(keys_of(loader)) == 80
    stats = loader.stats()
    assert stats["registered_slots_count"] == stats["register_refused_count"] == 0
    assert stats["waiting_slots_count"] == stats["gated_copies_count"] == 0
    loader.close()


def test_other_datasets_have_no_slots_to_register():
    with pytest.raises(UsageError, match="pin_memory=True"):
        DataLoader([1, 2, 3], register_slots=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_pin_memory_without_an_accelerator_warns_as_torch_does(daemon):
    loader = loader_of(daemon, pin_memory=True)
    told = []
    for one in (torch.utils.data.DataLoader([1], pin_memory=True), loader):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = list(one)
        told.append([(w.category, str(w.message)) for w in caught if "pin" in str(w.message)])
    assert told[0] == told[1] != []
    assert not any(batch["head"].is_pinned() for batch in batches)
    loader.close()


def test_pin_memory_gives_torch_every_batch_to_pin(daemon, monkeypatch):
    module = "torch.utils.data._utils.pin_memory.pin_memory"
    monkeypatch.setattr(module, lambda batch: ("pinned", batch))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    loader = loader_of(daemon, pin_memory=True)
    assert all(mark == "pinned" for mark, _ in loader)
    loader.close()
