"""One limit over the arena, earlier arenas that are still mapped, and the heap."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from gpufeed.cachefs.arena.ledger import ArenaLedger
from gpufeed.cachefs.arena.memfd import Arena
from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.config import ArenaConfig
from gpufeed.cachefs.errors import CapacityError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.testing.clock import ManualClock
from gpufeed.cachefs.units import MIB
from gpufeed.daemon.memory import (
    LOOK_PAUSE_S,
    ArenaMemory,
    heap_bytes,
    heap_reserved_bytes,
    require_heap,
)
from gpufeed.daemon.windows import Windows

EXTENT = 64 * 1024


class Node:
    """The memory of a daemon after a restart: what a client still has of the one before."""

    def __init__(self, path: Path, *, limit: int, slots: int, old: int) -> None:
        self.ledger = ArenaLedger(str(path / "socket"))
        before = self.next_ledger().enter("0" * 32, old * EXTENT, "")
        before.touched(old * EXTENT)
        self.client = os.dup(before.fd)
        before.close()
        self.metrics = Metrics()
        self.clock = ManualClock()
        config = ArenaConfig(size_bytes=slots * EXTENT, extent_bytes=EXTENT, lock_memory=False)
        self.pool = SlotPool(Arena(config), self.metrics)
        self.memory = ArenaMemory(
            limit * EXTENT, self.pool, Windows(slots, EXTENT), self.metrics,
            ledger=self.ledger, tenant="", clock=self.clock,
        )  # fmt: skip

    def next_ledger(self) -> ArenaLedger:
        """Another daemon's at the same socket."""
        return ArenaLedger(self.ledger._folder.removesuffix(".arenas"))

    def let_go(self) -> None:
        """The client unmaps the old arena."""
        os.close(self.client)

    def close(self) -> None:
        self.pool.arena.close()
        self.memory.close()
        assert not os.path.exists(self.ledger._folder)


async def test_the_new_arena_is_used_only_as_far_as_both_fit(tmp_path: Path) -> None:
    node = Node(tmp_path, limit=90, slots=64, old=70)
    pool, metrics = node.pool, node.metrics
    # Of the 20 that are left half is for a restart to come.
    assert metrics.get("arena_elsewhere_bytes") == 70 * EXTENT
    assert "4.38 MiB of the arenas of earlier daemons" in str(node.memory.refusal())
    slots = [await pool.allocate("d", i) for i in range(10)]
    assert pool.table.available_count == 0
    pool.drop(slots[0])
    assert pool.table.available_count == 1, "what was used already may be used again"

    node.let_go()
    node.memory.look()
    assert metrics.get("arena_elsewhere_bytes") == 0
    assert node.memory.refusal() is None
    assert pool.table.available_count == 64 - 9
    for slot in slots[1:]:
        pool.drop(slot)
    node.close()


async def test_it_is_looked_again_for_want_of_slots_but_not_all_the_time(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, limit=90, slots=64, old=70)
    slots = [await node.pool.allocate("d", i) for i in range(10)]
    node.let_go()
    waiting = asyncio.ensure_future(node.pool.allocate("d", 10))
    await asyncio.sleep(0)
    assert not waiting.done(), "it was looked at a moment ago"
    node.clock.advance(2 * LOOK_PAUSE_S)
    slots.append(await node.pool.allocate("d", 11))
    slots.append(await waiting)
    assert node.metrics.get("arena_elsewhere_bytes") == 0
    for slot in slots:
        node.pool.drop(slot)
    node.close()


async def test_all_that_wait_for_slots_are_woken_when_the_old_arena_goes(tmp_path: Path) -> None:
    node = Node(tmp_path, limit=72, slots=64, old=70)
    held = [await node.pool.allocate("d", 0)]
    waiting = [asyncio.ensure_future(node.pool.allocate("d", i)) for i in range(1, 6)]
    await asyncio.sleep(0)
    node.let_go()
    node.memory.look()
    held += await asyncio.gather(*waiting)
    assert len(set(held)) == 6
    for slot in held:
        node.pool.drop(slot)
    node.close()


async def test_what_cannot_be_looked_at_stays(tmp_path: Path, monkeypatch, caplog) -> None:
    node = Node(tmp_path, limit=90, slots=64, old=70)

    def refused(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        node.memory.look()
    assert "cannot be looked at: [Errno 24] too many open files" in caplog.text
    assert node.metrics.get("arena_elsewhere_bytes") == 70 * EXTENT
    assert node.memory.refusal() is not None
    node.let_go()
    node.memory.look()
    assert node.memory.refusal() is None
    node.close()


async def test_what_was_touched_is_told_to_the_daemons_after_this_one(tmp_path: Path) -> None:
    node = Node(tmp_path, limit=90, slots=64, old=70)
    node.let_go()
    slots = [await node.pool.allocate("d", i) for i in range(3)]
    for slot in slots:
        node.pool.drop(slot)
    assert node.next_ledger().bytes_elsewhere("") == 3 * EXTENT
    node.close()


def test_a_heap_beyond_its_share_lets_nobody_in() -> None:
    metrics = Metrics()
    require_heap(heap_bytes() + 64 * MIB, metrics)
    with pytest.raises(CapacityError, match=r"daemon\.memory_bytes"):
        require_heap(MIB, metrics)
    assert metrics.get("heap_bytes") > MIB


def test_a_small_container_keeps_half_for_the_heap() -> None:
    assert heap_reserved_bytes(128 * MIB) == 64 * MIB
    assert heap_reserved_bytes(64 * 1024 * MIB) == 128 * MIB
