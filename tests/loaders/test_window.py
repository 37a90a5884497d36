"""Shuffling through a window of shards: the order, and reading in it."""

from __future__ import annotations

import json
import random

import pytest
from fake_session import FakeDaemon, make_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_helpers import fails_on_seven, keys_of, noisy, whole

from gpufeed.cachefs.errors import CapacityError, UsageError
from gpufeed.loaders import DataLoader, ShardDataset, feeder, opener, window
from gpufeed.loaders.order import epoch_shards, mix, rank_rows
from gpufeed.loaders.segments import SHARDS_MAX, Share, slice_of, window_of, window_parts
from gpufeed.loaders.segmentstream import extents_needed

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

COUNTS = [7, 13, 0, 9, 30, 1, 22, 40, 5, 5, 60]  # 192


def sequence(counts, shards, share=None, epoch=0) -> list[tuple[int, int]]:
    """(shard, sample) in order, from the pure functions alone."""
    order = epoch_shards(len(counts), seed=5, epoch=epoch, shuffle="shards")
    key = mix(5, epoch)
    parts = list(window_parts(order, counts, shards, key=key, share=share or Share()))
    if not parts:
        return []
    found = []
    whole, places = parts[0].epoch, {part.place: part.shard for part in parts}
    offset = whole.offset
    for segment in range(whole.first, whole.last + 1):
        members = [places[place] for place in whole.members(segment)]
        slices = whole.slices(segment, [counts[shard] for shard in members])
        which, number = whole.permuted(segment, offset, slices)
        found += [(members[w], int(i)) for w, i in zip(which, number, strict=True)]
        offset += sum(end - begin for begin, end in slices)
    return found


counts_lists = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@given(counts_lists, st.integers(1, SHARDS_MAX), st.integers(0, 5))
def test_an_epoch_has_each_sample_once(counts, shards, epoch):
    found = sequence(counts, shards, epoch=epoch)
    assert sorted(found) == [(s, i) for s, count in enumerate(counts) for i in range(count)]


@given(counts_lists, st.integers(1, 8), st.integers(1, 40), st.data())
def test_ranks_make_up_the_global_batches_from_any_start(counts, shards, size, data):
    whole_epoch = sequence(counts, shards)
    start = data.draw(st.integers(0, len(whole_epoch)))
    world_size = data.draw(st.integers(1, min(size, 16)))
    steps = (len(whole_epoch) - start) // size
    batches = [[] for _ in range(steps)]
    for rank in range(world_size):
        rows = rank_rows(size, rank=rank, world_size=world_size)
        got = sequence(counts, shards, Share(rows, start, steps))
        assert len(got) == steps * rows.count
        for step in range(steps):
            batches[step] += got[step * rows.count : (step + 1) * rows.count]
    want = whole_epoch[start : start + steps * size]
    assert [sample for batch in batches for sample in batch] == want
    assert sequence(counts, shards, Share(start=start)) == whole_epoch[start:]


def test_each_segment_mixes_the_next_slice_of_each_live_shard():
    counts = [16] * 40
    order = epoch_shards(40, seed=5, epoch=0, shuffle="shards").tolist()
    found = sequence(counts, 8)
    at = 0
    for segment in range(40 + 7):
        members = order[max(0, segment - 7) : segment + 1]
        samples = found[at : at + 2 * len(members)]
        at += len(samples)
        firsts = {shard: 2 * (segment - order.index(shard)) for shard in members}
        want = {(shard, first + i) for shard, first in firsts.items() for i in range(2)}
        assert set(samples) == want
    assert at == len(found)


def test_the_first_batch_needs_only_the_beginning_of_one_shard():
    first = sequence([1000] * 8, 4)[:250]
    assert len({shard for shard, _ in first}) == 1
    assert sorted(number for _, number in first) == list(range(250))
    assert (slice_of(10, 0, 4), slice_of(10, 3, 4)) == ((0, 2), (7, 10))


def test_the_order_of_a_version_never_changes():
    # A running job must not see another order after an upgrade: change ORDER_VERSION instead.
    found = sequence([3, 20, 5, 4], 2)
    assert found[:6] == [(2, 0), (2, 1), (0, 0), (2, 2), (2, 3), (2, 4)]
    assert found[-6:] == [(1, 15), (1, 17), (1, 14), (1, 19), (1, 16), (1, 10)]


@pytest.mark.parametrize("shuffle", ["window(0)", "window(65)", "window(x)", "global", ""])
def test_what_is_no_shuffle_is_refused(shuffle):
    with pytest.raises(UsageError, match=r"window"):
        ShardDataset("fake://", shuffle=shuffle)
    assert window_of("shards") == 0
    assert window(7) == "window(7)"


# --- reading --------------------------------------------------------------------------------------


class Job:
    def __init__(self, counts=COUNTS, **options) -> None:
        self.daemon = FakeDaemon(make_shards(counts), **{"slots": 1024, **options})
        self.loaders: list[DataLoader] = []

    def loader(self, decode=whole, *, shards=4, world=(0, 1), state=None, dataset=None, **options):
        made = ShardDataset(
            "fake://", decode=decode, seed=4, shuffle=window(shards), **(dataset or {})
        )
        loader = DataLoader(made, session_factory=self.daemon.open_session, **options)
        self.loaders.append(loader)
        if world != (0, 1):
            loader.set_world(*world)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        return loader

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()
        self.daemon.close()


