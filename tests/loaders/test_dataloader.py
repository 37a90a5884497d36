import gc
import multiprocessing
import pickle
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from fake_session import FakeDaemon, make_shards
from loader_helpers import (
    exact,
    expected_keys,
    fails_on_seven,
    keys_of,
    list_collate,
    noisy,
    pair_collate,
    pid_of,
    slow_odd,
    variable,
    whole,
)
from open_files import open_fds
from torch.utils.data import default_collate

from gpufeed.cachefs.errors import (
    CorruptSampleError,
    OriginUnavailableError,
    UsageError,
    WorkerError,
)
from gpufeed.loaders import DataLoader, ShardDataset, World
from gpufeed.loaders.engine import Engine, EngineConfig, iterate_samples
from gpufeed.loaders.feeder import PLAN_AHEAD_SHARDS
from gpufeed.loaders.opener import BatchSize
from gpufeed.loaders.resume import Cursor

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture
def daemon():
    daemon = FakeDaemon(make_shards([7, 13, 0, 9, 30, 1, 22]))
    yield daemon
    daemon.close()


@pytest.fixture
def load(daemon):
    loaders = []

    def make(decode=whole, *, dataset=None, **options):
        dataset = ShardDataset("fake://", decode=decode, seed=4, **(dataset or {}))
        loader = DataLoader(dataset, session_factory=daemon.open_session, **options)
        loaders.append(loader)
        return loader

    yield make
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_three_epochs_are_the_order_whatever_the_workers(daemon, load, workers, persistent):
    loader = load(
        slow_odd, batch_size=8, num_workers=workers, persistent_workers=persistent and workers > 0
    )
    for epoch in range(3):
        assert keys_of(loader) == expected_keys(daemon, seed=4, epoch=epoch)
    assert daemon.sessions == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_what_torch_collates_of_the_same_samples(daemon, load, workers):
    loader = load(batch_size=8, num_workers=workers, dataset={"shuffle": "none"})
    samples = [whole(sample) for sample in daemon.samples()]
    for number, batch in enumerate(loader):
        want = default_collate(samples[number * 8 : number * 8 + 8])
        assert list(batch) == list(want)
        for name, value in want.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(batch[name], value)
                assert batch[name].dtype == value.dtype
            else:
                assert batch[name] == value


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("window", [3, 16])
@pytest.mark.parametrize("workers", [0, 2])
def test_fields_are_the_bytes_of_the_source(workers, window, scatter):
    daemon = FakeDaemon(
        make_shards([5, 20, 11], size=40_000), window_extents=window, scatter=scatter
    )
    dataset = ShardDataset("fake://", decode=exact, shuffle="none")
    loader = DataLoader(
        dataset, batch_size=4, num_workers=workers, session_factory=daemon.open_session
    )
    got = [
        (key, data, label)
        for batch in loader
        for key, data, label in zip(batch["key"], batch["bin"], batch["cls"], strict=True)
    ]
    assert got == [(s["__key__"], s["bin"], s["cls"]) for s in daemon.samples()]
    assert (loader.stats()["straddled_count"] > 0) == scatter
    loader.close()
    daemon.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_without_decode_samples_are_dicts_of_bytes(daemon, load, workers):
    loader = load(None, batch_size=None, num_workers=workers, dataset={"shuffle": "none"})
    assert list(loader) == daemon.samples()
    assert multiprocessing.active_children() == []


