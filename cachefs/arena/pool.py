"""Waiting for slots: the slot table with a queue in front. Owned by the daemon's loop.

Demand goes before prefetch, and prefetch leaves `DEMAND_RESERVE_RATIO` of the slots alone. Nobody
who holds slots waits here for a reader: fills hold theirs only while bytes are under way to memory
and disk, and what sessions may hold is bounded by their windows, whose sum stays below the whole
(`WINDOWS_RATIO`). So every wait ends.
"""

from __future__ import annotations

import asyncio
import collections

from gpufeed.cachefs.arena.memfd import Arena
from gpufeed.cachefs.arena.slots import SlotTable
from gpufeed.cachefs.metrics import Metrics

DEMAND_RESERVE_RATIO = 0.125
WINDOWS_RATIO = 0.75


class SlotPool:
    """Slots of one arena."""

    def __init__(self, arena: Arena, metrics: Metrics) -> None:
        self.arena = arena
        self.table = SlotTable(arena.slot_count)
        self._metrics = metrics
        self._demand: collections.deque[asyncio.Future[None]] = collections.deque()
        self._prefetch: collections.deque[asyncio.Future[None]] = collections.deque()
        self._reserve_count = max(1, int(arena.slot_count * DEMAND_RESERVE_RATIO))
        # Whoever needs several slots at once takes them under one of these: if two waited with a
        # part of theirs in hand, they could wait for each other.
        self.taking = {True: asyncio.Lock(), False: asyncio.Lock()}
        metrics.set("arena_slots", arena.slot_count)

    async def allocate(
        self, digest: str, extent: int, *, near: int | None = None, demand: bool
    ) -> int | None:
        """A held slot for an extent; None if meanwhile the extent appeared in another slot."""
        queue = self._demand if demand else self._prefetch
        while True:
            if self.table.knows(digest, extent):
                # Whoever is next must not wait for a turn that is not taken here.
                self._wake()
                return None
            if self._may_take(demand):
                slot = self.table.allocate(digest, extent, near=near)
                assert slot is not None
                self._count()
                return slot
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in queue:
                    queue.remove(turn)
                # Whoever is next must not wait for a turn that nobody takes.
                self._wake()
                raise

    def _may_take(self, demand: bool) -> bool:
        available = self.table.available_count
        return available > 0 if demand else available > self._reserve_count and not self._demand

    def hold(self, slot: int) -> None:
        """One more holder of a ready slot."""
        self.table.hold(slot)
        self._count()

    def drop(self, slot: int, *, wanted: bool = False) -> None:
        """One holder less; see `SlotTable.drop`."""
        self.table.drop(slot, wanted=wanted)
        self._count()
        self._wake()

    def disown(self, digest: str, extent: int) -> None:
        """See `SlotTable.disown`."""
        self.table.disown(digest, extent)
        self._count()
        self._wake()

    def forget(self, digest: str) -> None:
        """See `SlotTable.forget`."""
        self.table.forget(digest)
        self._count()
        self._wake()

    def view(self, slot: int) -> memoryview:
        """The slot's memory."""
        return self.arena.slot(slot)

    def _wake(self) -> None:
        for demand, queue in ((True, self._demand), (False, self._prefetch)):
            while queue and queue[0].done():
                queue.popleft()
            if queue and self._may_take(demand):
                queue.popleft().set_result(None)
                return

    def _count(self) -> None:
        self._metrics.set("arena_leased_slots", self.table.held_count)
