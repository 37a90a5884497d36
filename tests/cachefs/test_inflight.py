"""The budget of bytes in flight: classes, reserves, order, and who may never wait for whom."""

from __future__ import annotations

import asyncio

import pytest

from gpufeed.cachefs.config import ArenaConfig
from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.inflight import InFlight, Urgency
from gpufeed.cachefs.metrics import Metrics

LIMIT, STEP = 100, 20


def demand() -> Urgency:
    return Urgency(demanded=True)


def prefetch() -> Urgency:
    return Urgency(demanded=False)


@pytest.fixture
def budget() -> InFlight:
    return InFlight(LIMIT, step_bytes=STEP, metrics=Metrics())


async def started(budget: InFlight, size: int, urgency: Urgency, *, continues: bool = False):
    task = asyncio.create_task(budget.take(size, urgency, continues=continues))
    await asyncio.sleep(0)
    return task


@pytest.mark.parametrize(
    ("urgency", "continues", "room"),
    [(demand(), True, 100), (demand(), False, 80), (prefetch(), False, 60)],
)
async def test_each_class_has_its_own_ceiling(
    budget: InFlight, urgency: Urgency, continues: bool, room: int
) -> None:
    for _ in range(room // 10):
        await budget.take(10, urgency, continues=continues)

    over = await started(budget, 10, urgency, continues=continues)

    assert budget.used_bytes == room
    assert not over.done()
    budget.give_back(10)
    await over
    budget.give_back(room)


async def test_demand_goes_before_prefetch_that_waits_longer(budget: InFlight) -> None:
    await budget.take(80, demand())
    early = await started(budget, 10, prefetch())
    late = await started(budget, 10, demand())

    budget.give_back(30)
    await late

    assert not early.done()
    budget.give_back(10)
    await early


async def test_prefetch_does_not_pass_demand_that_waits_for_more(budget: InFlight) -> None:
    await budget.take(50, demand())
    large = await started(budget, 60, demand())

    small = await started(budget, 10, prefetch())

    assert not small.done()
    budget.give_back(50)
    await large
    budget.give_back(60)
    await small


async def test_a_prefetch_that_gets_a_reader_waits_as_demand(budget: InFlight) -> None:
    urgency = prefetch()
    await budget.take(70, demand())
    waiting = await started(budget, 10, urgency)
    assert not waiting.done()

    budget.promote(urgency)
    await waiting

    assert budget.used_bytes == 80


async def test_who_continues_gets_the_step_that_nobody_else_may_take(budget: InFlight) -> None:
    await budget.take(80, demand())
    fresh = await started(budget, 20, demand())

    await budget.take(20, prefetch(), continues=True)

    assert not fresh.done()
    fresh.cancel()
    await asyncio.wait([fresh])
    assert budget.used_bytes == 100


async def test_what_exceeds_the_ceiling_goes_alone(budget: InFlight) -> None:
    await budget.take(10, demand())
    large = await started(budget, 500, prefetch())
    assert not large.done()

    budget.give_back(10)
    await large

    assert budget.used_bytes == 500


async def test_cancelled_waiters_leave_nothing_and_hold_nobody_up(budget: InFlight) -> None:
    await budget.take(70, demand())
    large = await started(budget, 60, demand())
    small = await started(budget, 10, demand())

    large.cancel()
    await asyncio.wait([large])
    await small

    granted = asyncio.create_task(budget.take(10, demand(), continues=True))
    await asyncio.sleep(0)
    await granted
    budget.give_back(10)
    late = await started(budget, 10, demand())
    budget.give_back(10)
    late.cancel()  # granted in the same turn: the grant goes back
    await asyncio.wait([late])
    assert budget.used_bytes == 70


def test_an_arena_gives_what_sessions_leave() -> None:
    arena = ArenaConfig(size_bytes=64 << 20, extent_bytes=1 << 20)

    budget = InFlight.of_arena(arena, part_bytes=3 << 19, metrics=Metrics())

    assert budget.limit_bytes == 16 << 20


@pytest.mark.parametrize("size", [1 << 19, 17 << 20])
def test_a_limit_outside_the_share_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=r"arena\.in_flight_bytes_max"):
        ArenaConfig(size_bytes=64 << 20, extent_bytes=1 << 20, in_flight_bytes_max=size)


async def test_room_that_is_offered_goes_to_demand_that_waits_and_not_to_prefetch(
    budget: InFlight,
) -> None:
    shed = []

    def give() -> None:
        shed.append(True)
        budget.give_back(70)

    await budget.take(70, demand())
    budget.offer("stalled", give)
    ahead = await started(budget, 10, prefetch())
    assert not shed

    await budget.take(40, demand())

    assert shed == [True]
    assert budget.used_bytes == 50
    await ahead


async def test_an_offer_withdrawn_is_kept(budget: InFlight) -> None:
    await budget.take(70, demand())
    budget.offer("stalled", lambda: pytest.fail("it was withdrawn"))
    budget.withdraw_offer("stalled")

    waiting = await started(budget, 40, demand())

    assert not waiting.done()
    budget.give_back(70)
    await waiting
