"""``gpufeed demo``: the whole comparison with defaults, and a report to look at."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from gpufeed.bench.options import add_run_flags, run_options

DEFAULT_OUT = Path("build/demo")

_ABOUT = """A training loop starved by one request an image, and the same loop fed through gpufeed.

Everything happens on this machine: demo images are made from a seed, an object store is played
with 20 ms to the first byte and 80 MB/s a connection, and the accelerator is emulated. Takes two
to four minutes on two cores and about 3 GB of disk.
"""
_NEXT = """
What next:
  open {html}
  cachebench run --help          the same with your own numbers: workers, latency, GPU price
  from gpufeed.loaders import DataLoader, ShardDataset
"""


def command(argv: list[str]) -> int:
    """Run ``gpufeed demo`` with the arguments after the word ``demo``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="gpufeed demo",
        description=_ABOUT,
        epilog="example:\n  gpufeed demo --gpu-price 2.50 --gpus 64\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        help="directory for report.html and result.json (default %(default)s)",
    )
    add_run_flags(parser, work_dir=DEFAULT_OUT / "work")
    arguments = parser.parse_args(argv)
    if missing := [name for name in ("torch", "rich") if importlib.util.find_spec(name) is None]:
        print(
            f"gpufeed demo: {' and '.join(missing)} not installed; pip install 'gpufeed[bench]'",
            file=sys.stderr,
        )
        return 2
    from gpufeed.bench.outputs import guarded  # noqa: PLC0415 after the check for rich

    return guarded("gpufeed demo", lambda: _demo(arguments))


def _demo(arguments: argparse.Namespace) -> int:
    from gpufeed.bench.outputs import run_and_write  # noqa: PLC0415 after the check for rich

    html_path = arguments.out / "report.html"
    status = run_and_write(run_options(arguments), arguments.out / "result.json", html_path)
    print(_NEXT.format(html=html_path))
    return status


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
