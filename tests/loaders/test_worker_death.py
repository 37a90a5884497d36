import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fake_session import FakeDaemon, make_shards
from loader_helpers import expected_keys, hangs, keys_of, kills_itself, whole

from gpufeed.cachefs.errors import WorkerError
from gpufeed.loaders import DataLoader, ShardDataset

HERE = Path(__file__).parent


@pytest.fixture
def daemon():
    daemon = FakeDaemon(make_shards([30, 30]))
    yield daemon
    daemon.close()


def make(daemon, decode, **options):
    dataset = ShardDataset("fake://", decode=decode, shuffle="none")
    return DataLoader(
        dataset, batch_size=4, num_workers=2, session_factory=daemon.open_session, **options
    )


def test_a_worker_that_dies_is_named_with_what_it_had_in_hand(daemon):
    loader = make(daemon, kills_itself)
    with pytest.raises(WorkerError, match=r"decode worker \d .*SIGKILL.*In hand: sample"):
        list(loader)
    loader.close()


def test_a_worker_killed_from_outside_ends_the_wait(daemon):
    loader = make(daemon, hangs)
    iterator = iter(loader)
    pids = loader._engine.worker_pids
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=f"pid {pids[0]}.*SIGKILL"):
        next(iterator)
    loader.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_after_a_death_the_next_epoch_has_new_workers(daemon):
    loader = make(daemon, whole)
    for number, _ in enumerate(loader):
        if number == 0:
            watch = os.pidfd_open(loader._engine.worker_pids[1])
            os.kill(loader._engine.worker_pids[1], signal.SIGKILL)
            select.select([watch], [], [])
            os.close(watch)
            break
    epoch = keys_of(loader)
    assert epoch == expected_keys(daemon, seed=0, epoch=1, shuffle="none")
    loader.close()


def test_a_wait_has_the_timeout_that_was_asked_for(daemon):
    loader = make(daemon, hangs, timeout=0.3)
    with pytest.raises(WorkerError, match=r"timeout=0\.3"):
        next(iter(loader))
    loader.close()


@pytest.mark.parametrize("decode", ["tells_and_goes_on", "tells_and_hangs"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_with_a_trainer_that_is_killed(decode, method):
    code = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from fake_session import FakeDaemon, make_shards
from loader_helpers import {decode}
from gpufeed.loaders import DataLoader, ShardDataset
if __name__ == "__main__":
    daemon = FakeDaemon(make_shards([50]))
    dataset = ShardDataset("fake://", decode={decode})
    loader = DataLoader(dataset, batch_size=8, num_workers=2, session_factory=daemon.open_session,
                        multiprocessing_context={method!r})
    iterator = iter(loader)
    print(*loader._engine.worker_pids, flush=True)
    sys.stdin.read()
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        # Workers may decode before the trainer has told their numbers: in any order, lines whole.
        lines = sorted(trainer.stdout.readline().strip() for _ in range(3))
        assert lines[1:] == ["decoding", "decoding"]
        pids = [int(pid) for pid in lines[0].split()]
        assert len(pids) == 2
        watches = [os.pidfd_open(pid) for pid in pids]
        trainer.kill()
        for watch in watches:
            assert select.select([watch], [], [], 2.0)[0], "a worker outlived its trainer by 2 s"
            os.close(watch)
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdin.close()
        trainer.stdout.close()


@pytest.mark.parametrize("how", ["exit", "interrupt", "raise"])
def test_a_trainer_that_ends_leaves_no_worker_and_no_noise(how):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(HERE)!r})
from fake_session import FakeDaemon, make_shards
from loader_helpers import slow_odd, hangs
from gpufeed.loaders import DataLoader, ShardDataset
daemon = FakeDaemon(make_shards([200]))
how = {how!r}
dataset = ShardDataset("fake://", decode=hangs if how == "interrupt" else slow_odd)
loader = DataLoader(dataset, batch_size=2, num_workers=2, session_factory=daemon.open_session)
iterator = iter(loader)
print(*loader._engine.worker_pids, flush=True)
if how == "interrupt":
    print("waiting", flush=True)
next(iterator)
if how == "raise":
    raise SystemExit(3)
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        if how == "interrupt":
            trainer.stdout.readline()
            trainer.send_signal(signal.SIGINT)
        _, noise = trainer.communicate(timeout=30)
    finally:
        trainer.kill()
        trainer.wait()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    if how == "interrupt":
        assert noise.strip().endswith("KeyboardInterrupt")
        assert noise.count("Traceback") == 1
    else:
        assert noise == ""
    assert trainer.returncode == {"exit": 0, "interrupt": -signal.SIGINT, "raise": 3}[how]
