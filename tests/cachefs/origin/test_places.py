"""Who comes in: demand before prefetch, and a limit that moves."""

from __future__ import annotations

import asyncio

import pytest

from gpufeed.cachefs.origin.places import Places


class Door:
    """Places, and who has come in, in order."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.places = Places(lambda: self.limit)
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        for name in names:
            task = asyncio.create_task(self._take(name))
            self.tasks[name] = task
        await self.settle()

    async def _take(self, name: str) -> None:
        await self.places.take(demand=name.startswith("d"))
        self.inside.append(name)

    async def leave(self, name: str) -> None:
        self.inside.remove(name)
        self.places.give()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def door():
    return Door(4)


async def test_prefetch_leaves_a_place_for_demand(door):
    await door.come("p1", "p2", "p3", "p4")
    assert door.inside == ["p1", "p2", "p3"]
    await door.come("d1")
    assert door.inside == ["p1", "p2", "p3", "d1"]
    await door.leave("p1")
    assert door.inside == ["p2", "p3", "d1"]  # p4 would take the place that is kept
    await door.leave("d1")
    assert door.inside == ["p2", "p3", "p4"]


async def test_demand_goes_before_prefetch_that_waited_longer(door):
    await door.come("d1", "d2", "d3", "d4", "p1", "d5")
    await door.leave("d1")
    await door.leave("d2")
    assert door.inside == ["d3", "d4", "d5"]
    await door.come("d6")
    assert door.inside == ["d3", "d4", "d5", "d6"]
    for name in ("d3", "d4"):
        await door.leave(name)
    assert door.inside == ["d5", "d6", "p1"]


async def test_who_comes_later_does_not_pass_who_waits(door):
    await door.come("d1", "d2", "d3", "d4", "d5")
    door.limit = 5
    assert not door.places.try_take(demand=True)
    await door.leave("d1")
    assert door.inside == ["d2", "d3", "d4", "d5"]


async def test_a_limit_that_falls_lets_fewer_in_and_one_that_rises_more(door):
    await door.come("d1", "d2", "d3", "d4", "d5", "d6", "d7")
    door.limit = 2
    for name in ("d1", "d2"):
        await door.leave(name)
    assert door.inside == ["d3", "d4"]
    door.limit = 4
    await door.leave("d3")
    assert door.inside == ["d4", "d5", "d6", "d7"]


async def test_with_one_place_prefetch_gets_it_too():
    door = Door(1)
    await door.come("p1", "p2", "d1")
    assert door.inside == ["p1"]
    await door.leave("p1")
    assert door.inside == ["d1"]
    await door.leave("d1")
    assert door.inside == ["p2"]


async def test_who_goes_away_leaves_no_place_taken(door):
    await door.come("d1", "d2", "d3", "d4", "d5", "d6")
    door.tasks["d5"].cancel()
    await door.settle()
    # d6 is let in and cancelled before it has noticed.
    door.inside.remove("d1")
    door.places.give()
    door.tasks["d6"].cancel()
    await door.settle()
    assert door.inside == ["d2", "d3", "d4"]
    assert door.places.try_take(demand=True)
    assert not door.places.try_take(demand=True)
