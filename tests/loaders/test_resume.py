"""Going on where a job stopped: the same samples as never having stopped, on any topology."""

from __future__ import annotations

import json
import random
import threading

import pytest
import torch
from fake_session import FakeDaemon, FakeSession, make_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_helpers import fails_on_seven, keys_of, noisy, whole

from gpufeed.cachefs import reconnect
from gpufeed.cachefs.errors import DaemonUnavailableError, ShardChangedError, UsageError
from gpufeed.loaders import DataLoader, ShardDataset
from gpufeed.loaders.order import ORDER_VERSION
from gpufeed.loaders.place import BEHIND_MAX
from gpufeed.loaders.resume import Cursor, OrderState

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

COUNTS = [7, 13, 0, 9, 30, 1, 22]  # 82


class Job:
    """Makes loaders over one fake daemon, which indexes whatever it is asked to."""

    def __init__(self, counts=COUNTS) -> None:
        self.daemon = FakeDaemon(make_shards(counts), slots=1024)
        self.loaders: list[DataLoader] = []

    def loader(self, decode=whole, *, world=(0, 1), state=None, dataset=None, **options):
        made = ShardDataset("fake://", decode=decode, seed=4, **(dataset or {}))
        loader = DataLoader(made, session_factory=self.daemon.open_session, **options)
        self.loaders.append(loader)
        if world != (0, 1):
            loader.set_world(*world)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        return loader

    def ranks(self, world_size, **options):
        return [self.loader(world=(rank, world_size), **options) for rank in range(world_size)]

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()
        self.daemon.close()


@pytest.fixture
def job():
    job = Job()
    yield job
    job.close()


def steps_of(loaders, count=None) -> list[list[str]]:
    """The keys of global batches: each rank's part of a step, in the order of ranks."""
    iterators = [iter(loader) for loader in loaders]
    steps = []
    while count is None or len(steps) < count:
        parts = [next(iterator, None) for iterator in iterators]
        if parts[0] is None:
            assert all(part is None for part in parts), "ranks make different numbers of steps"
            break
        steps.append([key for part in parts for key in part["key"]])
    return steps


@pytest.mark.parametrize("stop", [0, 1, 4, 9, 10, 11])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_at_the_sample_with_other_workers(job, stop, workers):
    first = job.loader(batch_size=8, num_workers=workers)
    iterator = iter(first)
    taken = [next(iterator)["key"] for _ in range(stop)]
    state = first.state_dict()
    assert state["epoch"] == 0
    assert state["samples"] == min(8 * stop, 82)
    again = job.loader(batch_size=8, num_workers=2 - workers, prefetch_factor=None, state=state)
    rest = [batch["key"] for batch in again]
    whole_epoch = job.loader(batch_size=8)
    assert taken + rest == [batch["key"] for batch in whole_epoch]
    assert keys_of(again) == keys_of(whole_epoch), "the epoch after it"


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 12)
)
def test_other_worlds_and_other_batches_go_on(worlds, later, batch, later_batch, stop):
    job = Job()
    try:
        loaders = job.ranks(worlds, batch_size=batch)
        steps = steps_of(loaders, min(stop, 82 // (worlds * batch)))
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        rest = steps_of(job.ranks(later, batch_size=later_batch, state=states[0]))
        taken = [key for step in (*steps, *rest) for key in step]
        assert taken == keys_of(job.loader(batch_size=8))[: len(taken)]
        assert 82 - len(taken) < max(worlds * batch, later * later_batch)
    finally:
        job.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 12])
def test_a_global_batch_does_not_depend_on_the_world(job, world_size):
    options = {"global_batch_size": 12, "uneven": "allow", "drop_last": True}
    whole_epoch = steps_of([job.loader(**options)])
    assert steps_of(job.ranks(world_size, **options)) == whole_epoch


