"""Makes `scripted_server` importable; no engine thread outlives a test; back-off is short."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin import retry
from gpufeed.cachefs.origin.engine import OriginEngine

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("gpufeed")]


@pytest.fixture(autouse=True)
def short_back_off(monkeypatch):
    monkeypatch.setattr(retry, "BASE_S", 0.001)


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
async def start_engine(metrics):
    """``start_engine(endpoint, **fields of OriginConfig)``."""
    engines = []

    def start(endpoint: str, **fields: object) -> OriginEngine:
        values = {"region": "cn-hangzhou", "key": "k", "secret": "s", "retries_max": 2, **fields}
        engine = OriginEngine(OriginConfig(endpoint=endpoint, **values), metrics)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.close()
