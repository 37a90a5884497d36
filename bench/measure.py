"""Measuring one epoch of a training loop: one clock, one window, every number from it.

The epoch's clock starts before the loader is asked for an iterator (in a first epoch that includes
making the loader and starting its workers; importing libraries is not included) and stops when
the last step has ended::

    start ──── open ────┬─ wait 0 ─┬─ compute 0 ─┬─ wait 1 ─┬─ compute 1 ─┬ … ─┬─ compute n ─┤ stop
                        │          │             │          │             │    │
                     iterator   first batch

- ``first_batch_s`` = start to first batch in hand.
- ``samples_per_s`` = all samples / (stop - start).
- The window of ``au_pct``, ``stall_s`` and the wait percentiles begins when the first batch is in
  hand: ``au_pct = 100 * sum(compute) / sum(compute + wait)``. That leaves the first batch out of
  the utilisation and in the throughput, as MLPerf Storage does; it is not an MLPerf result.

Compute is measured, not assumed. What the loader does after its last batch is outside.

`run_epoch` runs in the trainer's thread and does nothing between the clocks but the work itself.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpufeed.bench.accelerator import Accelerator
from gpufeed.cachefs.errors import IntegrityError, WorkerError

Numbers = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Batch:
    """What a contender hands to the loop: the images, and who they are.

    `indices` and `checksums` have one entry a row: the sample's number, and the CRC-64 of the
    JPEG bytes that the decoder was given.
    """

    images: Any
    indices: Numbers
    checksums: Numbers

    @property
    def rows(self) -> int:
        """How many samples."""
        return len(self.indices)


@dataclass(slots=True)
class Epoch:
    """One measured epoch. Lists have one entry a step, times are seconds."""

    open_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    computes_s: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    wall_s: float = 0.0
    indices: list[Numbers] = field(default_factory=list)
    checksums: list[Numbers] = field(default_factory=list)

    @property
    def sample_count(self) -> int:
        """Samples of all steps."""
        return sum(self.rows)

    @property
    def first_batch_s(self) -> float:
        """From before the loader was opened to the first batch in hand."""
        return self.open_s + (self.waits_s[0] if self.waits_s else 0.0)

    @property
    def stall_s(self) -> float:
        """Time that the accelerator waited for input, the first batch excluded."""
        return sum(self.waits_s[1:])

    @property
    def au_pct(self) -> float:
        """Accelerator utilisation over the window, in percent."""
        compute = sum(self.computes_s)
        whole = compute + self.stall_s
        return 100.0 * compute / whole if whole > 0 else 0.0

    @property
    def samples_per_s(self) -> float:
        """All samples over the whole wall time, first batch included."""
        return self.sample_count / self.wall_s if self.wall_s > 0 else 0.0

    def wait_ms(self, ratio: float) -> float:
        """The `ratio` quantile (0 to 1) of the input wait of one step, first batch excluded."""
        return 1e3 * quantile(self.waits_s[1:], ratio)


def quantile(values: Sequence[float], ratio: float) -> float:
    """The nearest-rank quantile; 0 of no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(ratio * len(ordered)) - 1)]


def run_epoch(
    open_epoch: Callable[[], Iterator[Batch]],
    accelerator: Accelerator,
    *,
    on_step: Callable[[Epoch], None] = lambda _: None,
    now: Callable[[], float] = time.perf_counter,
) -> Epoch:
    """Train for one epoch and measure.

    `on_step` is called after each step, inside the wait for the next batch: it must be quick.
    """
    epoch = Epoch()
    start = now()
    batches = open_epoch()
    mark = now()
    epoch.open_s = mark - start
    for batch in batches:
        got = now()
        accelerator.step(batch.images, batch.rows)
        done = now()
        epoch.waits_s.append(got - mark)
        epoch.computes_s.append(done - got)
        epoch.rows.append(batch.rows)
        epoch.indices.append(batch.indices)
        epoch.checksums.append(batch.checksums)
        del batch
        mark = done
        on_step(epoch)
    epoch.wall_s = mark - start
    return epoch


def verify(
    epoch: Epoch, wanted: Iterable[int], checksum_of: Callable[[int], int], what: str
) -> None:
    """Check that each wanted sample came exactly once and its bytes are those of the source.

    Raises:
        IntegrityError: with the numbers and the first offenders.
    """
    got = np.concatenate(epoch.indices) if epoch.indices else np.empty(0, np.uint64)
    checksums = np.concatenate(epoch.checksums) if epoch.checksums else np.empty(0, np.uint64)
    seen, counts = np.unique(got, return_counts=True)
    want = np.unique(np.fromiter(wanted, np.uint64))
    problems = []
    for label, offenders in (
        ("missing", np.setdiff1d(want, seen)),
        ("unknown", np.setdiff1d(seen, want)),
        ("repeated", seen[counts > 1]),
    ):
        if len(offenders):
            problems.append(f"{len(offenders)} {label} (first: sample {int(offenders[0])})")
    known = np.isin(got, want)
    wrong = [
        int(index)
        for index, checksum in zip(got[known], checksums[known], strict=True)
        if int(checksum) != checksum_of(int(index))
    ]
    if wrong:
        problems.append(f"{len(wrong)} with wrong bytes (first: sample {wrong[0]})")
    if problems:
        raise IntegrityError(
            f"{what}: of {len(want)} samples, {', '.join(problems)}; the loader is not to be "
            "trusted, please report this"
        )


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def threads_cpu_s(pid: int) -> float:
    """CPU seconds of a process's living threads, to the nanosecond where the kernel tells.

    Raises:
        WorkerError: the process is gone.
    """
    total_ns = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                total_ns += int(file.read().split()[0])
    except FileNotFoundError:
        # No schedstat in this kernel, or a thread has just ended: in steps of 10 ms, then.
        found = _read_stat(pid)
        if found is None:
            raise WorkerError(f"process {pid} is gone while its CPU time is read") from None
        return found[1] / _TICKS_PER_S
    return total_ns / 1e9


def tree_cpu_s(*roots: int) -> float:
    """CPU seconds (user + system) of these processes and of everything below them.

    Ended and waited-for descendants are included: the kernel adds them to their parents. Read from
    /proc in steps of 10 ms, without a lock: processes that come and go meanwhile may be missed.
    """
    stats = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _read_stat(int(name))):
            parent, ticks = stat
            stats[int(name)] = ticks
            children.setdefault(parent, []).append(int(name))
    ticks = 0
    seen = set()
    pending = list(roots)
    while pending:
        pid = pending.pop()
        if pid not in seen:
            seen.add(pid)
            ticks += stats.get(pid, 0)
            pending += children.get(pid, ())
    return ticks / _TICKS_PER_S


def _read_stat(pid: int) -> tuple[int, int] | None:
    """Parent, and CPU ticks with those of waited-for children; None when it has gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name is in parentheses and may hold anything, parentheses too.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), sum(int(value) for value in fields[11:15])


def busy_cpu_s() -> float:
    """CPU seconds that all CPUs together were not idle, taken by the hypervisor included."""
    with open("/proc/stat", "rb") as file:
        fields = [int(value) for value in file.readline().split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S
