"""What will not do, or costs money: another region's bucket, a public endpoint, a wrong region."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import AccessDeniedError, OperatorError, OriginUnavailableError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.origin import pool
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.origin.failure import AttemptFailedError, Failure, FailureKind
from gpufeed.cachefs.testing.origin_contract import Reading
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, REGION, SECRET

ELSEWHERE = "elsewhere"


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
async def start_engine(metrics):
    engines = []

    def start(endpoint: str, **fields: object) -> OriginEngine:
        values = {"region": REGION, "key": KEY, "secret": SECRET, "retries_max": 0, **fields}
        engine = OriginEngine(OriginConfig(endpoint=endpoint, **values), metrics)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.close()


@pytest.mark.parametrize("call", ["head", "list", "read"])
async def test_a_bucket_of_another_region_names_endpoint_and_region_to_set(
    oss_standin_factory, start_engine, metrics, call
):
    standin = oss_standin_factory(other_regions={ELSEWHERE: "cn-beijing"})
    engine = start_engine(standin.endpoint)
    info = ObjectInfo(f"oss://{ELSEWHERE}/a", 4, "ETAG")
    calls = {
        "head": lambda: engine.head(info.url),
        "list": lambda: engine.list(f"oss://{ELSEWHERE}/"),
        "read": lambda: engine.read_into(info, 0, Reading(4).targets, lambda _: None),
    }
    with pytest.raises(OperatorError) as caught:
        await calls[call]()
    assert type(caught.value) is OperatorError
    assert (
        "set origin.endpoint to oss-cn-beijing.aliyuncs.com (oss-cn-beijing-internal.aliyuncs.com "
        "on machines there) and origin.region to cn-beijing"
    ) in str(caught.value)
    assert "request id" in str(caught.value)
    assert metrics.get("origin_retries_total") == 0


async def test_a_public_endpoint_and_a_wrong_region_are_warned_about_once(
    start_engine, metrics, caplog, monkeypatch
):
    caplog.set_level(logging.WARNING)

    async def refuse(*_: object) -> None:
        """Nobody asks a real cloud."""
        raise AttemptFailedError(Failure(FailureKind.CONNECT, "refused by the test"))

    monkeypatch.setattr(pool, "connect", refuse)
    engine = start_engine("http://oss-cn-hangzhou.aliyuncs.com", region="cn-beijing", threads=2)
    heads = [engine.head(f"oss://{BUCKET}/a") for _ in range(8)]
    for outcome in await asyncio.gather(*heads, return_exceptions=True):
        assert isinstance(outcome, OriginUnavailableError)
    assert caplog.text.count("is a public endpoint") == 1
    assert caplog.text.count("is in cn-hangzhou, which is taken") == 1
    assert "set origin.endpoint to oss-cn-hangzhou-internal.aliyuncs.com" in caplog.text
    assert metrics.get("origin_warnings_total") == 2


async def test_a_clients_endpoint_has_its_own_region_and_no_caution(
    start_engine, metrics, caplog, monkeypatch
):
    caplog.set_level(logging.WARNING)

    async def refuse(*_: object) -> None:
        raise AttemptFailedError(Failure(FailureKind.CONNECT, "refused by the test"))

    monkeypatch.setattr(pool, "connect", refuse)
    engine = start_engine("http://oss-cn-hangzhou-internal.aliyuncs.com")
    other = {"endpoint": "oss-cn-beijing-internal.aliyuncs.com"}
    with pytest.raises(OriginUnavailableError):
        await engine.head(f"oss://{BUCKET}/a", other)
    assert metrics.get("origin_warnings_total") == 0


async def test_an_unsigned_request_that_is_denied_says_that_it_was_unsigned(
    oss_standin, start_engine
):
    engine = start_engine(oss_standin.endpoint, key="", secret="", credentials="anonymous")
    for call in (engine.head(f"oss://{BUCKET}/a"), engine.list(f"oss://{BUCKET}/")):
        with pytest.raises(AccessDeniedError, match="was unsigned: no credentials were found"):
            await call
