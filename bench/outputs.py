"""Running the bench from a command line and writing what it found: files, table, exit status.

Files are written whole or not at all: next to their place, then renamed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from gpufeed.bench import report
from gpufeed.bench.interrupts import Interrupted
from gpufeed.bench.progress import Progress
from gpufeed.bench.runner import RunOptions, run
from gpufeed.cachefs.errors import GpufeedError, StorageError, UsageError

CHECK_FAILED_STATUS = 5


def run_and_write(options: RunOptions, json_path: Path | None, html_path: Path | None) -> int:
    """Run, write the files that were asked for, print the table; returns the exit status."""
    from gpufeed.bench.progress import Terminal  # noqa: PLC0415 rich only where it is shown
    from gpufeed.bench.table import failed_checks, print_result  # noqa: PLC0415 likewise

    for path in (json_path, html_path):
        if path is not None:
            require_writable(path)
    with Terminal() as progress:
        result = run(options, progress)
    write_files(result, json_path, html_path)
    print_result(result)
    return CHECK_FAILED_STATUS if failed_checks(result) else 0


def measured(json_path: Path | None, measure: Callable[[Progress], report.Result]) -> report.Result:
    """Measure with a progress bar, and write the file that was asked for.

    Raises:
        GpufeedError: what went wrong.
    """
    from gpufeed.bench.progress import Terminal  # noqa: PLC0415 rich only where it is shown

    if json_path is not None:
        require_writable(json_path)
    with Terminal() as progress:
        result = measure(progress)
    write_files(result, json_path, None)
    return result


def status_of(result: report.Result, *, check: bool) -> int:
    """The exit status of a command with targets, each of which was `met` or not."""
    is_missed = any(not target["met"] for target in result["targets"])
    return CHECK_FAILED_STATUS if check and is_missed else 0


def write_files(result: report.Result, json_path: Path | None, html_path: Path | None) -> None:
    """Write the result and its page.

    Raises:
        StorageError: a file cannot be written.
    """
    if json_path is not None:
        _write(json_path, json.dumps(result, indent=1) + "\n")
    if html_path is not None:
        from gpufeed.bench.html import page  # noqa: PLC0415 only where a page is made

        _write(html_path, page(result))


def read_result(path: Path) -> report.Result:
    """Read a result file.

    Raises:
        UsageError: missing, or not a result.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    return report.validate(value)


def require_writable(path: Path) -> None:
    """Make the directory of `path` now: a run of minutes must not end in a missing folder.

    Raises:
        StorageError: it cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path.parent}: {error.strerror}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise StorageError(f"{path} cannot be written; choose another path")


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
    finally:
        aside.unlink(missing_ok=True)


def guarded(name: str, action: Callable[[], int]) -> int:
    """Run a command: errors of ours become one line and their exit status, signals theirs."""
    try:
        return action()
    except GpufeedError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_status
    except Interrupted as signal:
        print(f"{name}: ended by {signal}; everything it started is gone", file=sys.stderr)
        return signal.exit_status
    except KeyboardInterrupt:
        print(f"{name}: ended by SIGINT", file=sys.stderr)
        return 130
