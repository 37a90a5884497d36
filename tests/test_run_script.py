"""`./run` itself: what it refuses and how it says so."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def call(script: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [script, *arguments], env={**os.environ, **environ},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.fixture
def lone_script(tmp_path: Path) -> Path:
    """A copy of `run` in a folder without an environment."""
    shutil.copy(ROOT / "run", tmp_path / "run")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path / "run"


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",)])
def test_help_names_every_command(arguments):
    done = call(ROOT / "run", *arguments)
    assert done.returncode == 0
    for name in ("demo", "test", "lint", "types", "bench", "wheel", "deps", "clean"):
        assert f"\n  {name} " in done.stdout


def test_an_unknown_command_is_refused():
    done = call(ROOT / "run", "frobnicate")
    assert done.returncode == 2
    assert done.stderr.endswith("run: unknown command 'frobnicate'\n")
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["test", "demo", "lint", "types", "bench", "wheel"])
def test_an_old_python_is_refused_before_anything_is_made(lone_script, tmp_path, command):
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = call(lone_script, command, PYTHON=str(old))
    assert done.returncode == 2
    assert done.stderr == f"run: PYTHON={old} is not Python 3.11 or newer\n"
    assert not (tmp_path / ".venv").exists()


def test_without_any_python_it_says_what_it_needs(lone_script, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "cut", "dirname", "env", "sha256sum"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    done = call(lone_script, "test", PATH=str(tools), PYTHON="")
    assert done.returncode == 2
    assert "needs Python 3.11 or newer; found none" in done.stderr


def test_a_failing_tool_fails_the_command(lone_script, tmp_path):
    # An environment that is up to date, whose linter finds something.
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for tool in ("python", "ruff"):
        (tools / tool).write_text("#!/bin/sh\nexit 1\n")
        (tools / tool).chmod(0o755)
    stamp = subprocess.run(
        ["bash", "-c", "cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (tmp_path / ".venv" / ".installed").write_text(f"dev {stamp}")
    for command in ("lint", "test"):
        assert call(lone_script, command).returncode == 1


@pytest.mark.parametrize("script", ["run", ".ci/run"])
def test_scripts_are_executable_and_parse(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_every_constraint_is_exact():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 50
    assert all("==" in pin and "+" not in pin for pin in pins)
