"""The flags of ``cachebench startup``, and running it: file, table, exit status.

Importing this module is light: what a run needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gpufeed.cachefs.errors import UsageError

EXAMPLE = """example:
  cachebench startup --shards 1000000 --json startup.json
"""


def add_flags(parser: argparse.ArgumentParser, *, work_dir: Path) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--shards", type=int, default=1_000_000, metavar="N", help="in the cache (%(default)s)")
    add("--repeats", type=int, default=3, help="starts of each kind (default %(default)s)")
    add(
        "--work-dir", type=Path, default=work_dir,
        help="where the cache is made, and removed afterwards (default %(default)s)",
    )  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the result here")


def command(arguments: argparse.Namespace) -> int:
    """Run, write the file that was asked for, print the table; returns the exit status.

    Raises:
        GpufeedError: what went wrong.
    """
    import shutil  # noqa: PLC0415 see the top of the file
    import tempfile  # noqa: PLC0415 likewise

    from gpufeed.bench.fingerprint import fingerprint  # noqa: PLC0415 likewise
    from gpufeed.bench.outputs import require_writable, write_files  # noqa: PLC0415 likewise
    from gpufeed.bench.startup.measure import StartupOptions, measure  # noqa: PLC0415 likewise

    if arguments.shards < 1 or arguments.repeats < 1:
        raise UsageError("--shards and --repeats must be at least 1")
    if arguments.json is not None:
        require_writable(arguments.json)
    print(
        f"making a cache of {arguments.shards:,} shards, then starting daemons over it ...",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    arguments.work_dir.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="startup-", dir=arguments.work_dir))
    try:
        options = StartupOptions(
            work_dir=place, shards_count=arguments.shards, repeats=arguments.repeats
        )
        result = {"fingerprint": fingerprint(place), **measure(options)}
    finally:
        shutil.rmtree(place)
    write_files(result, arguments.json, None)
    _print(result)
    return 0


def _print(result: dict[str, Any]) -> None:
    print(
        f"{result['shards']:,} shards, made in {result['made_in_s']:.0f} s; index "
        f"{result['index_bytes_per_shard']:.0f} bytes a shard, daemon "
        f"{result['rss_bytes_per_shard']:.0f} bytes a shard; cold starts {result['cold_starts']}"
    )
    print("page cache  last end  ready     first read served   CPU      load")
    for start in result["starts"]:
        print(
            f"{'cold' if start['cold'] else 'warm':10}  {'clean' if start['clean'] else 'killed':8}"
            f"  {start['ready_s']:6.2f} s  {start['served_s']:6.2f} s"
            f"            {start['cpu_s']:6.2f} s {start['load_average']:5.1f}"
        )