def test_a_dataset_iterates_by_itself(daemon):
    dataset = ShardDataset("fake://", shuffle="none")
    assert list(iterate_samples(dataset, 0, daemon.open_session)) == daemon.samples()


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_changing_shape_go_through_the_users_collate(daemon, load, workers):
    loader = load(
        variable, batch_size=8, num_workers=workers, collate_fn=list_collate,
        dataset={"shuffle": "none"},
    )  # fmt: skip
    got = [array.tobytes() for batch in loader for array in batch]
    assert got == [sample["bin"] for sample in daemon.samples()]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_changing_shape_without_a_collate_raise_as_in_torch(load, workers):
    loader = load(variable, batch_size=8, num_workers=workers)
    with pytest.raises(RuntimeError, match="equal size"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_users_collate_runs_in_the_worker_and_its_types_stay(daemon, load, workers):
    loader = load(whole, batch_size=8, num_workers=workers, collate_fn=pair_collate)
    keys, pids = [], set()
    held = []
    for batch in loader:
        assert type(batch) is tuple
        heads, names, size, pid = batch
        assert heads.shape == (size, 64)
        held.append((heads, heads.clone()))
        keys += names
        pids.add(pid)
    assert keys == expected_keys(daemon, seed=4, epoch=0)
    assert all(torch.equal(left, right) for left, right in held)
    assert (len(pids) == 2) == (workers == 2)


def test_held_batches_never_change(daemon, load):
    loader = load(slow_odd, batch_size=3, num_workers=2)
    held = [batch for _ in range(3) for batch in loader]
    copies = loader.stats()["heap_copies_count"]
    assert copies > 0
    by_key = {sample["__key__"]: whole(sample) for sample in daemon.samples()}
    for batch in held:
        for row, key in enumerate(batch["key"]):
            assert batch["head"][row].tolist() == by_key[key]["head"].tolist()
            assert batch["size"][row].item() == by_key[key]["size"]


def test_holding_nothing_costs_no_copy(load):
    loader = load(batch_size=3, num_workers=2)
    for _ in range(3):
        for batch in loader:
            del batch
    assert loader.stats()["heap_copies_count"] == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("collate", [None, pair_collate])
def test_the_last_batch_is_smaller_or_dropped(load, workers, drop, collate):
    loader = load(
        batch_size=8, num_workers=workers, drop_last=drop, collate_fn=collate,
        persistent_workers=workers > 0,
    )  # fmt: skip
    for _ in range(2):
        sizes = [len(batch[0] if collate else batch["cls"]) for batch in loader]
        assert sizes == [8] * 10 + ([] if drop else [2])
    assert len(loader) == (10 if drop else 11)


def test_the_length_is_unknown_until_the_samples_are_counted(daemon, load):
    loader = load(batch_size=8)
    with pytest.raises(TypeError):
        len(loader)
    list(loader)
    assert len(loader) == 11
    daemon.indexed = True
    assert len(load(batch_size=8)) == 11
    assert len(load(batch_size=None)) == 82


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_randomness_belongs_to_the_sample(daemon, load, workers):
    values = {}
    loader = load(noisy, batch_size=5, num_workers=workers)
    epochs = []
    for _ in range(2):
        rows = {}
        for one, two, three, keys in loader:
            for row, key in enumerate(keys):
                rows[key] = (one[row].item(), two[row].item(), three[row].item())
        epochs.append(rows)
    assert len({value[0] for value in epochs[0].values()}) == 82
    assert all(epochs[0][key] != epochs[1][key] for key in epochs[0])
    for sample in iterate_samples(
        ShardDataset("fake://", decode=noisy, seed=4), 0, daemon.open_session
    ):
        values[sample[3]] = tuple(float(v) for v in sample[:3])
    assert values == epochs[0]


def test_decoding_in_the_callers_thread_keeps_the_callers_random_state(load):
    loader = load(noisy, batch_size=5, num_workers=0)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    want = (random.random(), np.random.rand(), torch.rand(()).item())
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    list(loader)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == want


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_sample_ends_the_epoch_at_its_batch_and_is_named(daemon, load, workers):
    loader = load(fails_on_seven, batch_size=8, num_workers=workers, dataset={"shuffle": "none"})
    iterator = iter(loader)
    with pytest.raises(WorkerError, match=r"000007.*shard-0001\.tar") as caught:
        next(iterator)
    assert isinstance(caught.value.__cause__, CorruptSampleError)
    assert "fails_on_seven" in str(caught.value)
    with pytest.raises(StopIteration):
        next(iterator)
    loader.set_epoch(0)
    with pytest.raises(WorkerError):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [None, pair_collate])
def test_failing_samples_are_skipped_and_counted(daemon, load, workers, collate):
    loader = load(
        fails_on_seven, batch_size=8, num_workers=workers, collate_fn=collate,
        dataset={"shuffle": "none", "on_error": "skip"},
    )  # fmt: skip
    batches = list(loader)
    keys = [key for batch in batches for key in (batch[1] if collate else batch["key"])]
    assert keys == [s["__key__"] for s in daemon.samples() if not s["__key__"].endswith("7")]
    assert loader.stats()["skipped_count"] == 8
    # What is left out leaves a hole: later batches are composed as if nothing had failed.
    first = [len(batch[1] if collate else batch["key"]) for batch in batches[:3]]
    assert first == [7, 8, 7]


def test_a_batch_of_failures_alone_is_left_out(daemon, load):
    loader = load(
        fails_on_seven, batch_size=1, num_workers=2, dataset={"shuffle": "none", "on_error": "skip"}
    )
    assert keys_of(loader) == [
        s["__key__"] for s in daemon.samples() if not s["__key__"].endswith("7")
    ]