@pytest.fixture
def make():
    jobs: list[Job] = []

    def one(*arguments, **options):
        jobs.append(Job(*arguments, **options))
        return jobs[-1]

    yield one
    for job in jobs:
        job.close()


@pytest.mark.parametrize("indexed", [False, True], ids=["cold", "indexed"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_are_the_order_whether_counts_are_known_or_not(make, indexed, workers, persistent):
    options = {"persistent_workers": True} if persistent and workers else {}
    loader = make(indexed=indexed).loader(batch_size=8, num_workers=workers, **options)
    reference = make(indexed=True).loader(batch_size=3)
    epochs = [keys_of(loader) for _ in range(3)]
    assert epochs == [keys_of(reference) for _ in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(set(epochs[2]))
    assert len(epochs[0]) == sum(COUNTS)
    assert epochs[0] != epochs[1]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.integers(0, 9)
)
def test_it_is_gone_on_with_on_other_ranks(shards, worlds, later, batch, stop):
    job = Job()
    try:
        straight = keys_of(job.loader(shards=shards, batch_size=8))
        taken = []
        state = None
        for world_size in (worlds, later):
            ranks = [
                job.loader(shards=shards, world=(r, world_size), state=state, batch_size=batch)
                for r in range(world_size)
            ]
            iterators = [iter(loader) for loader in ranks]
            steps = min(stop, (len(straight) - len(taken)) // (batch * world_size))
            for _ in range(steps):
                taken += [key for iterator in iterators for key in next(iterator)["key"]]
            state = ranks[0].state_dict()
            assert state["samples"] == len(taken)
        assert taken == straight[: len(taken)]
    finally:
        job.close()


def test_transforms_and_samples_left_out(make):
    job = make()
    rows = [row for batch in job.loader(noisy, batch_size=8, num_workers=2)
            for row in zip(*batch, strict=True)]  # fmt: skip
    assert rows == [row for batch in job.loader(noisy, batch_size=5)
                    for row in zip(*batch, strict=True)]  # fmt: skip
    skipping = job.loader(fails_on_seven, batch_size=8, dataset={"on_error": "skip"})
    keys = keys_of(skipping)
    assert keys == [key for key in keys_of(job.loader(batch_size=8)) if not key.endswith("7")]


def test_a_daemon_that_goes_away_is_gone_on_with(make):
    job = make()
    want = keys_of(job.loader(batch_size=8))
    draw = random.Random(1)
    job.daemon.lives = [draw.randint(0, 8) for _ in range(10)]
    loader = job.loader(batch_size=8, num_workers=2)
    assert keys_of(loader) == want
    assert not job.daemon.lives


def test_the_window_that_a_block_needs_is_asked_for_whole(make):
    job = make(window_extents=4)
    loader = job.loader(batch_size=8)
    assert len(keys_of(loader)) == sum(COUNTS)
    sizes = [len(shard.data) for shard in job.daemon.shards]
    extent = job.daemon.extent_bytes
    assert extents_needed(sizes, extent, 8) > 4
    assert job.daemon.sessions == 2


def test_what_there_is_no_room_for_is_refused_with_the_numbers(make):
    job = make(slots=4, window_extents=2)
    with pytest.raises(CapacityError, match="needed whole"):
        iter(job.loader(batch_size=8))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 8), st.booleans(),
    st.integers(0, 400), st.integers(1, 3),
)  # fmt: skip
def test_the_room_that_is_asked_for_is_enough(counts, shards, indexed, start, world_size):
    """Nothing waits for ever, from wherever it begins, with not an extent more than is needed."""
    shards_made = make_shards(counts)
    job = Job(counts, indexed=indexed, window_extents=1)
    needed = extents_needed([len(s.data) for s in shards_made], job.daemon.extent_bytes, shards)
    job.daemon.slots = needed  # so that one more shard's is refused
    job.daemon.free = list(range(needed))
    try:
        place = min(start, sum(counts))
        options = {"shards": shards, "batch_size": 4, "world": (0, world_size)}
        keys = keys_of(job.loader(**options))
        assert len(keys) == (
            sum(counts) if world_size == 1 else sum(counts) // (4 * world_size) * 4
        )
        job.close()
        job = Job(counts, indexed=indexed, slots=4096)
        told = job.loader(**options).state_dict() | {"samples": place}
        assert len(keys_of(job.loader(state=told, **options))) == (
            sum(counts) - place if world_size == 1
            else (sum(counts) - place) // (4 * world_size) * 4
        )  # fmt: skip
    finally:
        job.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_that_turn_out_longer_than_they_were_said_to_be(make, monkeypatch, workers):
    # As compressed ones do, whose length is known at their end.
    monkeypatch.setattr(opener, "extents_needed", lambda *_: -99)
    monkeypatch.setattr(feeder, "SHORT_WAIT_S", 0.05)
    job = make(window_extents=4)
    with pytest.raises(
        CapacityError, match=r"4 extents are full before a segment of .*window\(4\)"
    ):
        keys_of(job.loader(batch_size=8, num_workers=workers))


def test_every_extent_is_released_and_none_twice(make):
    job = make(indexed=True, scatter=True)
    loaders = [job.loader(world=(rank, 3), batch_size=4, num_workers=rank % 2) for rank in range(3)]
    for iterator in [iter(loader) for loader in loaders]:
        for _ in iterator:
            pass
    for loader in loaders:
        loader.close()
    assert sorted(job.daemon.free) == list(range(job.daemon.slots))
