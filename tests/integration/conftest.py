"""Fixtures of the integration tests."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# Test folders are no packages; helpers beside the tests are loaded by their path.
for _name in ("node", "origin_rig"):
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
_node = sys.modules["node"]


@pytest.fixture
def node(oss_standin):
    # A socket's path has 107 bytes; pytest's own directories may be longer.
    place = Path(tempfile.mkdtemp(prefix="gn-"))
    node = _node.Node(oss_standin, place)
    yield node
    node.close()
    shutil.rmtree(place)