def test_more_skipped_samples_than_the_limit_are_an_error(load):
    loader = load(
        fails_on_seven, batch_size=8, num_workers=2, dataset={"on_error": "skip", "skip_limit": 3}
    )
    with pytest.raises(CorruptSampleError, match="skip_limit of 3"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_leaving_an_epoch_early_and_iterating_again_starts_the_next(
    daemon, load, workers, persistent
):
    loader = load(batch_size=4, num_workers=workers, persistent_workers=persistent and workers > 0)
    pids = None
    for epoch in range(4):
        keys = []
        for number, batch in enumerate(loader):
            keys += batch["key"]
            if number == 2:
                break
        assert keys == expected_keys(daemon, seed=4, epoch=epoch)[:12]
        pids = pids or loader._engine.worker_pids
    assert loader._engine.worker_pids == pids
    assert keys_of(loader) == expected_keys(daemon, seed=4, epoch=4)


def test_a_dropped_iterator_gives_its_leases_back(daemon, load):
    loader = load(batch_size=4, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    del iterator
    gc.collect()
    import fake_session

    assert not fake_session.open_sessions


def test_an_older_iterator_is_ended_by_a_newer_one(daemon, load):
    loader = load(batch_size=4, num_workers=2)
    old = iter(loader)
    next(old)
    new = iter(loader)
    with pytest.raises(UsageError, match="later iter"):
        next(old)
    del old
    keys = [key for batch in new for key in batch["key"]]
    assert keys == expected_keys(daemon, seed=4, epoch=1)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_epoch_can_be_set_on_loader_and_dataset(daemon, load, persistent):
    loader = load(batch_size=4, num_workers=2, persistent_workers=persistent)
    loader.set_epoch(7)
    assert keys_of(loader) == expected_keys(daemon, seed=4, epoch=7)
    assert keys_of(loader) == expected_keys(daemon, seed=4, epoch=8)
    loader.dataset.set_epoch(2)
    assert keys_of(loader) == expected_keys(daemon, seed=4, epoch=2)
    assert keys_of(loader) == expected_keys(daemon, seed=4, epoch=3)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_start_by_any_method(daemon, load, method):
    loader = load(batch_size=8, num_workers=2, multiprocessing_context=method)
    for epoch in range(2):
        assert keys_of(loader) == expected_keys(daemon, seed=4, epoch=epoch)


def test_ranks_share_each_global_batch_and_make_equal_steps(daemon):
    ranks = []
    for rank in range(3):
        config = EngineConfig(batch=BatchSize(4), num_workers=1)
        dataset = ShardDataset("fake://", decode=whole, seed=4)
        engine = Engine(
            dataset, config, world=World(rank, 3, rank, 3), session_factory=daemon.open_session
        )
        token = engine.begin(Cursor(0))
        batches = []
        while (batch := engine.take(token, engine.hand_over.to_torch)) is not None:
            batches.append(batch["key"])
        assert engine.step_count() == len(batches)
        ranks.append(batches)
        engine.close()
    sequence = expected_keys(daemon, seed=4, epoch=0)
    joined = [key for step in zip(*ranks, strict=True) for batch in step for key in batch]
    assert joined == sequence[: 82 // 12 * 12]


def test_many_small_shards_are_planned_ahead_and_no_further():
    daemon = FakeDaemon(make_shards([2] * (3 * PLAN_AHEAD_SHARDS), size=20))
    for workers in (0, 2):
        dataset = ShardDataset("fake://", decode=whole)
        loader = DataLoader(
            dataset, batch_size=2, num_workers=workers, session_factory=daemon.open_session
        )
        iterator = iter(loader)
        next(iterator)
        assert len(daemon.plans[-1]) <= PLAN_AHEAD_SHARDS + 16
        keys = [key for batch in iterator for key in batch["key"]]
        assert len(keys) == 6 * PLAN_AHEAD_SHARDS - 2
        loader.close()
    daemon.close()


@pytest.mark.parametrize("counts", [[], [0, 0], [1]])
@pytest.mark.parametrize("workers", [0, 1])
def test_tiny_and_empty_datasets_have_tiny_and_empty_epochs(counts, workers):
    daemon = FakeDaemon(make_shards(counts))
    dataset = ShardDataset("fake://", decode=whole)
    loader = DataLoader(
        dataset, batch_size=4, num_workers=workers, persistent_workers=workers > 0,
        session_factory=daemon.open_session,
    )  # fmt: skip
    for _ in range(3):
        assert len(list(loader)) == (1 if sum(counts) else 0)
    loader.close()
    daemon.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_daemon_comes_after_what_was_read_before_it(workers):
    daemon = FakeDaemon(
        make_shards([8, 8, 8]), fail_at=(2, OriginUnavailableError("the origin is down"))
    )
    dataset = ShardDataset("fake://", decode=whole, shuffle="none")
    loader = DataLoader(
        dataset, batch_size=8, num_workers=workers, session_factory=daemon.open_session
    )
    got = []
    with pytest.raises(OriginUnavailableError, match="the origin is down"):
        got.extend(loader)
    assert len(got) <= 2
    loader.close()
    daemon.close()


def test_twenty_epochs_open_no_descriptor(load):
    loader = load(batch_size=8, num_workers=2)
    list(loader)
    before = len(open_fds())
    for number in range(20):
        for _ in loader:
            if number % 4 == 3:
                break
    list(loader)
    gc.collect()
    assert len(open_fds()) <= before


def test_closing_ends_workers_and_thread_and_keeps_held_batches(load):
    loader = load(batch_size=8, num_workers=2)
    batch = next(iter(loader))
    copy = batch["head"].clone()
    pids = loader._engine.worker_pids
    assert len(pids) == 2
    loader.close()
    assert not multiprocessing.active_children()
    assert not [t for t in threading.enumerate() if t.name.startswith("gpufeed")]
    assert torch.equal(batch["head"], copy)
    with pytest.raises(UsageError, match="closed"):
        iter(loader)


def test_a_collected_loader_ends_its_workers(daemon):
    loader = DataLoader(
        ShardDataset("fake://", decode=whole), batch_size=8, num_workers=2,
        session_factory=daemon.open_session,
    )  # fmt: skip
    iterator = iter(loader)
    next(iterator)
    del loader, iterator
    gc.collect()
    assert not multiprocessing.active_children()


def test_workers_persist_between_epochs(load):
    loader = load(pid_of, batch_size=8, num_workers=2)
    first = {pid.item() for batch in loader for pid in batch}
    second = {pid.item() for batch in loader for pid in batch}
    assert first == second == set(loader._engine.worker_pids)


def test_worker_init_runs_in_each_worker_and_torch_knows_the_worker(load):
    loader = load(
        worker_number,
        batch_size=8,
        num_workers=2,
        worker_init_fn=remember_worker,
        prefetch_factor=4,
    )
    assert {value.item() for batch in loader for value in batch} == {0, 1}


_remembered = []


def remember_worker(number):
    info = torch.utils.data.get_worker_info()
    assert info.id == number
    assert info.num_workers == 2
    _remembered.append(number)


def worker_number(sample):
    assert torch.get_num_threads() == 1
    return _remembered[0]


@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {"sampler": [1, 2]}, {"batch_sampler": [[1], [2]]}]
)
def test_torchs_ways_to_order_are_refused_with_the_right_one(options):
    with pytest.raises(UsageError, match="ShardDataset"):
        DataLoader(ShardDataset("fake://"), **options)


def test_torch_checks_the_other_arguments():
    with pytest.raises(ValueError, match="prefetch_factor"):
        DataLoader(ShardDataset("fake://"), prefetch_factor=3)
    with pytest.raises(ValueError, match="num_workers"):
        DataLoader(ShardDataset("fake://"), num_workers=-1)


def test_a_foreign_dataset_gets_torchs_loader():
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = DataLoader(data, batch_size=3, shuffle=True, drop_last=True)
    assert len(loader) == 3
    assert len(list(loader)) == 3
    positional = DataLoader(data, 5, False)
    assert [batch[0].tolist() for batch in positional] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    with pytest.raises(UsageError):
        loader.stats()


def test_a_dataset_pickles_with_its_chain_of_functions():
    dataset = ShardDataset(["fake://a", "fake://b"], decode=exact).map(list_collate)
    again = pickle.loads(pickle.dumps(dataset))
    assert again.urls == ("fake://a", "fake://b")
    assert again.decode({"bin": b"1", "cls": b"2", "__key__": "k"})["key"] == "k"


@pytest.mark.parametrize(
    "options",
    [{"shuffle": "all"}, {"kind": "zip"}, {"on_error": "ignore"}, {"decode": 3},
     {"skip_limit": -1}, {"window_bytes": 10}],
)  # fmt: skip
def test_bad_options_of_a_dataset_are_refused(options):
    with pytest.raises(UsageError):
        ShardDataset("fake://", **options)


def test_a_dataset_without_address_is_refused():
    with pytest.raises(UsageError):
        ShardDataset([])


def test_the_training_process_stays_light():
    code = (
        "import sys, gpufeed.loaders as l, gpufeed.loaders.engine\n"
        "assert 'torch' not in sys.modules\n"
        "l.DataLoader, l.ShardDataset, l.image_crop, l.World\n"
        "import gpufeed.loaders.dataloader\n"
        "heavy = {'aiohttp', 'lmdb', 'uvloop', 'httptools'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
