"""The flags of ``cachebench engine``, and running it: files, table, exit status.

Importing this module is light: what a run needs is imported when it runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpufeed.bench.options import add_result_flags

EXAMPLE = """examples:
  cachebench engine
  cachebench engine --engines raw,gpufeed,gpufeed-fill --dir /mnt/nvme --json engine.json

Needs nginx (`./run deps`). CPU-s/GB is the figure to compare; GB/s is what this machine had left.
"""


def add_flags(parser: argparse.ArgumentParser, *, work_dir: Path) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--engines", metavar="NAMES", help="comma-separated; default: all of them")
    add("--size", default="1GiB", help="received by each engine a round (default %(default)s)")
    add("--repeats", type=int, default=3, help="rounds; medians are reported (default %(default)s)")
    add("--part", default="8MiB", metavar="SIZE", help="of a request (default %(default)s)")
    add(
        "--connections",
        type=int,
        default=8,
        help="requests under way at once (default %(default)s)",
    )
    add(
        "--client-cpus",
        type=int,
        default=1,
        metavar="N",
        help="CPUs of the engine; the server has one of its own (default %(default)s)",
    )
    add(
        "--origin-threads",
        type=int,
        default=0,
        metavar="N",
        help="threads of gpufeed's engine; 0 = as many as it chooses (default %(default)s)",
    )
    add(
        "--dir",
        type=Path,
        metavar="DIR",
        help="whose disk gpufeed-fill writes to; what is made there is removed (default: work dir)",
    )
    add(
        "--work-dir",
        type=Path,
        default=work_dir,
        help="where the objects are made, and removed afterwards (default %(default)s)",
    )
    add_result_flags(parser)


def command(arguments: argparse.Namespace) -> int:
    """Run, write the file that was asked for, print the table; returns the exit status.

    Raises:
        GpufeedError: what went wrong.
    """
    from gpufeed.bench.engine import report, runner  # noqa: PLC0415 see the top of the file
    from gpufeed.bench.engine.registry import KINDS  # noqa: PLC0415 likewise
    from gpufeed.bench.outputs import (  # noqa: PLC0415 likewise
        CHECK_FAILED_STATUS,
        measured,
    )
    from gpufeed.cachefs.units import parse_bytes  # noqa: PLC0415 likewise

    names = arguments.engines
    chosen = tuple(name.strip() for name in names.split(",") if name.strip()) if names else None
    options = runner.EngineOptions(
        work_dir=arguments.work_dir,
        names=tuple(KINDS) if chosen is None else chosen,
        size_bytes=parse_bytes(arguments.size),
        repeats=arguments.repeats,
        part_bytes=parse_bytes(arguments.part),
        connections=arguments.connections,
        client_cpus=arguments.client_cpus,
        origin_threads=arguments.origin_threads,
        directory=arguments.dir,
        must_pass=arguments.check,
    )
    result = measured(arguments.json, lambda progress: runner.run(options, progress))
    report.print_result(result)
    if arguments.check and (report.missed(result) or len(result["targets"]) < len(report.TARGETS)):
        return CHECK_FAILED_STATUS
    return 0
