"""Waiting for slots: the slot table with a queue in front. Owned by the daemon's loop.

Waiting is the exception. What sessions may hold is bounded by their windows, whose sum is
`WINDOWS_RATIO` of the slots; what fills and ranges hold is bounded by the bytes in flight
(`gpufeed.cachefs.inflight`), which are at most the rest. Who goes first is decided there; here it
is first come, first served.
"""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Callable

from gpufeed.cachefs.arena.memfd import Arena
from gpufeed.cachefs.arena.slots import SlotTable
from gpufeed.cachefs.config import IN_FLIGHT_RATIO
from gpufeed.cachefs.metrics import Metrics

WINDOWS_RATIO = 1 - IN_FLIGHT_RATIO


class SlotPool:
    """Slots of one arena.

    Args:
        arena: the memory.
        metrics: has the gauges.
        wait_s: see `SlotTable`.

    Attributes:
        on_touched: called with the count of slots that were ever used, when it grows.
        on_short: called when slots that were never used may not be (`limit_touched`), and others
            are recycled, or waited for, instead.
    """

    def __init__(
        self, arena: Arena, metrics: Metrics, wait_s: Callable[[str], float] = lambda _: math.inf
    ) -> None:
        self.arena = arena
        self.table = SlotTable(arena.slot_count, wait_s)
        self._metrics = metrics
        self._turns: collections.deque[asyncio.Future[None]] = collections.deque()
        self.on_touched: Callable[[int], None] = lambda _: None
        self.on_short: Callable[[], None] = lambda: None
        metrics.set("arena_slots", arena.slot_count)

    async def allocate(self, digest: str, extent: int) -> int | None:
        """A held slot for an extent; None if meanwhile the extent appeared in another slot."""
        while True:
            if self.table.knows(digest, extent):
                # Whoever is next must not wait for a turn that is not taken here.
                self._wake()
                return None
            if self.table.is_short:
                self.on_short()
            if self.table.available_count > 0:
                slot = self._take(digest, extent)
                self._wake()  # where several became free at once
                return slot
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._turns.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn in self._turns:
                    self._turns.remove(turn)
                # Whoever is next must not wait for a turn that nobody takes.
                self._wake()
                raise

    def _take(self, digest: str, extent: int) -> int:
        touched = self.table.touched_count
        slot = self.table.allocate(digest, extent)
        assert slot is not None
        if self.table.touched_count > touched:
            self.on_touched(self.table.touched_count)
            self._metrics.set("arena_touched_slots", self.table.touched_count)
        self._count()
        return slot

    def limit_touched(self, slot_count: int) -> None:
        """Of slots that were never used, use only those below `slot_count` from now on."""
        self.table.touch_max = slot_count
        self._wake()

    def find(self, digest: str, extent: int) -> int | None:
        """The slot that holds this extent whole, held for the caller; None: it is in none."""
        slot = self.table.find(digest, extent)
        if slot is not None:
            self.hold(slot)
        return slot

    def hold(self, slot: int) -> None:
        """One more holder of a ready slot."""
        self.table.hold(slot)
        self._count()

    def drop(self, slot: int) -> None:
        """One holder less; see `SlotTable.drop`."""
        self.table.drop(slot)
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
        while self._turns and self._turns[0].done():
            self._turns.popleft()
        if self._turns and self.table.available_count > 0:
            self._turns.popleft().set_result(None)

    def _count(self) -> None:
        self._metrics.set("arena_leased_slots", self.table.held_count)
