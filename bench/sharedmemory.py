"""Removing the shared memory of torch workers that were killed.

Batches that torch shares by name are files in /dev/shm until the trainer has taken them. torch
removes them when a worker ends by itself; when it is killed some may stay. Their names begin with
the id of the process that made them, so each of our processes writes its id into a file of the run
before it makes any, and who ends the run removes what these ids left. Nobody else's files are
touched: not those of ids that are not on the list, nor those that are older than the run.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 it is where POSIX shared memory lies
PIDS_SUFFIX = ".pids"


class RecordProcess:
    """Writes the id of the process that calls it; a ``worker_init_fn``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, worker: int) -> None:
        """Append one line; without a path, do nothing."""
        del worker
        if self._path:
            with open(self._path, "a", encoding="ascii") as file:
                file.write(f"{os.getpid()}\n")


def remove_left_shared_memory(run_dir: Path, directory: Path = SHARED_MEMORY) -> None:
    """Remove what the recorded processes of a run left; they have ended."""
    for listed in run_dir.glob(f"*{PIDS_SUFFIX}"):
        pids = listed.read_text(encoding="ascii").split()
        for pid in dict.fromkeys(pid for pid in pids if pid.isdigit()):
            if not Path(f"/proc/{pid}").exists():
                _remove_of(pid, directory, run_dir)


def _remove_of(pid: str, directory: Path, run_dir: Path) -> None:
    for path in directory.glob(f"torch_{pid}_*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and status.st_mtime >= _begin_s(run_dir):
                path.unlink()


def _begin_s(run_dir: Path) -> float:
    """When the run began: its directory's oldest file."""
    return min(path.stat().st_mtime for path in run_dir.iterdir())
