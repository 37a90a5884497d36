"""Every row of the table of error codes, told by a real server: what is done, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from origin_rig import DATA, URL, engine_before, put, read_whole

from gpufeed.cachefs.errors import (
    AccessDeniedError,
    NotFoundError,
    OperatorError,
    OriginUnavailableError,
    ShardChangedError,
)
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin import retry
from gpufeed.cachefs.origin.limits import Sign
from gpufeed.cachefs.origin.oss_codes import CODES, STATUSES, Action

RETRIES = 2
ERRORS = {
    Action.AGAIN: OriginUnavailableError,
    Action.CREDENTIALS: AccessDeniedError,
    Action.CLOCK: AccessDeniedError,
    Action.CHANGED: ShardChangedError,
    Action.NOT_FOUND: NotFoundError,
    Action.DENIED: AccessDeniedError,
    Action.REFUSED: OperatorError,
}
# How often a call that meets the code each time is sent.
SENT = {Action.AGAIN: 1 + RETRIES, Action.CREDENTIALS: 2, Action.CLOCK: 2}
LIMITS = {
    Sign.REQUESTS: "origin_requests_per_s_limit",
    Sign.BANDWIDTH: "origin_bytes_per_s_limit",
    Sign.CONNECTIONS: "origin_connections_limit",
}
ROWS = [(rule.status, code, rule) for code, rule in CODES.items()]
ROWS += [(status, "Unheard", rule) for status, rule in STATUSES.items()]


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
async def engine(oss_standin, metrics, monkeypatch):
    monkeypatch.setattr(retry, "BASE_S", 0.001)
    put(oss_standin, "a.tar", DATA)
    async with engine_before(oss_standin.endpoint, metrics, retries_max=RETRIES) as engine:
        yield engine


@pytest.mark.parametrize(
    ("status", "code", "rule"), ROWS, ids=[f"{status}-{code}" for status, code, _ in ROWS]
)
async def test_a_row(engine, oss_standin, metrics, status, code, rule):
    info = await engine.head(URL)
    oss_standin.set_scenario({"faults": [{"status": status, "code": code}]})
    oss_standin.reset()
    limits_before = {name: metrics.get(name) for name in LIMITS.values()}
    with pytest.raises(ERRORS[rule.action]) as caught:
        await read_whole(engine, info)
    assert type(caught.value) is ERRORS[rule.action]
    text = str(caught.value)
    assert URL in text
    assert code in text
    assert rule.hint in text
    sent = oss_standin.counters()["requests_by_kind"]
    assert sent["get"] == SENT.get(rule.action, 1)
    cut = {name for name in LIMITS.values() if metrics.get(name) != limits_before[name]}
    expected = {LIMITS[rule.sign]} if rule.sign else set()
    assert cut == expected
    assert (metrics.get("origin_throttled_total") > 0) == (rule.sign is not None)


@pytest.mark.parametrize("code", [c for c, rule in CODES.items() if rule.action is Action.AGAIN])
async def test_what_passes_after_a_while_costs_nothing_but_time(engine, oss_standin, code):
    info = await engine.head(URL)
    fault = {"status": CODES[code].status, "code": code, "first": RETRIES}
    oss_standin.set_scenario({"faults": [fault]})
    assert await read_whole(engine, info) == DATA


async def test_an_answer_held_back_limits_the_bytes(engine, oss_standin, metrics):
    info = await engine.head(URL)
    oss_standin.set_scenario({"faults": [{"qos_delay_ms": 5}]})
    assert await read_whole(engine, info) == DATA
    assert metrics.get("origin_bytes_per_s_limit") > 0
    assert metrics.get("origin_retries_total") == 0


async def test_a_range_beyond_the_end_says_that_the_object_is_not_what_it_was(engine, oss_standin):
    info = await engine.head(URL)
    put(oss_standin, "a.tar", DATA[:1000])
    with pytest.raises(ShardChangedError, match=r"overwritten.*etag"):
        await read_whole(engine, info)


def test_the_documentation_has_the_same_table():
    page = Path(__file__).parents[2].joinpath("docs", "origin.md").read_text()
    for name, rule in [*CODES.items(), *((str(s), r) for s, r in STATUSES.items())]:
        learned = rule.sign.value if rule.sign else ""
        row = f"| `{name}` | {rule.status} | {rule.action.value} | {learned} | {rule.hint} |"
        assert row in page, row
