"""Slow parts asked for again: which of the two wins, what is written, what is given back."""

from __future__ import annotations

import asyncio

import pytest
from origin_rig import DATA, URL, engine_before, gauges_left, put, read_whole

from gpufeed.cachefs.errors import OriginUnavailableError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin import hedge, retry, spare
from gpufeed.cachefs.testing.origin_contract import Reading

# Nothing but a hedge can end a stall before a test has failed.
STALL_TIMEOUT_S = 60.0


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def start(oss_standin, metrics, monkeypatch):
    """An engine that has seen enough to know what is usual."""
    monkeypatch.setattr(retry, "BASE_S", 0.001)
    monkeypatch.setattr(hedge, "LATE_MIN_S", 5.0)  # not yet
    put(oss_standin, "a.tar", DATA)

    async def warmed(engine):
        info = await engine.head(URL)
        for _ in range(hedge.SAMPLES_MIN + hedge.REFRESH_COUNT):
            await read_whole(engine, info)
        oss_standin.reset()
        # When a part is late is tried by the clock in the policy's own tests; here it is soon.
        monkeypatch.setattr(hedge.Usual, "late_s", lambda self, size_bytes: 0.05)
        monkeypatch.setattr(hedge.Usual, "expected_s", lambda self, size_bytes: 0.0)
        assert metrics.get("hedges_total") == 0
        return info

    def begin(**fields: object):
        values = {"stall_timeout_s": STALL_TIMEOUT_S, "deadline_s": STALL_TIMEOUT_S / 2, **fields}
        return engine_before(oss_standin.endpoint, metrics, **values)

    begin.warmed = warmed
    return begin


def stalls(first: int, stall_s: float = 3600.0, **more: object) -> dict[str, object]:
    return {"first": first, "stall_after_bytes": 600_000, "stall_s": stall_s, **more}


async def test_a_part_that_hangs_is_finished_by_a_second_request(start, oss_standin, metrics):
    async with start() as engine:
        info = await start.warmed(engine)
        oss_standin.set_scenario({"faults": [stalls(1)]})
        reading = Reading(500_000, 500_000)
        seen: list[int] = []

        def spoil(i: int) -> None:
            seen.append(i)
            if i == 0:  # reported, so nobody writes there any more
                reading.targets[0][:] = bytes(500_000)

        await engine.read_into(info, 0, reading.targets, spoil)
        assert seen == [0, 1]
        assert reading.memory == bytes(500_000) + DATA[500_000:]
        assert metrics.get("hedges_total") == 1
        assert metrics.get("hedges_won_total") == 1
        assert metrics.get("origin_retries_total") == 0
        assert metrics.get("hedge_spare_bytes") == 0
        # The second asked for what was missing, not for the whole.
        assert oss_standin.counters()["bytes"] < 1_100_000
        assert await read_whole(engine, info) == DATA
    assert not gauges_left(metrics)


async def test_a_first_request_that_goes_on_after_all_may_win(start, oss_standin, metrics):
    async with start() as engine:
        info = await start.warmed(engine)
        second = {"after": 1, "first": 2, "stall_after_bytes": 100, "stall_s": 3600.0}
        oss_standin.set_scenario({"faults": [stalls(1, stall_s=0.5), second]})
        assert await read_whole(engine, info) == DATA
        assert metrics.get("hedges_total") == 1
        assert metrics.get("hedges_won_total") == 0
        assert metrics.get("hedge_spare_bytes") == 0
        assert metrics.get("origin_in_flight") == 0


async def test_a_first_request_that_fails_waits_for_the_second(start, oss_standin, metrics):
    async with start(retries_max=0) as engine:
        info = await start.warmed(engine)
        second = {"after": 1, "first": 2, "stall_after_bytes": 100, "stall_s": 0.7}
        broken = stalls(1, stall_s=0.3, reset_after_bytes=600_001)
        oss_standin.set_scenario({"faults": [broken, second]})
        assert await read_whole(engine, info) == DATA
        assert metrics.get("hedges_won_total") == 1


async def test_when_both_fail_it_is_as_if_there_had_been_one(start, oss_standin, metrics):
    async with start(retries_max=0) as engine:
        info = await start.warmed(engine)
        second = {"after": 1, "first": 2, "status": 503}
        broken = stalls(1, stall_s=0.3, reset_after_bytes=600_001)
        oss_standin.set_scenario({"faults": [broken, second]})
        with pytest.raises(OriginUnavailableError, match="1 times"):
            await read_whole(engine, info)
        assert metrics.get("hedges_total") == 1
        assert metrics.get("hedges_won_total") == 0
        assert await read_whole(engine, info) == DATA


async def test_a_caller_that_goes_away_takes_both_requests_with_it(
    start, oss_standin, metrics, monkeypatch
):
    here, hedged = asyncio.get_running_loop(), asyncio.Event()
    take = spare.Spares.take

    def noticed(self: spare.Spares, size_bytes: int) -> memoryview | None:
        here.call_soon_threadsafe(hedged.set)
        return take(self, size_bytes)

    monkeypatch.setattr(spare.Spares, "take", noticed)
    async with start() as engine:
        info = await start.warmed(engine)
        oss_standin.set_scenario({"faults": [stalls(2)]})
        reading = Reading(1_000_000)
        running = asyncio.create_task(reading.run(engine, info, 0))
        await hedged.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert metrics.get("hedges_total") == 1
        assert metrics.get("hedge_spare_bytes") == 0
        assert metrics.get("origin_in_flight") == 0
        reading.memory[:] = bytes(1_000_000)
        oss_standin.set_scenario({})
        assert await read_whole(engine, info) == DATA
        assert not any(reading.memory)


@pytest.mark.parametrize(
    "fields", [{"hedge_ratio_max": 0.0}, {"hedge_spare_bytes": 100_000}], ids=["ratio", "memory"]
)
async def test_what_the_settings_forbid_is_not_hedged(start, oss_standin, metrics, fields):
    async with start(**{**fields, "stall_timeout_s": 0.5}) as engine:
        info = await start.warmed(engine)
        oss_standin.set_scenario({"faults": [stalls(1)]})
        assert await read_whole(engine, info) == DATA
        assert metrics.get("hedges_total") == 0
        assert metrics.get("origin_retries_total") == 1


async def test_prefetch_is_not_hedged(start, oss_standin, metrics):
    async with start(stall_timeout_s=0.5) as engine:
        info = await start.warmed(engine)
        oss_standin.set_scenario({"faults": [stalls(1)]})
        reading = Reading(1_000_000)
        targets, told = reading.targets, reading.reported.append
        await engine.read_into(info, 0, targets, told, demand=False)
        assert reading.memory == DATA
        assert metrics.get("hedges_total") == 0


async def test_an_origin_that_is_slow_as_a_whole_is_asked_a_few_more_times_only(
    start, oss_standin, metrics
):
    async with start(hedge_ratio_max=0.05) as engine:
        info = await start.warmed(engine)
        oss_standin.set_scenario({"mb_per_s_per_connection": 3})
        for _ in range(3):
            await asyncio.gather(*(read_whole(engine, info) for _ in range(20)))
        requests = oss_standin.counters()["requests_by_kind"]["get"]
        assert requests <= 60 + hedge.BURST_COUNT
