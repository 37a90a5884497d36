"""The flags of ``cachebench sim``, and running it: file, table, exit status.

Importing this module is light: what a run needs is imported when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from gpufeed.bench.options import add_result_flags
from gpufeed.cachefs.errors import UsageError

EXAMPLE = """examples:
  cachebench sim --jobs 1,2 --cache 0.2,0.5 --sizes equal
  cachebench sim --jobs 1,2,4,8 --cache 0.1,0.2,0.5,0.8 --sizes equal,lognormal --json sim.json

Needs no network and no disk. The whole table takes some minutes on two CPUs.
"""
COST_EXAMPLE = """example:
  cachebench policy --shards 1000000 --jobs 16 --json policy.json
"""
_PIPED_WIDTH = 160
_SIZES = ("equal", "lognormal")
_SPEEDS = ("equal", "unequal")
_T = TypeVar("_T")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--jobs", default="1,2,4,8", metavar="N,…", help="jobs on the node (default %(default)s)")
    add(
        "--cache", default="0.1,0.2,0.5,0.8", metavar="RATIO,…",
        help="capacity as a share of the dataset (default %(default)s)",
    )  # fmt: skip
    add(
        "--sizes", default="equal,lognormal", metavar="NAME,…",
        help="of shards: equal, lognormal (default %(default)s)",
    )  # fmt: skip
    add(
        "--speeds", default="equal,unequal", metavar="NAME,…",
        help="of jobs: equal, unequal (default %(default)s)",
    )  # fmt: skip
    add("--policies", metavar="NAME,…", help="default: all of them")
    add("--shards", type=int, default=1500, help="of the dataset (default %(default)s)")
    add("--epochs", type=int, default=12, help="a job, at least (default %(default)s)")
    add("--seed", type=int, default=1, help="of everything (default %(default)s)")
    add("--workers", type=int, default=0, help="processes; 0 = one a CPU (default %(default)s)")
    add_result_flags(parser)


def _list(
    text: str, flag: str, read: Callable[[str], _T], valid: Callable[[_T], bool], wanted: str
) -> list[_T]:
    found = []
    for item in text.split(","):
        try:
            value = read(item.strip())
        except ValueError:
            raise UsageError(f"{flag} has {item!r}; {wanted}") from None
        if not valid(value):
            raise UsageError(f"{flag} has {item!r}; {wanted}")
        found.append(value)
    return list(dict.fromkeys(found))


def command(arguments: argparse.Namespace) -> int:
    """Run, write the file that was asked for, print the table; returns the exit status.

    Raises:
        GpufeedError: what went wrong.
    """
    from gpufeed.bench.outputs import measured, status_of  # noqa: PLC0415 see the top of the file
    from gpufeed.bench.sim import runner  # noqa: PLC0415 likewise
    from gpufeed.bench.sim.deciders import POLICIES  # noqa: PLC0415 likewise

    policies = _list(
        arguments.policies or ",".join(POLICIES), "--policies", str, POLICIES.__contains__,
        f"there are {', '.join(POLICIES)}",
    )  # fmt: skip
    sizes: Any = _list(
        arguments.sizes, "--sizes", str, _SIZES.__contains__, f"there are {', '.join(_SIZES)}"
    )
    speeds: Any = _list(
        arguments.speeds, "--speeds", str, _SPEEDS.__contains__, f"there are {', '.join(_SPEEDS)}"
    )
    if arguments.shards < 20 or arguments.epochs < 1 or arguments.workers < 0:
        raise UsageError(
            "--shards must be at least 20, --epochs at least 1, --workers not negative"
        )
    options = runner.SimOptions(
        jobs=tuple(
            _list(arguments.jobs, "--jobs", int, lambda n: 1 <= n <= 64, "give numbers of 1 to 64")
        ),
        cache_ratios=tuple(
            _list(
                arguments.cache,
                "--cache",
                float,
                lambda ratio: 0 < ratio <= 1,
                "give ratios above 0, to 1",
            )
        ),
        sizes=tuple(sizes),
        speeds=tuple(speeds),
        policies=tuple(policies),
        shard_count=arguments.shards,
        epochs_min=arguments.epochs,
        seed=arguments.seed,
        workers=arguments.workers,
    )
    result = measured(arguments.json, lambda progress: runner.run(options, progress))
    print_result(result)
    return status_of(result, check=arguments.check)


def add_cost_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``cachebench policy``."""
    add = parser.add_argument
    add("--shards", type=int, default=1_000_000, help="resident (default %(default)s)")
    add("--jobs", type=int, default=16, help="with plans (default %(default)s)")
    add("--reads", type=int, default=40_000, help="timed (default %(default)s)")
    add("--seed", type=int, default=1, help="of the orders (default %(default)s)")
    add_result_flags(parser)


