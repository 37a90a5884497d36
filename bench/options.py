"""The flags of ``cachebench run`` and ``gpufeed demo``, and how they become `RunOptions`.

Defined once, for both commands. Importing this module is light: what a run needs is imported when
the options are built.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpufeed.bench.runner import RunOptions


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` and ``--check``, of the commands that judge what they measured."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument(
        "--check", action="store_true", help="end with status 5 if a target is missed"
    )


def add_run_flags(parser: argparse.ArgumentParser, *, work_dir: Path) -> None:
    """Add the flags; defaults are those of the demo."""
    add = parser.add_argument
    add("--contenders", metavar="NAMES", help="comma-separated; default: all of them")
    add("--samples", type=int, default=6000, help="images in the data set (default %(default)s)")
    add(
        "--slow-samples",
        type=int,
        default=960,
        help="images of an epoch of the loose contenders, which are slow (default %(default)s)",
    )
    add("--seed", type=int, default=7, help="of the data and the orders (default %(default)s)")
    add("--batch-size", type=int, default=64, help="rows of a batch (default %(default)s)")
    add("--workers", type=int, default=2, help="decode processes (default %(default)s)")
    add(
        "--step-ms",
        default="auto",
        metavar="MS|auto",
        help="length of a training step; auto measures this machine (default %(default)s)",
    )
    add(
        "--first-byte-ms",
        type=float,
        default=20.0,
        help="the origin's time to the first byte (default %(default)g)",
    )
    add(
        "--mb-per-s",
        type=float,
        default=80.0,
        help="the origin's bandwidth per connection (default %(default)g)",
    )
    add("--repeats", type=int, default=1, help="rounds; medians are reported (default %(default)s)")
    add(
        "--compute",
        choices=("sleep", "cuda"),
        default="sleep",
        help="what a step is: a sleep, or a kernel on a GPU (default %(default)s)",
    )
    add(
        "--gpu-price",
        type=float,
        default=3.0,
        metavar="PRICE",
        help="of one GPU for one hour, in your currency (default %(default)g)",
    )
    add("--gpus", type=int, default=8, help="GPUs that the job holds (default %(default)s)")
    add(
        "--work-dir",
        type=Path,
        default=work_dir,
        help="where demo data is kept between runs (default %(default)s)",
    )
    add(
        "--keep",
        action="store_true",
        help="keep this run's logs and caches in the work dir until the next run",
    )


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """Build validated options from parsed flags.

    Raises:
        UsageError: a flag is out of range.
    """
    from gpufeed.bench.contenders import KINDS  # noqa: PLC0415 see the top of the file
    from gpufeed.bench.demodata import DataSpec  # noqa: PLC0415 likewise
    from gpufeed.bench.report import Price  # noqa: PLC0415 likewise
    from gpufeed.bench.runner import RunOptions  # noqa: PLC0415 likewise

    names = arguments.contenders
    chosen = tuple(name.strip() for name in names.split(",") if name.strip()) if names else None
    return RunOptions(
        work_dir=arguments.work_dir,
        names=tuple(KINDS) if chosen is None else chosen,
        data=DataSpec(seed=arguments.seed, sample_count=arguments.samples),
        slow_samples=arguments.slow_samples,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        step_ms=_step_ms(arguments.step_ms),
        first_byte_ms=arguments.first_byte_ms,
        mb_per_s=arguments.mb_per_s,
        repeats=arguments.repeats,
        compute=arguments.compute,
        price=Price(arguments.gpu_price, arguments.gpus),
        keep=arguments.keep,
    )


def _step_ms(text: str) -> float | None:
    from gpufeed.cachefs.errors import UsageError  # noqa: PLC0415 see the top of the file

    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--step-ms is {text!r}; give milliseconds or auto") from None
