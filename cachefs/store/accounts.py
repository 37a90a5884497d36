"""Who has which bytes of the store: the budget, the queue for room, and their gauges.

A reservation whose room is still being unlinked waits in the queue; whoever came first is granted
first. The queue is bounded by the capacity: what is promised counts (`cachefs.budget`).

Pure but for the futures that it resolves; used on the loop's thread.
"""

from __future__ import annotations

import collections

from gpufeed.cachefs.budget import ByteBudget
from gpufeed.cachefs.errors import StorageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.store.reservation import Reservation
from gpufeed.cachefs.units import BLOCK_BYTES


class Accounts:
    """See the top of the file."""

    def __init__(self, capacity_bytes: int, metrics: Metrics) -> None:
        self.budget = ByteBudget(capacity_bytes // BLOCK_BYTES * BLOCK_BYTES)
        self._metrics = metrics
        self._promised: collections.deque[Reservation] = collections.deque()

    def reserve(self, reservation: Reservation) -> bool:
        """Take a reservation's bytes, or queue it for them. False: it waits for unlinks."""
        granted = self.budget.reserve(reservation.size_bytes)
        if granted:
            reservation.granted.set_result(None)
        else:
            self._promised.append(reservation)
        self.count()
        return granted

    def resize(self, reservation: Reservation, size_bytes: int) -> bool:
        """Fit a granted reservation to so many bytes; False and no change without room."""
        resized = self.budget.resize(reservation.size_bytes, size_bytes)
        if resized:
            reservation.size_bytes = size_bytes
        return resized

    def grant(self) -> None:
        """Room may have come: serve the queue."""
        while self._promised and self.budget.grant(self._promised[0].size_bytes):
            self._promised.popleft().granted.set_result(None)
        self.count()

    def break_promise(self, reservation: Reservation, error: StorageError) -> None:
        """Take a reservation out of the queue; who waits for its room gets `error`."""
        self._promised.remove(reservation)
        self.budget.withdraw(reservation.size_bytes)
        reservation.fail(error)

    def break_promises(self, error: StorageError) -> None:
        """Nobody's room is coming."""
        while self._promised:
            self.break_promise(self._promised[0], error)

    def count(self) -> None:
        """Show the gauges."""
        self._metrics.set("store_resident_bytes", self.budget.resident_bytes)
        self._metrics.set("store_reserved_bytes", self.budget.reserved_bytes)
