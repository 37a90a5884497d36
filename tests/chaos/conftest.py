"""Fixtures of the chaos tests: a node whose daemon is going to suffer, and a disk of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test folders are no packages; helpers lie beside the tests that use them.
HERE = Path(__file__).parent
for _folder in (HERE, HERE.parent / "integration"):
    sys.path.insert(0, str(_folder))


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
