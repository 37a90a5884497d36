"""The OSS origin against the stand-in: real signatures, and every way in which a service fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpufeed.cachefs import checksum
from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import (
    AccessDeniedError,
    IntegrityError,
    OriginUnavailableError,
    ShardChangedError,
)
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin import retry
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.testing.origin_contract import Reading, content
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, REGION, SECRET
from gpufeed.cachefs.testing.standin.config import AccessKey
from gpufeed.cachefs.testing.standin.process import StandinProcess

DATA = content(3_000_000)
URL = f"oss://{BUCKET}/a.tar"
PART = 1_000_000


def put(standin: StandinProcess, name: str, data: bytes) -> None:
    path = Path(standin.root, BUCKET, name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
def oss_standin(oss_standin_factory):
    temporary = AccessKey("sts-key", "sts-secret", "sts-token")
    return oss_standin_factory(keys=(AccessKey(KEY, SECRET), temporary))


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
async def engine(oss_standin, metrics, monkeypatch):
    monkeypatch.setattr(retry, "BASE_S", 0.001)
    put(oss_standin, "a.tar", DATA)
    config = OriginConfig(
        endpoint=oss_standin.endpoint, region=REGION, key="sts-key", secret="sts-secret",
        token="sts-token",
        retries_max=3, stall_timeout_s=0.3,
    )  # fmt: skip
    engine = OriginEngine(config, metrics)
    engine.start()
    yield engine
    await engine.close()


async def read_in_parts(engine: OriginEngine) -> tuple[bytes, list[list[int]]]:
    info = await engine.head(URL)
    assert info.crc64 == checksum.crc64(DATA)
    readings = [Reading(PART // 2, PART // 2) for _ in range(3)]
    await asyncio.gather(*(r.run(engine, info, i * PART) for i, r in enumerate(readings)))
    return b"".join(r.memory for r in readings), [r.reported for r in readings]


@pytest.mark.parametrize(
    "fault",
    [
        {"first": 2, "status": 503, "code": "TotalQpsLimitExceeded"},
        {"first": 1, "status": 500, "code": "InternalError"},
        {"first": 2, "reset_after_bytes": 300_000},
        {"first": 2, "truncate_after_bytes": 700_000},
        {"first": 2, "stall_after_bytes": 600_000},
        {"first": 2, "ignore_range": True},
        {"first": 1, "expire_token": True},
        {"first": 2, "qos_delay_ms": 5},
    ],
    ids=lambda fault: str(fault.get("code", list(fault)[1])),
)
async def test_a_fault_that_passes_costs_no_byte(engine, oss_standin, metrics, fault):
    oss_standin.set_scenario({"faults": [fault]})
    data, reported = await read_in_parts(engine)
    assert data == DATA
    assert reported == [[0, 1]] * 3
    # The fault was met, and did not pass by.
    assert metrics.get("origin_retries_total") + metrics.get("origin_throttled_total") > 0


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ({"status": 503, "code": "ActiveRequestLimitExceeded"}, OriginUnavailableError, "4 times"),
        ({"reset_after_bytes": 0}, OriginUnavailableError, "4 times"),
        ({"ignore_range": True}, IntegrityError, "HTTP 200"),
        ({"expire_token": True}, AccessDeniedError, "expired"),
        ({"change_etag": True}, ShardChangedError, "overwritten"),
    ],
)
async def test_a_fault_that_stays_is_told(engine, oss_standin, metrics, fault, error, text):
    info = await engine.head(URL)
    oss_standin.set_scenario({"faults": [fault]})
    with pytest.raises(error, match=text):
        await Reading(PART).run(engine, info, 0)
    assert metrics.get("origin_in_flight") == 0


async def test_a_listing_of_several_pages_is_complete(engine, oss_standin):
    for i in range(2100):
        put(oss_standin, f"many/{i}", b"x")
    infos = await engine.list(f"oss://{BUCKET}/many/")
    assert len(infos) == 2100
    assert [info.url for info in infos] == sorted(info.url for info in infos)


async def test_a_public_bucket_is_read_without_a_key_and_over_plain_http(oss_standin_factory):
    standin = oss_standin_factory(public_buckets=(BUCKET,))
    put(standin, "a.tar", DATA)
    engine = OriginEngine(OriginConfig(endpoint=standin.endpoint), Metrics())
    engine.start()
    for url in (URL, f"{standin.endpoint}/{BUCKET}/a.tar"):
        info = await engine.head(url)
        reading = Reading(PART)
        await reading.run(engine, info, PART)
        assert reading.memory == DATA[PART : 2 * PART]
    await engine.close()


async def test_a_wrong_secret_a_wrong_key_and_a_missing_bucket_are_told_apart(engine):
    for options, url, text in (
        ({"key": KEY, "secret": "wrong"}, URL, "origin.secret belongs"),
        ({"key": "wrong", "secret": "wrong"}, URL, "access key does not exist"),
        (None, "oss://no-such-bucket/a", "bucket does not exist"),
        (None, f"oss://{BUCKET}/no-such-key", "object does not exist"),
    ):
        with pytest.raises(Exception, match=text):
            await engine.head(url, options)
