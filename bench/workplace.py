"""The directories of a run: what is kept between runs, what goes when a run ends.

A **work dir** holds the demo data, kept and reused, and a lock that one run at a time holds. Each
run has a directory of its own inside it (specs, logs, gpufeed's cache), removed at its end. If a
run was killed, the next one, having the lock, removes what it left.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpufeed.bench.interrupts import to_the_end
from gpufeed.bench.sharedmemory import remove_left_shared_memory
from gpufeed.cachefs.errors import OperatorError, StorageError
from gpufeed.cachefs.units import format_bytes

RUN_PREFIX = "run-"
PARTIAL_SUFFIX = ".partial"
# A Unix socket's address has 108 bytes, with the terminating zero.
_SOCKET_PATH_BYTES_MAX = 107
_SOCKET_NAME_BYTES = 24


@dataclass(frozen=True, slots=True)
class Workplace:
    """The open directories of one run."""

    work_dir: Path
    run_dir: Path
    socket_dir: Path


@contextmanager
def workplace(work_dir: Path, *, keep: bool) -> Iterator[Workplace]:
    """Lock the work dir, sweep it, make the run's directories, and remove them afterwards.

    Raises:
        OperatorError: another run holds the lock.
        StorageError: the directory cannot be made or written.
    """
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(work_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(f"{work_dir}: {error.strerror}; choose another --work-dir") from error
    made: list[Path] = []
    try:
        _take(lock, work_dir)
        _sweep(work_dir)
        try:
            yield _make(work_dir, made)
        finally:
            to_the_end(lambda: _remove(made, work_dir, keep=keep))
    finally:
        os.close(lock)


def _take(lock: int, work_dir: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OperatorError(
            f"another cachebench run is using {work_dir}; wait for it or choose another --work-dir"
        ) from None


def _make(work_dir: Path, made: list[Path]) -> Workplace:
    """Make the run's directories; each is on the list before it exists."""
    token = secrets.token_hex(4)
    run_dir = work_dir / f"{RUN_PREFIX}{token}"
    made.append(run_dir)
    run_dir.mkdir(mode=0o700)
    socket_dir = run_dir
    if len(os.fsencode(run_dir.resolve())) + _SOCKET_NAME_BYTES > _SOCKET_PATH_BYTES_MAX:
        socket_dir = Path(tempfile.gettempdir()) / f"cachebench-{token}"
        made.append(socket_dir)
        socket_dir.mkdir(mode=0o700)
    return Workplace(work_dir, run_dir, socket_dir)


def _remove(made: list[Path], work_dir: Path, *, keep: bool) -> None:
    for path in made:
        remove_left_shared_memory(path)
        if not (keep and path.parent == work_dir):
            shutil.rmtree(path, ignore_errors=True)
    _sweep(work_dir, (PARTIAL_SUFFIX,))


def _sweep(work_dir: Path, marks: tuple[str, ...] = (RUN_PREFIX, PARTIAL_SUFFIX)) -> None:
    """Remove what an ended run left. We hold the lock: nobody is using it."""
    for path in work_dir.iterdir():
        if any(path.name.startswith(mark) or path.name.endswith(mark) for mark in marks):
            remove_left_shared_memory(path)
            shutil.rmtree(path, ignore_errors=True)


def require_free(path: Path, size_bytes: int, what: str) -> None:
    """Check that the disk has room.

    Raises:
        StorageError: it has not; the message has both numbers.
    """
    free = shutil.disk_usage(path).free
    if free < size_bytes:
        raise StorageError(
            f"{path} has {format_bytes(free)} free, {what} needs {format_bytes(size_bytes)}; "
            "choose another --work-dir or fewer --samples"
        )