def test_a_world_that_does_not_divide_the_batch_is_refused(job):
    with pytest.raises(UsageError, match=r'12 samples cannot be divided among 5.*uneven="allow"'):
        job.loader(world=(1, 5), global_batch_size=12)
    with pytest.raises(UsageError, match="among 13 ranks"):
        job.loader(world=(1, 13), global_batch_size=12, uneven="allow")
    with pytest.raises(UsageError, match="give one of them"):
        job.loader(batch_size=4, global_batch_size=12)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_world_changes_between_two_steps_without_a_restart(job, workers):
    options = {"global_batch_size": 6, "num_workers": workers}
    want = steps_of([job.loader(drop_last=True, **options)])
    loaders = job.ranks(2, **options)
    iterators = [iter(loader) for loader in loaders]
    got = [[key for it in iterators for key in next(it)["key"]] for _ in range(3)]
    late = job.loader(world=(2, 3), state=loaders[0].state_dict(), **options)
    for rank, loader in enumerate(loaders):
        loader.set_world(rank, 3)
    iterators.append(iter(late))
    got += [[key for it in iterators for key in next(it)["key"]] for _ in range(4)]
    loaders[0].set_world(0, 1)
    got += [list(batch["key"]) for batch in iterators[0]]
    assert got[: len(want)] == want


