"""Runs the cells of the table, each policy in each, on all CPUs, and judges them.

A cell is (jobs, cache ratio, sizes, speeds). All policies of a cell meet the same workload, but
each realises a trace of its own, since what it misses shifts who reads when; the least bytes
possible are those for that trace.

Jobs live for `EPOCHS_MIN` epochs, two of them twice as long: an arrival or a death costs any policy
that does not know the future a part of the cache, once; only what comes after can say whether its
choices were right.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpufeed.bench.interrupts import SIGNALS, deferred, interruptible
from gpufeed.bench.progress import Progress
from gpufeed.bench.sim.deciders import POLICIES, make_decider
from gpufeed.bench.sim.offline import fractional_bytes, min_bytes
from gpufeed.bench.sim.simulator import Simulator
from gpufeed.bench.sim.workload import Sizes, Speeds, make_workload
from gpufeed.cachefs.units import BLOCK_BYTES

SPEEDS: tuple[Speeds, ...] = ("equal", "unequal")
EPOCHS_MIN = 12
ORIGIN_RATIO = 0.6
# What the policy may fetch beyond the least possible.
RATIO_MAX = 1.01
# Utilisation is a quotient of simulated times that jitter; a difference below is none.
AU_TOLERANCE_PCT = 0.1

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """What to simulate. `shard_count` shards a dataset; `workers` processes."""

    jobs: tuple[int, ...]
    cache_ratios: tuple[float, ...]
    sizes: tuple[Sizes, ...]
    speeds: tuple[Speeds, ...] = SPEEDS
    policies: tuple[str, ...] = POLICIES
    shard_count: int = 1500
    epochs_min: int = EPOCHS_MIN
    seed: int = 1
    workers: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    jobs: int
    cache_ratio: float
    sizes: Sizes
    speeds: Speeds
    policy: str
    shard_count: int
    epoch_count: int
    seed: int


def cells_of(options: SimOptions) -> list[Cell]:
    """All runs, the longest first, so that no CPU is left alone with one at the end."""
    found = [
        Cell(
            jobs, ratio, sizes, speeds, policy, options.shard_count,
            options.epochs_min * (2 if jobs == 2 else 1), options.seed,
        )
        for jobs, ratio, sizes, speeds, policy in itertools.product(
            options.jobs, options.cache_ratios, options.sizes, options.speeds, options.policies
        )
    ]  # fmt: skip
    return sorted(found, key=lambda cell: (cell.policy != "gpufeed", -cell.jobs, cell.cache_ratio))


def run_cell(cell: Cell) -> Row:
    """Simulate one cell; returns its row."""
    workload = make_workload(
        jobs=cell.jobs, sizes=cell.sizes, speeds=cell.speeds, shard_count=cell.shard_count,
        epoch_count=cell.epoch_count, seed=cell.seed,
    )  # fmt: skip
    capacity_bytes = int(cell.cache_ratio * workload.total_bytes) // BLOCK_BYTES * BLOCK_BYTES
    decider = make_decider(
        cell.policy, seed=cell.seed, capacity_bytes=capacity_bytes, shard_count=cell.shard_count
    )
    outcome = Simulator(
        workload, decider, capacity_bytes=capacity_bytes, origin_ratio=ORIGIN_RATIO, seed=cell.seed
    ).run()
    return {
        "jobs": cell.jobs,
        "cache_ratio": cell.cache_ratio,
        "sizes": cell.sizes,
        "speeds": cell.speeds,
        "policy": cell.policy,
        "origin_bytes": outcome.origin_bytes,
        "min_bytes": min_bytes(outcome.trace, workload.sizes, capacity_bytes),
        "bound_bytes": fractional_bytes(outcome.trace, workload.sizes, capacity_bytes),
        "read_bytes": sum(workload.sizes[shard] for shard in outcome.trace),
        "dataset_bytes": workload.total_bytes,
        "au_pct": round(100 * outcome.au_ratio, 3),
        "nvme_bytes_written": outcome.written_bytes,
        "epochs": cell.epoch_count,
    }


def run(options: SimOptions, progress: Progress) -> dict[str, Any]:
    """Simulate everything; returns the result that ``--json`` writes."""
    cells = cells_of(options)
    workers = options.workers or len(os.sched_getaffinity(0))
    progress.stage("simulating", len(cells))
    rows: list[Row] = []
    with interruptible():
        if workers == 1:
            for cell in cells:
                rows.append(run_cell(cell))
                progress.update(len(rows), _note(cell))
        else:
            _run_in_processes(cells, workers, rows, progress)
    rows.sort(key=_order_of(options))
    return {
        "kind": "sim",
        "version": 1,
        "origin_ratio": ORIGIN_RATIO,
        "shard_count": options.shard_count,
        "seed": options.seed,
        "rows": rows,
        "targets": judge(rows),
    }


def _run_in_processes(
    cells: Sequence[Cell], workers: int, rows: list[Row], progress: Progress
) -> None:
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_leave_signals_alone
    )
    try:
        futures = {pool.submit(run_cell, cell): cell for cell in cells}
        for future in concurrent.futures.as_completed(futures):
            rows.append(future.result())
            progress.update(len(rows), _note(futures[future]))
    finally:
        with deferred():
            if len(rows) < len(cells):
                # There is no other way to end what they are at.
                for process in list((pool._processes or {}).values()):
                    process.kill()
            pool.shutdown(wait=True, cancel_futures=True)


def _leave_signals_alone() -> None:
    """Ctrl-C reaches the whole process group; our parent decides."""
    import signal  # noqa: PLC0415 in the child only

    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _note(cell: Cell) -> str:
    return f"{cell.policy}, {cell.jobs} jobs, cache {cell.cache_ratio}, {cell.sizes}"


def _order_of(options: SimOptions) -> Callable[[Row], tuple[Any, ...]]:
    def key(row: Row) -> tuple[Any, ...]:
        return (
            row["sizes"], row["jobs"], row["speeds"], row["cache_ratio"],
            options.policies.index(row["policy"]),
        )  # fmt: skip

    return key


def judge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The targets that the rows allow to be judged, the worst cell of each."""
    ours = [row for row in rows if row["policy"] == "gpufeed"]
    targets = []
    for sizes, against in (("equal", "offline MIN"), ("lognormal", "offline greedy")):
        ratios = [
            (row["origin_bytes"] / row["min_bytes"], row) for row in ours if row["sizes"] == sizes
        ]
        if ratios:
            worst, row = max(ratios, key=lambda pair: pair[0])
            targets.append(
                _target(
                    f"origin bytes / {against}, {sizes} sizes", worst, RATIO_MAX,
                    worst <= RATIO_MAX, row,
                )
            )  # fmt: skip
    never = {_cell_key(row): row["au_pct"] for row in rows if row["policy"] == "never-evict"}
    lost = [(never[_cell_key(row)] - row["au_pct"], row) for row in ours if _cell_key(row) in never]
    if lost:
        worst, row = max(lost, key=lambda pair: pair[0])
        targets.append(
            _target(
                "points of utilisation below never-evict", worst, AU_TOLERANCE_PCT,
                worst <= AU_TOLERANCE_PCT, row,
            )
        )  # fmt: skip
    return targets


def _target(what: str, worst: float, limit: float, met: bool, row: Row) -> dict[str, Any]:
    where = {name: row[name] for name in ("jobs", "cache_ratio", "sizes", "speeds")}
    return {"what": what, "worst": round(worst, 5), "limit": limit, "met": met, "where": where}


def _cell_key(row: Row) -> tuple[Any, ...]:
    return row["jobs"], row["cache_ratio"], row["sizes"], row["speeds"]
