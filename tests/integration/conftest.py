"""Fixtures of the integration tests."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# Test folders are no packages; helpers beside the tests are loaded by their path.
for _name in ("node", "origin_rig", "reading_rig"):
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
_node, _reading = sys.modules["node"], sys.modules["reading_rig"]


@pytest.fixture
def node(oss_standin):
    # A socket's path has 107 bytes; pytest's own directories may be longer.
    place = Path(tempfile.mkdtemp(prefix="gn-"))
    node = _node.Node(oss_standin, place)
    yield node
    node.close()
    shutil.rmtree(place)


@pytest.fixture
def data(node) -> dict[str, dict[str, bytes]]:
    """A node that serves the shards of `reading_rig`; their samples."""
    truth = node.put_tars(_reading.SHARDS, _reading.SAMPLES)
    node.start()
    return truth
