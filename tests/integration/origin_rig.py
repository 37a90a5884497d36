"""An engine before a stand-in, for tests of how the origin behaves when the service misbehaves."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from gpufeed.cachefs import checksum
from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import IntegrityError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.testing.origin_contract import Reading, content
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, REGION, SECRET
from gpufeed.cachefs.testing.standin.process import StandinProcess

DATA = content(1_000_000)
URL = f"oss://{BUCKET}/a.tar"


def put(standin: StandinProcess, name: str, data: bytes) -> None:
    Path(standin.root, BUCKET, name).write_bytes(data)


@contextlib.asynccontextmanager
async def engine_before(
    endpoint: str, metrics: Metrics, **fields: Any
) -> AsyncIterator[OriginEngine]:
    values = {"region": REGION, "key": KEY, "secret": SECRET, **fields}
    engine = OriginEngine(OriginConfig(endpoint=endpoint, **values), metrics)
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def read_whole(engine: OriginEngine, info: ObjectInfo) -> bytes:
    """Read it in two targets, and verify it as a fill does.

    Raises:
        IntegrityError: the checksum told is not that of what came.
    """
    half = info.size_bytes // 2
    reading = Reading(half, info.size_bytes - half)
    told = await reading.run(engine, info, 0)
    assert reading.reported == [0, 1]
    if told is not None and told != checksum.crc64(bytes(reading.memory)):
        raise IntegrityError(f"{info.url}: the checksum of what came is not the one told")
    return bytes(reading.memory)


GAUGES = ("origin_in_flight", "origin_waiting", "origin_degraded", "hedge_spare_bytes",
          "origin_connections_limit", "origin_requests_per_s_limit",
          "origin_bytes_per_s_limit")  # fmt: skip


def gauges_left(metrics: Metrics) -> dict[str, float]:
    """Gauges that are not back at zero; after the engine was closed there is none."""
    return {name: metrics.get(name) for name in GAUGES if metrics.get(name)}
