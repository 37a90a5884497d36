"""How far ahead of its readers a fill may go: two rules, and who is woken."""

from __future__ import annotations

import asyncio

import pytest

from gpufeed.cachefs.pace import AHEAD_EXTENTS, Pace


def pace(*, keeps_together: bool, is_cached: bool = False) -> Pace:
    return Pace(is_cached=lambda: is_cached, keeps_together=keeps_together)


async def test_a_fill_into_the_store_waits_for_nobody() -> None:
    for keeps_together in (True, False):
        assert pace(keeps_together=keeps_together, is_cached=True).allows(10_000)


async def test_a_plain_stream_follows_its_fastest_reader() -> None:
    plain = pace(keeps_together=False)
    for reader, extent in (("slow", 2), ("fast", 20)):
        plain.enter(reader)
        plain.advance(reader, extent)

    assert plain.allows(20 + AHEAD_EXTENTS)
    assert not plain.allows(21 + AHEAD_EXTENTS)


async def test_a_compressed_stream_waits_for_its_slowest_reader() -> None:
    packed = pace(keeps_together=True)
    for reader, extent in (("slow", 2), ("fast", 20)):
        packed.enter(reader)
        packed.advance(reader, extent)

    assert packed.allows(2)
    assert not packed.allows(3)
    packed.leave("slow")
    assert packed.allows(20)


async def test_readers_never_go_back() -> None:
    packed = pace(keeps_together=True)
    packed.enter("reader")
    packed.advance("reader", 5)
    packed.advance("reader", 3)

    assert packed.allows(5)


@pytest.mark.parametrize("moves", ["advance", "leave"])
async def test_who_waits_is_woken_when_readers_move(moves: str) -> None:
    packed = pace(keeps_together=True)
    for reader in ("a", "b"):
        packed.enter(reader)
        packed.advance(reader, 7 if reader == "a" else 0)
    waiting = asyncio.create_task(packed.wait(4))
    await asyncio.sleep(0)
    assert not waiting.done()

    if moves == "advance":
        packed.advance("b", 4)
    else:
        packed.leave("b")

    await waiting