def cost_command(arguments: argparse.Namespace) -> int:
    """Measure what decisions cost; returns the exit status.

    Raises:
        GpufeedError: what went wrong.
    """
    from gpufeed.bench.outputs import measured, status_of  # noqa: PLC0415 see the top of the file
    from gpufeed.bench.sim import cost  # noqa: PLC0415 likewise

    if arguments.shards < 1000 or not 1 <= arguments.jobs <= 64 or arguments.reads < 100:
        raise UsageError("--shards must be at least 1000, --jobs 1 to 64, --reads at least 100")
    if arguments.reads > arguments.shards * arguments.jobs // 2:
        raise UsageError(
            f"--reads {arguments.reads} is more than half an epoch of these jobs; give at most "
            f"{arguments.shards * arguments.jobs // 2}"
        )
    result = measured(
        arguments.json,
        lambda progress: cost.measure(
            arguments.shards, arguments.jobs, arguments.reads, arguments.seed, progress
        ),
    )
    print(
        f"{result['shards']} shards, {result['jobs']} jobs: {result['decision_us_mean']:.1f} us a "
        f"decision (p50 {result['decision_us_p50']:.1f}, p99 {result['decision_us_p99']:.1f}, max "
        f"{result['decision_us_max']:.0f}; {result['decisions']} decisions, CPU time), "
        f"{result['read_us_mean']:.1f} us in all for a read, {result['bytes_a_shard']:.0f} bytes a "
        "shard"
    )
    missed = [target for target in result["targets"] if not target["met"]]
    if result["load_average"] > 1.5:
        print(
            f"load average {result['load_average']:.1f}: other programs used the CPUs and their "
            "caches, and times are too high"
        )
    for target in missed:
        print(f"MISSED {target['what']}: {target['value']:.1f} (limit {target['limit']:g})")
    return status_of(result, check=arguments.check)


def print_result(result: dict[str, Any]) -> None:
    """Print the table and what the targets say."""
    from rich import box  # noqa: PLC0415 only where something is shown
    from rich.table import Table  # noqa: PLC0415 likewise

    from gpufeed.bench.progress import table_console  # noqa: PLC0415 likewise

    console = table_console(_PIPED_WIDTH)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    headers = ("sizes", "jobs", "speeds", "cache", "policy", "origin\n/ read", "/ least",
               "/ bound", "AU %", "written\n/ dataset")  # fmt: skip
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i in (0, 2, 4) else "right", no_wrap=True)
    for row in result["rows"]:
        origin = row["origin_bytes"]
        table.add_row(
            row["sizes"], str(row["jobs"]), row["speeds"], str(row["cache_ratio"]), row["policy"],
            f"{origin / row['read_bytes']:.3f}", f"{origin / row['min_bytes']:.4f}",
            f"{origin / row['bound_bytes']:.4f}", f"{row['au_pct']:.1f}",
            f"{row['nvme_bytes_written'] / row['dataset_bytes']:.1f}",
            style="bold" if row["policy"] == "gpufeed" else "",
        )  # fmt: skip
    console.print(table)
    for target in result["targets"]:
        where = target["where"]
        console.print(
            f"{'met   ' if target['met'] else 'MISSED'} {target['what']}: at worst "
            f"{target['worst']:g} (limit {target['limit']:g}), with {where['jobs']} jobs of "
            f"{where['speeds']} speeds, cache {where['cache_ratio']}, {where['sizes']} sizes",
            markup=False,
        )
