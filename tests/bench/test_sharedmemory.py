"""Only what our own dead processes left in shared memory is removed."""

import os
import subprocess
import sys

import pytest

from gpufeed.bench.sharedmemory import RecordProcess, remove_left_shared_memory


@pytest.fixture
def places(tmp_path):
    run_dir, shared = tmp_path / "run", tmp_path / "shm"
    run_dir.mkdir()
    shared.mkdir()
    return run_dir, shared


def dead_process(run_dir):
    code = (
        "import os, sys; from gpufeed.bench.sharedmemory import RecordProcess; "
        "RecordProcess(sys.argv[1])(0); print(os.getpid())"
    )
    command = [sys.executable, "-c", code, str(run_dir / "ceiling.pids")]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_files_of_recorded_dead_processes_go_and_all_others_stay(places):
    run_dir, shared = places
    pid = dead_process(run_dir)
    RecordProcess(str(run_dir / "ceiling.pids"))(0)
    ours, alive, other = (
        shared / name for name in (f"torch_{pid}_1_0", f"torch_{os.getpid()}_1_0", "torch_1_1_0")
    )
    for path in (ours, alive, other, shared / f"torch_{pid}0_1_0"):
        path.touch()
    remove_left_shared_memory(run_dir, shared)
    assert not ours.exists()
    assert sorted(path.name for path in shared.iterdir()) == sorted(
        [alive.name, other.name, f"torch_{pid}0_1_0"]
    )


def test_files_older_than_the_run_are_not_ours(places):
    run_dir, shared = places
    path = shared / f"torch_{dead_process(run_dir)}_1_0"
    path.touch()
    os.utime(path, (1.0, 1.0))
    remove_left_shared_memory(run_dir, shared)
    assert path.exists()


def test_a_run_that_recorded_nothing_has_nothing_to_remove(places):
    run_dir, shared = places
    remove_left_shared_memory(run_dir, shared)
    remove_left_shared_memory(run_dir / "missing", shared)
    RecordProcess("")(0)
    assert list(run_dir.iterdir()) == []
