"""The flags of ``cachebench share``, and running it: file, table, exit status.

Importing this module is light: what a run needs is imported when it runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpufeed.bench.options import add_result_flags

EXAMPLE = """examples:
  cachebench share --json share.json
  cachebench share --gb 2 --rounds 1

Takes about one minute; needs memory for two and a half times the data, and disk for twice of it.
"""


def add_flags(parser: argparse.ArgumentParser, *, work_dir: Path) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--readers", type=int, default=4, help="processes (default %(default)s)")
    add(
        "--gb",
        type=float,
        default=16.0,
        help="that they read in all, a round (default %(default)g)",
    )
    add("--data-size", default="4GiB", metavar="SIZE", help="of the data (default %(default)s)")
    add("--extent-size", default="4MiB", metavar="SIZE", help="of a slot (default %(default)s)")
    add("--depth", type=int, default=4, help="of bare O_DIRECT reads (default %(default)s)")
    add("--turns", type=int, default=2000, help="wake-ups timed a round (default %(default)s)")
    add("--rounds", type=int, default=3, help="medians are reported (default %(default)s)")
    add(
        "--work-dir", type=Path, default=work_dir,
        help="where data and cache are made, and removed afterwards (default %(default)s)",
    )  # fmt: skip
    add_result_flags(parser)


def command(arguments: argparse.Namespace) -> int:
    """Run, write the file that was asked for, print the table; returns the exit status.

    Raises:
        GpufeedError: what went wrong.
    """
    from gpufeed.bench.outputs import measured, status_of  # noqa: PLC0415 see the top of the file
    from gpufeed.bench.share.report import print_result  # noqa: PLC0415 likewise
    from gpufeed.bench.share.runner import ShareOptions, run  # noqa: PLC0415 likewise
    from gpufeed.cachefs.units import GB, parse_bytes  # noqa: PLC0415 likewise

    options = ShareOptions(
        work_dir=arguments.work_dir,
        readers=arguments.readers,
        read_bytes=int(arguments.gb * GB),
        data_bytes=parse_bytes(arguments.data_size),
        extent_bytes=parse_bytes(arguments.extent_size),
        depth=arguments.depth,
        turns=arguments.turns,
        rounds=arguments.rounds,
    )
    result = measured(arguments.json, lambda progress: run(options, progress))
    print_result(result)
    return status_of(result, check=arguments.check)
