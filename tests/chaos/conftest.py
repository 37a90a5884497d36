"""Fixtures of the chaos tests: a node whose daemon is going to suffer, and a disk of its own."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _load(name: str, path: Path) -> None:
    """Test folders are no packages; helpers are loaded by their path, once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


_load("node", HERE.parent / "integration" / "node.py")
for _name in ("chaos_data", "chaos_log", "chaos_disk", "chaos_shim", "chaos_node", "chaos_readers"):
    _load(_name, HERE / f"{_name}.py")


@pytest.fixture
def place() -> Iterator[Path]:
    # A socket's path has 107 bytes; pytest's own directories may be longer.
    made = Path(tempfile.mkdtemp(prefix="gc-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def chaos(oss_standin, place: Path):
    """A node without shards; its daemons log all that the store decides."""
    from chaos_node import ChaosNode

    node = ChaosNode(oss_standin, place)
    yield node
    node.close()


@pytest.fixture
def mounted(tmp_path: Path):
    """``mounted(kind, size_bytes)`` makes a file system of its own; unmounted at the end."""
    from chaos_disk import mount

    places: list[Path] = []

    def make(kind: str, size_bytes: int) -> Path:
        place = tmp_path / f"disk{len(places)}"
        mount(kind, size_bytes, place)
        places.append(place)
        return place

    yield make
    for place in places:
        # Lazily, so that a failed test which left files open leaves no mount.
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def shim(tmp_path: Path, place: Path):
    """A disk under ``place / "cache"`` that fails on request; for `shim.environment`."""
    from chaos_shim import DiskShim

    made = DiskShim(tmp_path, place / "cache")
    yield made
    made.close()
