"""One limit over the arena, earlier arenas that are still mapped, and the heap."""

from __future__ import annotations

import asyncio

import pytest

from gpufeed.cachefs.arena.memfd import Arena
from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.config import ArenaConfig
from gpufeed.cachefs.errors import CapacityError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.units import MIB
from gpufeed.daemon.memory import ArenaMemory, heap_bytes, heap_reserved_bytes, require_heap
from gpufeed.daemon.windows import Windows

EXTENT = 64 * 1024


async def test_the_new_arena_is_used_only_as_far_as_both_fit() -> None:
    metrics = Metrics()
    arena = Arena(ArenaConfig(size_bytes=64 * EXTENT, extent_bytes=EXTENT, lock_memory=False))
    pool = SlotPool(arena, metrics)
    memory = ArenaMemory(90 * EXTENT, pool, Windows(64, EXTENT), metrics)
    assert memory.refusal() is None

    # Of the 20 that are left half is for a restart to come.
    memory.begin(1, (("old", 70 * EXTENT),))
    assert metrics.get("arena_elsewhere_bytes") == 70 * EXTENT
    assert "4.38 MiB of the arenas of earlier daemons" in str(memory.refusal())
    slots = [await pool.allocate("d", i) for i in range(10)]
    assert pool.table.available_count == 0
    memory.begin(2, (("old", 70 * EXTENT), ("older", EXTENT)))
    pool.drop(slots[0])
    assert pool.table.available_count == 1, "what was used already may be used again"

    memory.dropped(1, "old")
    memory.end(2)
    assert metrics.get("arena_elsewhere_bytes") == 0
    assert pool.table.available_count == 64 - 9
    for slot in slots[1:]:
        pool.drop(slot)
    arena.close()


async def test_whoever_waits_for_a_slot_is_woken_when_the_old_arena_goes() -> None:
    metrics = Metrics()
    arena = Arena(ArenaConfig(size_bytes=8 * EXTENT, extent_bytes=EXTENT, lock_memory=False))
    pool = SlotPool(arena, metrics)
    memory = ArenaMemory(8 * EXTENT, pool, Windows(8, EXTENT), metrics)
    memory.begin(1, (("old", 100 * EXTENT),))
    waiting = asyncio.ensure_future(pool.allocate("d", 0))
    await asyncio.sleep(0)
    assert not waiting.done()
    memory.dropped(1, "old")
    assert await waiting == 0
    pool.drop(0)
    arena.close()


def test_a_heap_beyond_its_share_lets_nobody_in() -> None:
    metrics = Metrics()
    require_heap(heap_bytes() + 64 * MIB, metrics)
    with pytest.raises(CapacityError, match=r"daemon\.memory_bytes"):
        require_heap(MIB, metrics)
    assert metrics.get("heap_bytes") > MIB


def test_a_small_container_keeps_half_for_the_heap() -> None:
    assert heap_reserved_bytes(128 * MIB) == 64 * MIB
    assert heap_reserved_bytes(64 * 1024 * MIB) == 128 * MIB
