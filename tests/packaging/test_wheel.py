"""The wheel: what is in it, and that it works in an environment with nothing else.

An editable install imports modules that a wheel forgot, so only the wheel is proof.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("cachefs", "loaders", "daemon", "bench")
TIMEOUT_S = 540

pytestmark = pytest.mark.slow

# What the base install leaves out on purpose. Modules that need it may lie in these packages only.
EXTRAS = {"torch", "rich", "webdataset", "ossfs", "oss2", "pytest", "psutil", "obstore"}
MAY_NEED_EXTRAS = ("gpufeed.bench", "gpufeed.loaders", "gpufeed.cachefs.testing")

IMPORT_ALL = """
import importlib, json, sys
failed = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = error.name
json.dump(failed, sys.stdout)
"""


def run(*command: str | Path, cwd: Path, stdin: str = "") -> str:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GPUFEED_"))}
    done = subprocess.run(
        command, cwd=cwd, env=environ, input=stdin,
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build folder in the tree would bring modules that are gone."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", work, source, cwd=work)
    (built,) = work.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that holds the wheel and what it asks for."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(place, with_pip=True)
    run(
        place / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check",
        "-c", ROOT / "constraints.txt", wheel, cwd=place,
    )  # fmt: skip
    return place / "bin"


def module_files() -> set[str]:
    return {
        f"gpufeed/{path.relative_to(ROOT)}" for f in FOLDERS for path in (ROOT / f).rglob("*.py")
    }


def test_every_module_is_in_the_wheel_and_no_other(contents):
    assert {name for name in contents if name.endswith(".py")} == module_files()


def test_types_are_declared_by_each_of_the_four(contents):
    assert {name for name in contents if name.endswith("py.typed")} == {
        f"gpufeed/{folder}/py.typed" for folder in FOLDERS
    }


def test_files_that_pages_need_are_in_the_wheel(contents):
    assets = {
        f"gpufeed/{path.relative_to(ROOT)}"
        for f in FOLDERS
        for suffix in ("css", "js")
        for path in (ROOT / f).rglob(f"*.{suffix}")
    }
    assert assets <= contents


def test_no_name_but_gpufeed_is_installed(contents):
    tops = {name.partition("/")[0] for name in contents}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"gpufeed"}
    assert "gpufeed/__init__.py" not in contents


def test_licence_and_notices_are_in_the_wheel(contents):
    names = {name.rpartition("/")[2] for name in contents}
    assert {"LICENSE", "NOTICE"} <= names


def test_base_install_brings_no_torch(installed, tmp_path):
    listed = json.loads(
        run(installed / "python", "-m", "pip", "list", "--format", "json", cwd=tmp_path)
    )
    names = {entry["name"].lower() for entry in listed}
    assert "gpufeed" in names
    assert not names & {"torch", "ossfs", "oss2", "webdataset", "rich", "pytest"}


def test_every_module_imports_with_the_base_dependencies(installed, tmp_path):
    names = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in module_files()
        if not name.endswith("__main__.py")
    )
    out = run(installed / "python", "-c", IMPORT_ALL, cwd=tmp_path, stdin=json.dumps(names))
    failed = json.loads(out)
    for name, missing in failed.items():
        assert missing.partition(".")[0] in EXTRAS, (name, missing)
        assert name.startswith(MAY_NEED_EXTRAS), (name, missing)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",), ("version",), ("config", "check", "--memory-only"),
        ("daemon", "--help"), ("standin", "--help"),
    ],
)  # fmt: skip
def test_commands_run_from_a_foreign_folder(installed, tmp_path, arguments):
    assert run(installed / "gpufeed", *arguments, cwd=tmp_path)


def test_configuration_is_shown(installed, tmp_path):
    shown = json.loads(run(installed / "gpufeed", "config", "show", "--json", cwd=tmp_path))
    assert shown["settings"]["arena.size_bytes"]["value"] > 0


def test_a_command_whose_extra_is_missing_says_how_to_get_it(installed, tmp_path):
    done = subprocess.run(
        [installed / "gpufeed", "demo"], cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "pip install 'gpufeed[bench]'" in done.stderr
    assert done.stderr.count("\n") == 1
