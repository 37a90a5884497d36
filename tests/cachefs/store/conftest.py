"""Makes `store_rig` importable; a store that a test opened leaves no descriptor and no thread."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def open_files(below: Path) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith(str(below)):
            found.append(target)
    return found


@pytest.fixture(autouse=True)
def nothing_open(tmp_path: Path):
    threads_before = set(threading.enumerate())
    yield
    assert open_files(tmp_path) == []
    assert [
        t.name for t in set(threading.enumerate()) - threads_before if "gpufeed" in t.name
    ] == []
