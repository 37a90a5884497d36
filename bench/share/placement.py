"""Where the two ends of a round trip run: on two CPUs, one each, on either side of the comparison.

Two processes that do nothing but answer each other are put on one CPU by most schedulers, where a
wake-up is a switch of 6 us; on two of them it takes ten times that. A daemon and its reader, which
both have work to do, are found on two. Left to itself a comparison would tell where the kernel has
put whom.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence


def two_cpus() -> tuple[int, ...]:
    """The first two CPUs that we may use; empty where there is one only."""
    usable = sorted(os.sched_getaffinity(0))
    return tuple(usable[:2]) if len(usable) > 1 else ()


@contextlib.contextmanager
def kept_to(pid: int, cpus: Sequence[int]) -> Iterator[None]:
    """Every thread of the process runs on these CPUs only; on none given, nothing changes."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(pid)
    _move(pid, set(cpus))
    try:
        yield
    finally:
        _move(pid, before)


def _move(pid: int, cpus: set[int]) -> None:
    # A process or thread that has just ended needs no place.
    with contextlib.suppress(FileNotFoundError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cpus)
