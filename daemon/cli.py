"""The command `gpufeed`: finds the sub-command, imports it, and turns errors into one line.

`daemon`, `config` and `version` are here; others (``demo``, ``standin``) are entry points of the
group ``gpufeed.commands`` and are imported only when they are called, so that the layers stay apart
and a daemon's image needs none of what they need. Each is ``command(argv) -> exit status``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points, version

from gpufeed.cachefs.errors import GpufeedError, UsageError

Command = Callable[[list[str]], int]

COMMANDS_GROUP = "gpufeed.commands"
INTERRUPTED_STATUS = 130
BROKEN_PIPE_STATUS = 141

_HELP = {
    "daemon": "serve shards of object storage to the training processes of this node",
    "config": "show the settings and where each is from, or check them",
    "version": "print the version",
    "demo": "a starved training loop, and the same loop fed by gpufeed",
    "standin": "an object storage on this machine, for tests and demonstrations",
}
_EXAMPLES = """examples:
  gpufeed demo
  gpufeed config show
  gpufeed daemon --cache-path /mnt/nvme/gpufeed --capacity 2TB"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except GpufeedError as error:
        print(f"gpufeed: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except BrokenPipeError:
        # Whoever read our output has gone; what is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_STATUS


def _run(arguments: list[str]) -> int:
    if not arguments:
        print(_usage(), file=sys.stderr)
        return UsageError.exit_status
    name, rest = arguments[0], arguments[1:]
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name in ("-V", "--version"):
        name = "version"
    status = _command(name)(rest)
    sys.stdout.flush()
    return status


def _command(name: str) -> Command:
    """The sub-command called `name`, imported.

    Raises:
        UsageError: there is none, or what it needs is not installed.
    """
    if name == "daemon":
        from gpufeed.daemon.supervisor import command  # noqa: PLC0415 the daemon's parts, and uvloop

        return command
    if name == "config":
        from gpufeed.daemon.configcommand import command  # noqa: PLC0415 started only when asked for

        return command
    if name == "version":
        return _version
    found = entry_points(group=COMMANDS_GROUP, name=name)
    if not found:
        raise UsageError(
            f"there is no command {name!r}; there are {', '.join(_names())} (gpufeed --help)"
        )
    try:
        loaded: Command = next(iter(found)).load()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gpufeed"):
            raise
        raise UsageError(
            f"`gpufeed {name}` needs the module {error.name}, which is not installed; install it "
            "with: pip install 'gpufeed[bench]'"
        ) from None
    return loaded


def _names() -> list[str]:
    extra = sorted(entry_points(group=COMMANDS_GROUP).names)
    return ["daemon", "config", "version", *extra]


def _version(arguments: list[str]) -> int:
    if arguments:
        raise UsageError(f"`gpufeed version` takes no arguments, it was given {arguments}")
    print(f"gpufeed {version('gpufeed')}")
    return 0


def _usage() -> str:
    lines = [f"  {name:<10} {_HELP.get(name, '')}".rstrip() for name in _names()]
    return "\n".join(
        (
            "usage: gpufeed COMMAND ...",
            "",
            "Feeds GPUs from object storage: a cache on each node, shared with every training",
            "process on it.",
            "",
            "commands (each has its own --help):",
            *lines,
            "",
            _EXAMPLES,
        )
    )
