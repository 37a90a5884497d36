"""Whatever the service does, a call ends in right bytes or in one clear error, and in time.

Every kind of shaping and fault that the stand-in knows is tried with every call; the kinds are
taken from its own definitions, so a new one without an example here fails.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
from origin_rig import DATA, URL, engine_before, gauges_left, put, read_whole

from gpufeed.cachefs.errors import (
    AccessDeniedError,
    GpufeedError,
    IntegrityError,
    OriginUnavailableError,
    ShardChangedError,
)
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin import retry
from gpufeed.cachefs.testing.pytest_plugin import BUCKET
from gpufeed.cachefs.testing.standin.config import AccessKey
from gpufeed.cachefs.testing.standin.scenario import Fault, Scenario

DEADLINE_S = 4.0
# For a machine that is busy with other things.
SLACK_S = 20.0
# What chooses requests, or belongs to another field.
SELECTORS = {"match", "methods", "first", "after", "every", "probability", "code", "stall_s"}
FAULTS = {
    "status": {"status": 503, "code": "TotalQpsLimitExceeded"},
    "qos_delay_ms": {"qos_delay_ms": 30},
    "reset_after_bytes": {"reset_after_bytes": 100},
    "truncate_after_bytes": {"truncate_after_bytes": 100},
    "stall_after_bytes": {"stall_after_bytes": 100},
    "flip_byte_at": {"flip_byte_at": 0},
    "ignore_range": {"ignore_range": True},
    "change_etag": {"change_etag": True},
    "expire_token": {"expire_token": True},
}
# What is raised when the fault stays; a call that is not named ends well.
UNAVAILABLE = dict.fromkeys(("head", "list", "read"), OriginUnavailableError)
STAYS = {
    "status": UNAVAILABLE,
    "reset_after_bytes": {"list": OriginUnavailableError, "read": OriginUnavailableError},
    "truncate_after_bytes": {"list": OriginUnavailableError, "read": OriginUnavailableError},
    "stall_after_bytes": {"list": OriginUnavailableError, "read": OriginUnavailableError},
    "flip_byte_at": {"read": IntegrityError},  # the stand-in flips bytes of objects alone
    "change_etag": {"read": ShardChangedError},
    "expire_token": dict.fromkeys(("head", "list", "read"), AccessDeniedError),
}
SHAPES = {
    "seed": {"seed": 7},
    "first_byte": {"first_byte_ms": {"kind": "lognormal", "median": 20, "p99": 100}},
    "bytes_per_s_per_connection": {"mb_per_s_per_connection": 20},
    "bytes_per_s_total": {"mb_per_s_total": 20},
}


def test_no_kind_is_forgotten():
    assert set(FAULTS) == {f.name for f in dataclasses.fields(Fault)} - SELECTORS
    assert set(SHAPES) == {f.name for f in dataclasses.fields(Scenario)} - {"faults"}


@pytest.fixture
def oss_standin(oss_standin_factory):
    return oss_standin_factory(keys=(AccessKey("sts-key", "sts-secret", "sts-token"),))


@pytest.fixture
async def rig(oss_standin, monkeypatch):
    monkeypatch.setattr(retry, "BASE_S", 0.01)
    put(oss_standin, "a.tar", DATA)
    metrics = Metrics()
    async with engine_before(
        oss_standin.endpoint, metrics, key="sts-key", secret="sts-secret", token="sts-token",
        retries_max=2, stall_timeout_s=0.3, deadline_s=DEADLINE_S,
    ) as engine:  # fmt: skip
        yield engine, oss_standin, metrics
    assert not gauges_left(metrics)


async def do(kind: str, engine, info) -> None:
    """One call; what it gives is right, or it raises."""
    if kind == "head":
        found = await engine.head(URL)
        assert (found.url, found.size_bytes) == (URL, len(DATA))
    elif kind == "list":
        found = await engine.list(f"oss://{BUCKET}/a")
        assert [(i.url, i.size_bytes) for i in found] == [(URL, len(DATA))]
    else:
        assert await read_whole(engine, info) == DATA


async def outcome(kind: str, engine, info) -> type[GpufeedError] | None:
    """What the call raised; it ended before its deadline, and the error says what it was about."""
    begun_s = time.monotonic()
    raised = None
    try:
        async with asyncio.timeout(DEADLINE_S + SLACK_S):
            await do(kind, engine, info)
    except GpufeedError as error:
        raised = error
    assert time.monotonic() - begun_s < DEADLINE_S + SLACK_S
    if raised is None:
        return None
    assert f"oss://{BUCKET}/a" in str(raised)
    assert len(str(raised)) < 600
    return type(raised)


@pytest.mark.parametrize("call", ["head", "list", "read"])
@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_that_stays(rig, name, call):
    engine, standin, _ = rig
    info = await engine.head(URL)
    standin.set_scenario({"faults": [{**FAULTS[name], "methods": ["GET", "HEAD"]}]})
    assert await outcome(call, engine, info) is STAYS.get(name, {}).get(call)
    standin.set_scenario({})
    # Nothing of it sticks to the engine.
    await do(call, engine, await engine.head(URL))


@pytest.mark.parametrize("call", ["head", "list", "read"])
@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_that_strikes_once(rig, name, call):
    engine, standin, _ = rig
    info = await engine.head(URL)
    standin.set_scenario({"faults": [{**FAULTS[name], "methods": ["GET", "HEAD"], "first": 1}]})
    # What a repeat cannot mend: bytes that are wrong without being told, and another version.
    lasting = STAYS[name].get(call) if name in ("flip_byte_at", "change_etag") else None
    assert await outcome(call, engine, info) is lasting


@pytest.mark.parametrize("call", ["head", "list", "read"])
@pytest.mark.parametrize("name", SHAPES)
async def test_a_slow_service_is_only_slow(rig, name, call):
    engine, standin, _ = rig
    info = await engine.head(URL)
    standin.set_scenario(SHAPES[name])
    assert await outcome(call, engine, info) is None


async def test_the_deadline_bounds_a_body_that_has_stopped(oss_standin, metrics):
    put(oss_standin, "a.tar", DATA)
    async with engine_before(
        oss_standin.endpoint, metrics, key="sts-key", secret="sts-secret",
        token="sts-token", stall_timeout_s=3600.0, deadline_s=0.5,
    ) as engine:  # fmt: skip
        info = await engine.head(URL)
        oss_standin.set_scenario({"faults": [{"stall_after_bytes": 600_000}]})
        with pytest.raises(OriginUnavailableError, match=r"within origin.deadline_s = 0.5 s"):
            await read_whole(engine, info)
        oss_standin.set_scenario({})
        assert await read_whole(engine, info) == DATA
    assert not gauges_left(metrics)


@pytest.fixture
def metrics():
    return Metrics()
