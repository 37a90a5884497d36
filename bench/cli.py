"""The ``cachebench`` command. Sub-commands import what they need when they run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpufeed.bench.engine import command as engine_command
from gpufeed.bench.options import add_run_flags, run_options
from gpufeed.bench.share import command as share_command
from gpufeed.bench.sim import command as sim_command
from gpufeed.bench.startup import command as startup_command

_RUN_EXAMPLE = """example:
  cachebench run --contenders loose-http,ceiling,gpufeed --json result.json --html report.html
"""
_REPORT_EXAMPLE = """example:
  cachebench report result.json --html report.html
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cachebench",
        description="Measures how well a training loop is fed, before gpufeed and after.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, summary: str, description: str, epilog: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=summary, description=description, epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    work_dir = Path.home() / ".cache" / "gpufeed-bench"
    run = command(
        "run",
        "train on demo data through every contender and compare",
        "Makes demo data, plays object storage, emulates an accelerator, and trains.",
        _RUN_EXAMPLE,
    )
    add_run_flags(run, work_dir=work_dir)
    _add_outputs(run)
    report = command(
        "report",
        "show a result again: table, HTML page",
        "Reads a result that `cachebench run --json` wrote.",
        _REPORT_EXAMPLE,
    )
    report.add_argument("result", type=Path, metavar="RESULT", help="JSON file of a run")
    _add_outputs(report)
    engine = command(
        "engine",
        "what receiving a gigabyte costs: gpufeed against other clients",
        "Serves objects by nginx and receives them through every client library.",
        engine_command.EXAMPLE,
    )
    engine_command.add_flags(engine, work_dir=work_dir)
    startup = command(
        "startup",
        "how long a daemon over a full cache takes to serve",
        "Makes a cache of many shards, starts daemons over it, reads one shard.",
        startup_command.EXAMPLE,
    )
    startup_command.add_flags(startup, work_dir=work_dir)
    share = command(
        "share",
        "what sharing one arena among a node's readers costs",
        "Readers of a real daemon against a plain mapping, O_DIRECT and a bare socket.",
        share_command.EXAMPLE,
    )
    share_command.add_flags(share, work_dir=work_dir)
    sim = command(
        "sim",
        "what policies ask of the origin, beside what is possible at all",
        "Simulates jobs that read one dataset through a cache, policy by policy.",
        sim_command.EXAMPLE,
    )
    sim_command.add_flags(sim)
    policy = command(
        "policy",
        "what a decision of the cache costs at a million shards",
        "Times the daemon's policy alone, with the plans of many jobs.",
        sim_command.COST_EXAMPLE,
    )
    sim_command.add_cost_flags(policy)
    return parser


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report page here")


def _run(arguments: argparse.Namespace) -> int:
    from gpufeed.bench.outputs import run_and_write  # noqa: PLC0415 see the top of the file

    return run_and_write(run_options(arguments), arguments.json, arguments.html)


def _report(arguments: argparse.Namespace) -> int:
    from gpufeed.bench.outputs import (  # noqa: PLC0415 see the top of the file
        CHECK_FAILED_STATUS,
        read_result,
        require_writable,
        write_files,
    )
    from gpufeed.bench.table import failed_checks, print_result  # noqa: PLC0415 likewise

    result = read_result(arguments.result)
    for path in (arguments.json, arguments.html):
        if path is not None:
            require_writable(path)
    write_files(result, arguments.json, arguments.html)
    print_result(result)
    return CHECK_FAILED_STATUS if failed_checks(result) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``cachebench``; returns the exit status."""
    arguments = _parser().parse_args(argv)
    from gpufeed.bench.outputs import guarded  # noqa: PLC0415 see the top of the file

    action = {
        "run": _run, "report": _report, "engine": engine_command.command,
        "startup": startup_command.command, "share": share_command.command,
        "sim": sim_command.command,
        "policy": sim_command.cost_command,
    }[arguments.command]  # fmt: skip
    return guarded("cachebench", lambda: action(arguments))


if __name__ == "__main__":
    sys.exit(main())
