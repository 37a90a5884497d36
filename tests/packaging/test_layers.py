"""The layers hold, and what runs in a training process stays light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# The daemon's engines. In a trainer they would cost memory, threads and start-up time.
HEAVY = ("aiohttp", "lmdb", "uvloop", "httptools")


def test_import_contracts_are_kept():
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    "module",
    ["gpufeed.loaders", "gpufeed.cachefs.connect", "gpufeed.loaders.worker",
     "gpufeed.cachefs.client", "gpufeed.cachefs.fs", "gpufeed.cachefs.tarscan",
     "gpufeed.cachefs.urls"],
)  # fmt: skip
def test_the_training_process_loads_no_engine(module, tmp_path):
    code = (
        f"import json, sys, {module}; "
        f"json.dump([m for m in {HEAVY!r} if m in sys.modules], sys.stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_bare_folder_names_do_not_import(tmp_path):
    code = "import importlib.util as u; print([n for n in %r if u.find_spec(n)])"
    done = subprocess.run(
        [sys.executable, "-c", code % (("cachefs", "loaders", "daemon", "bench"),)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
