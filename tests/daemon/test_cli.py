"""The command `gpufeed`: dispatch, exit statuses, one line an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpufeed.cachefs.errors import IntegrityError, OperatorError
from gpufeed.daemon import cli


def fake_command(monkeypatch, outcome):
    def command(argv):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(cli, "_command", lambda name: command)


def test_version_is_that_of_the_distribution(capsys):
    from importlib.metadata import version

    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"gpufeed {version('gpufeed')}\n"
    assert cli.main(["--version"]) == 0


@pytest.mark.parametrize("argument", ["--help", "-h", "help"])
def test_help_lists_every_command(capsys, argument):
    assert cli.main([argument]) == 0
    out = capsys.readouterr().out
    for name in ("daemon", "config", "version", "demo", "standin"):
        assert f"\n  {name} " in out


def test_nothing_to_do_is_a_usage_error(capsys):
    assert cli.main([]) == 2
    assert "usage: gpufeed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["frobnicate"], "no command 'frobnicate'; there are daemon, config, version"),
        (["version", "x"], "takes no arguments"),
        (["config", "show", "--http-port", "x"], "daemon.http_port is 'x' (flag --http-port)"),
    ],
)
def test_a_usage_error_is_one_line_and_status_2(capsys, argv, message):
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("gpufeed: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("outcome", "status", "err"),
    [
        (OperatorError("disk\nfull"), 3, "gpufeed: disk full\n"),
        (IntegrityError("x"), 5, "gpufeed: x\n"),
        (KeyboardInterrupt(), 130, ""),
        (7, 7, ""),
    ],
)
def test_the_status_says_who_has_to_act(monkeypatch, capsys, outcome, status, err):
    fake_command(monkeypatch, outcome)
    assert cli.main(["any"]) == status
    assert capsys.readouterr().err == err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    class Missing:
        def load(self):
            raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(cli, "entry_points", lambda **_: [Missing()])
    assert cli.main(["demo"]) == 2
    assert "needs the module rich" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_traceback():
    process = subprocess.run(
        ["/bin/sh", "-c", '"$0" -m gpufeed.daemon config show | head -c 1', sys.executable],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert process.stderr == ""


def test_the_command_line_itself_imports_no_engine():
    code = (
        "import sys; from gpufeed.daemon.cli import main; main(['version']); "
        "print([m for m in ('aiohttp', 'uvloop', 'lmdb', 'torch', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert out.splitlines()[-1] == "[]"
