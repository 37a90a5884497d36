"""Fixtures of the daemon's tests."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

# Test folders are no packages; helpers lie beside the tests that use them.
sys.path.insert(0, str(Path(__file__).parent))

from session_house import House


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    yield house
    await house.server.close()
    house.arena.close()
    assert house.escaped == []