def test_what_is_made_ahead_does_not_count_and_what_is_fetched_ahead_need_not(job):
    loader = job.loader(batch_size=8, num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    assert loader.state_dict()["samples"] == 40
    assert loader.state_dict(behind=1)["samples"] == 32
    assert loader.state_dict(behind=5)["samples"] == 0
    with pytest.raises(UsageError, match="5 were taken since the last iter"):
        loader.state_dict(behind=6)


def test_places_that_are_kept_are_bounded(job):
    loader = job.loader(batch_size=2)
    for _ in loader:
        pass
    loader.state_dict(behind=BEHIND_MAX)
    with pytest.raises(UsageError, match=f"last {BEHIND_MAX} are kept"):
        loader.state_dict(behind=BEHIND_MAX + 1)


def test_after_the_last_batch_and_after_the_epoch(job):
    loader = job.loader(batch_size=8)
    iterator = iter(loader)
    for _ in range(11):
        next(iterator)
    at_end = loader.state_dict()
    assert (at_end["epoch"], at_end["samples"]) == (0, 82)
    assert next(iterator, None) is None
    after = loader.state_dict()
    assert (after["epoch"], after["samples"]) == (1, 0)
    second = keys_of(loader)
    assert keys_of(job.loader(batch_size=8, state=after)) == second
    again = job.loader(batch_size=8, state=at_end)
    assert keys_of(again) == []
    assert keys_of(again) == second


def test_a_later_epoch_goes_on_and_the_one_after_it_follows(job):
    loader = job.loader(batch_size=8, num_workers=1, persistent_workers=True)
    for _ in range(3):
        keys_of(loader)
    iterator = iter(loader)
    taken = [key for _ in range(2) for key in next(iterator)["key"]]
    state = loader.state_dict()
    assert state["epoch"] == 3
    again = job.loader(batch_size=8, num_workers=1, persistent_workers=True, state=state)
    assert taken + keys_of(again) == taken + [k for batch in iterator for k in batch["key"]]
    assert keys_of(again) == keys_of(loader)


def test_the_transforms_of_a_sample_are_the_same(job):
    loader = job.loader(noisy, batch_size=8, num_workers=2)
    want = [row for batch in loader for row in zip(*batch, strict=True)]
    first = job.loader(noisy, batch_size=8)
    iterator = iter(first)
    got = [row for _ in range(4) for row in zip(*next(iterator), strict=True)]
    again = job.loader(noisy, batch_size=5, num_workers=2, state=first.state_dict())
    got += [row for batch in again for row in zip(*batch, strict=True)]
    assert got == want


def test_samples_that_are_left_out_are_counted_in(job):
    options = {"dataset": {"on_error": "skip"}}
    want = keys_of(job.loader(fails_on_seven, batch_size=8, **options))
    first = job.loader(fails_on_seven, batch_size=8, **options)
    iterator = iter(first)
    got = [key for _ in range(5) for key in next(iterator)["key"]]
    got += keys_of(job.loader(fails_on_seven, batch_size=8, state=first.state_dict(), **options))
    assert got == want


@pytest.mark.parametrize("stop", [1, 7, 15, 16, 17, 40, 82])
def test_samples_one_by_one(job, stop):
    options = {"batch_size": None, "dataset": {"on_error": "skip"}}
    want = [sample["key"] for sample in job.loader(fails_on_seven, **options)]
    first = job.loader(fails_on_seven, **options)
    iterator = iter(first)
    stop = min(stop, len(want))
    got = [next(iterator)["key"] for _ in range(stop)]
    again = job.loader(fails_on_seven, state=first.state_dict(), **options)
    assert got + [sample["key"] for sample in again] == want


def test_one_by_one_on_several_ranks_only_where_all_stand_alike(job):
    loader = job.loader(world=(0, 2), batch_size=None)
    iterator = iter(loader)
    for _ in range(16):
        next(iterator)
    assert loader.state_dict()["samples"] == 32
    next(iterator)
    with pytest.raises(UsageError, match="15 are left"):
        loader.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_daemon_that_goes_away_is_gone_on_with(job, workers, persistent):
    want = [keys_of(job.loader(batch_size=8)), keys_of(job.loader(batch_size=8, state=state(1)))]
    draw = random.Random(7)
    job.daemon.lives = [draw.randint(0, 5) for _ in range(12)]
    options = {"persistent_workers": True} if persistent and workers else {}
    loader = job.loader(batch_size=8, num_workers=workers, **options)
    iterator = iter(loader)
    job.daemon.absences = 3
    first = [key for batch in iterator for key in batch["key"]]
    assert [first, keys_of(loader)] == want
    assert not job.daemon.lives, "the last of them was never lost"
    assert loader.stats()["samples"] == 2 * 82, "what was made and not taken was counted"
    assert loader.stats()["reconnects"] >= 12 + 3


def test_a_daemon_that_went_away_between_two_epochs_is_sought(job):
    loader = job.loader(batch_size=8)
    keys_of(loader)
    loader._engine._resources.feeder.failed = True  # as its thread notes when the session ends
    job.daemon.absences = 3
    assert keys_of(loader) == keys_of(job.loader(batch_size=8, state=state(1)))
    assert loader.stats()["reconnects"] == 3


def test_a_daemon_that_was_never_there_is_an_error_at_once(job):
    job.daemon.absences = 1
    with pytest.raises(DaemonUnavailableError):
        iter(job.loader(batch_size=8))


def test_an_epoch_that_could_not_be_begun_is_the_next_one_still(job, monkeypatch):
    monkeypatch.setattr(reconnect, "LIMIT_S", 0.0)
    loader = job.loader(batch_size=8)
    keys_of(loader)
    loader._engine._resources.feeder.failed = True
    job.daemon.absences = 1 << 30
    for _ in range(2):
        with pytest.raises(DaemonUnavailableError):
            iter(loader)
    job.daemon.absences = 0
    assert keys_of(loader) == keys_of(job.loader(batch_size=8, state=state(1)))


def test_batches_that_are_held_stay_when_the_world_changes_their_size(job):
    loader = job.loader(global_batch_size=6, num_workers=2)
    iterator = iter(loader)
    held = [next(iterator) for _ in range(3)]
    copies = [batch["head"].clone() for batch in held]
    for world_size in (2, 3, 1):
        loader.set_world(0, world_size)
        held.append(next(iterator))
        copies.append(held[-1]["head"].clone())
        assert len(held[-1]["head"]) == 6 // world_size
    for batch, copy in zip(held, copies, strict=True):
        assert torch.equal(batch["head"], copy)


def test_a_state_after_the_dataset_changed_is_of_the_dataset_before(job):
    loader = job.loader(batch_size=8)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    before = loader.state_dict()
    job.daemon.shards.insert(0, make_shards([1] * 8)[-1])
    loader.set_world(0, 1)
    with pytest.raises(ShardChangedError):
        next(iterator)
    assert loader.state_dict() == before
    with pytest.raises(UsageError, match="manifest"):
        iter(job.loader(batch_size=8, state=before))


def test_counts_are_not_carried_to_another_dataset(job):
    loader = job.loader(batch_size=8)
    assert len(keys_of(loader)) == 82
    job.daemon.shards[1] = make_shards([3] * 9)[-1]
    loader._engine._resources.feeder.failed = True
    assert len(keys_of(loader)) == 82 - 13 + 3


def test_the_world_changes_between_two_batches_only(job):
    loader = job.loader(batch_size=None)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    with pytest.raises(UsageError, match=r"after every 16 samples.*11 are left"):
        loader.set_world(0, 2)


def test_the_world_changes_twice_and_after_the_end(job):
    loader = job.loader(global_batch_size=12)
    iterator = iter(loader)
    next(iterator)
    loader.set_world(0, 2)
    loader.set_world(0, 3)
    assert len(next(iterator)["key"]) == 4
    for _ in iterator:
        pass
    loader.set_world(0, 1)
    assert next(iterator, None) is None
    assert loader.state_dict()["epoch"] == 1


def test_batches_that_were_passed_over_are_no_batches_to_go_behind(job):
    options = {"batch_size": 1, "dataset": {"on_error": "skip"}}
    loader = job.loader(fails_on_seven, **options)
    iterator = iter(loader)
    got = [next(iterator)["key"][0] for _ in range(30)]
    assert loader._engine.stats.skipped_count
    for behind in range(BEHIND_MAX + 1):
        told = loader.state_dict(behind=behind)
        again = iter(job.loader(fails_on_seven, state=told, **options))
        ahead = [next(again)["key"][0] for _ in range(behind)]
        assert ahead == got[len(got) - behind :]


def test_an_iterator_that_was_replaced_gives_nothing_more(job):
    loader = job.loader(batch_size=None)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(UsageError, match="ended by a later iter"):
        next(first)
    assert loader.state_dict()["samples"] == 0
    next(second)
    assert loader.state_dict()["samples"] == 1


def test_an_iterator_whose_successor_could_not_begin_is_over(job, monkeypatch):
    monkeypatch.setattr(reconnect, "LIMIT_S", 0.0)
    loader = job.loader(batch_size=8)
    first = iter(loader)
    next(first)
    job.daemon.absences = 1 << 30
    with pytest.raises(DaemonUnavailableError):
        iter(loader)
    with pytest.raises(UsageError, match="ended by a later iter"):
        next(first)


def test_a_daemon_lost_while_it_counts_is_sought_again(job, monkeypatch):
    told = state(samples=40)
    real, calls = FakeSession.index_dataset, []

    def index(session, dataset, progress=None):
        calls.append(session)
        if len(calls) < 3:
            raise DaemonUnavailableError("lost")
        return real(session, dataset, progress)

    monkeypatch.setattr(FakeSession, "index_dataset", index)
    loader = job.loader(batch_size=8, state=told)
    assert len(keys_of(loader)) == 42
    assert len(set(map(id, calls))) == 3, "the same lost session was asked again"


def test_a_loader_that_its_own_feeder_collects_is_closed(job):
    loader = job.loader(batch_size=8, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    resources = loader._engine._resources
    done = threading.Event()
    real = resources.feeder.advance

    def advance():
        if not done.is_set():
            resources.end()
            done.set()
        return real()

    resources.feeder.advance = advance
    resources.feeder.wake()
    assert done.wait(20)
    for thread in threading.enumerate():
        if thread.name in ("gpufeed-end", "gpufeed-feeder"):
            thread.join(20)
    assert resources.feeder is None
    assert resources.pool is None
    assert resources.ring.fd == -1


def test_a_daemon_that_stays_away_is_given_up_with_a_reason(job, monkeypatch):
    monkeypatch.setattr(reconnect, "LIMIT_S", 0.2)
    loader = job.loader(batch_size=8)
    iterator = iter(loader)
    next(iterator)
    job.daemon.lives, job.daemon.absences = [], 1 << 30
    loader.set_world(0, 1)
    with pytest.raises(DaemonUnavailableError, match="sought for 0 s: no fake daemon answers"):
        next(iterator)
    job.daemon.absences = 0
    again = job.loader(batch_size=8, state=loader.state_dict())
    assert len(keys_of(again)) == 74


def test_a_dataset_that_changed_while_the_daemon_was_away_is_not_gone_on_with(job):
    loader = job.loader(batch_size=8)
    iterator = iter(loader)
    next(iterator)
    job.daemon.shards.append(make_shards([1] * 8)[-1])
    loader.set_world(0, 1)
    with pytest.raises(ShardChangedError, match="changed within epoch 0"):
        next(iterator)
    loader.set_epoch(0)
    assert len(keys_of(loader)) == 83


def test_an_iterator_that_is_left_begins_the_next_epoch(job):
    loader = job.loader(batch_size=8)
    next(iter(loader))
    assert keys_of(loader) == keys_of(job.loader(batch_size=8, state=state(epoch=1)))
    loader.set_epoch(0)
    assert keys_of(loader) == keys_of(job.loader(batch_size=8))


def test_the_epoch_that_the_dataset_was_told_is_in_the_state(job):
    loader = job.loader(batch_size=8)
    loader.dataset.set_epoch(5)
    assert loader.state_dict()["epoch"] == 5
    assert keys_of(loader) == keys_of(job.loader(batch_size=8, state=state(epoch=5)))


def test_naming_the_epoch_of_the_state_keeps_the_place(job):
    loader = job.loader(batch_size=8, state=state(epoch=2, samples=40))
    loader.set_epoch(2)
    assert len(keys_of(loader)) == 42
    loader.load_state_dict(state(epoch=2, samples=40))
    loader.set_epoch(3)
    assert len(keys_of(loader)) == 82


def state(epoch=0, samples=0, **changes):
    order = OrderState(cursor=Cursor(epoch, samples), seed=4, shuffle="shards", manifest_hash="")
    return order.pack() | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 5}, "seed=5, the dataset has seed=4"),
        ({"shuffle": "none"}, "shuffle='none', the dataset has shuffle='shards'"),
        ({"order_version": 99}, f"order version 99, this software makes {ORDER_VERSION}"),
        ({"gpufeed_order_state": 7}, "gpufeed_order_state is 7"),
        ({"samples": -1}, "must not be negative"),
        ({"samples": None}, "without"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(job, changes, message):
    with pytest.raises(UsageError, match=message):
        job.loader(state=state() | changes)
    with pytest.raises(UsageError, match="is None"):
        job.loader(state={"_num_yielded": 3})


def test_another_dataset_is_refused_before_anything_is_read(job):
    loader = job.loader(state=state(manifest_hash="0" * 64))
    with pytest.raises(UsageError, match="manifest 0000000000000000, this one has"):
        next(iter(loader))


def test_a_place_beyond_the_end_is_refused(job):
    with pytest.raises(UsageError, match="after 83 samples of epoch 1: the dataset has 82"):
        iter(job.loader(state=state(epoch=1, samples=83)))


def test_a_foreign_dataset_has_no_state(job):
    loader = DataLoader([1, 2, 3])
    assert not hasattr(loader, "state_dict")
    assert not hasattr(loader, "load_state_dict")
    with pytest.raises(UsageError, match="needs a ShardDataset"):
        loader.set_world(0, 2)
    with pytest.raises(UsageError, match="global_batch_size needs a ShardDataset"):
        DataLoader([1, 2, 3], global_batch_size=2)


@pytest.mark.parametrize("counts", [[1], [0, 0, 3], [50], [2] * 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_few_shards_and_few_samples_give_every_rank_the_same_steps(counts, world_size):
    job = Job(counts)
    try:
        draw = random.Random(1)
        loaders = job.ranks(world_size, batch_size=draw.randint(1, 3))
        steps = steps_of(loaders)
        keys = [key for step in steps for key in step]
        assert len(set(keys)) == len(keys) <= sum(counts)
    finally:
        job.close()
