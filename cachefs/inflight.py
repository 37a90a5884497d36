"""How many bytes may be under way from the origin at once, over all fills and ranges of a daemon.

Bytes count from before they are asked for until the fill lets them go: received, indexed, written.
What sessions may hold (`WINDOWS_RATIO`) and this budget together are the arena, so that a slot is
always there for bytes that were granted, and no session can hold up a fill.

Three classes wait, each first come first served, and none passes a higher one:

- **continuing**: the caller holds an extent that only these bytes can complete. One request's worth
  of the budget (`step_bytes`) is kept for them, or fills with half an extent each could wait for
  one another for ever;
- **demand**: somebody waits for the bytes;
- **prefetch**: leaves `DEMAND_RESERVE_RATIO` of the rest to demand.

A request too large for its class goes alone. Who holds room only in case it goes on soon offers it
(`offer`): it is asked back when others wait. Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
import collections
import enum
from collections.abc import Callable

from gpufeed.cachefs.config import ArenaConfig
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.units import round_up

DEMAND_RESERVE_RATIO = 0.25


class Urgency:
    """Whether somebody waits for a fill: not for a prefetch, until a reader joins it."""

    __slots__ = ("demanded",)

    def __init__(self, *, demanded: bool) -> None:
        self.demanded = demanded


class _Class(enum.IntEnum):
    CONTINUING = 0
    DEMAND = 1
    PREFETCH = 2


class _Ticket:
    __slots__ = ("granted", "size_bytes", "urgency")

    def __init__(self, size_bytes: int, urgency: Urgency) -> None:
        self.size_bytes = size_bytes
        self.urgency = urgency
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class InFlight:
    """The budget. See the top of the file.

    Args:
        limit_bytes: for everything together.
        step_bytes: the most that one request adds.
        metrics: has the gauge.
    """

    def __init__(self, limit_bytes: int, *, step_bytes: int, metrics: Metrics) -> None:
        assert step_bytes > 0, step_bytes
        open_to_all_bytes = max(0, limit_bytes - step_bytes)
        self._ceiling_bytes = {
            _Class.CONTINUING: limit_bytes,
            _Class.DEMAND: open_to_all_bytes,
            _Class.PREFETCH: int(open_to_all_bytes * (1 - DEMAND_RESERVE_RATIO)),
        }
        self._queues: dict[_Class, collections.deque[_Ticket]] = {
            kind: collections.deque() for kind in _Class
        }
        self._offers: dict[object, Callable[[], None]] = {}
        self._metrics = metrics
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._is_granting = False

    @classmethod
    def of_arena(cls, arena: ArenaConfig, *, part_bytes: int, metrics: Metrics) -> InFlight:
        """The budget that goes with an arena, for requests of at most `part_bytes`."""
        step_bytes = round_up(part_bytes, arena.extent_bytes)
        return cls(arena.in_flight_bytes, step_bytes=step_bytes, metrics=metrics)

    async def take(self, size_bytes: int, urgency: Urgency, *, continues: bool = False) -> None:
        """Wait for room for `size_bytes`; `give_back` them, in pieces or whole.

        Args:
            size_bytes: how many.
            urgency: whose they are; see `promote`.
            continues: the caller holds bytes that cannot go before it has these.
        """
        kind = _Class.DEMAND if urgency.demanded else _Class.PREFETCH
        kind = _Class.CONTINUING if continues else kind
        ticket = _Ticket(size_bytes, urgency)
        self._queues[kind].append(ticket)
        self._grant()
        try:
            await ticket.granted
        except asyncio.CancelledError:
            if ticket.granted.cancelled():
                self._withdraw(ticket)
            else:
                self.give_back(size_bytes)
            raise

    def give_back(self, size_bytes: int) -> None:
        """So many bytes are under way no more."""
        assert 0 <= size_bytes <= self.used_bytes, (size_bytes, self.used_bytes)
        self.used_bytes -= size_bytes
        self._grant()

    def offer(self, owner: object, shed: Callable[[], None]) -> None:
        """`shed` gives room of the owner's back, at once, when somebody waits; called once."""
        self._offers[owner] = shed
        self._grant()

    def withdraw_offer(self, owner: object) -> None:
        """The owner needs its room itself, if it was not asked for."""
        self._offers.pop(owner, None)

    def promote(self, urgency: Urgency) -> None:
        """Somebody waits for a prefetch now: what it waits for becomes demand."""
        urgency.demanded = True
        prefetch = self._queues[_Class.PREFETCH]
        mine = [ticket for ticket in prefetch if ticket.urgency is urgency]
        for ticket in mine:
            prefetch.remove(ticket)
            self._queues[_Class.DEMAND].append(ticket)
        if mine:
            self._grant()

    def _withdraw(self, ticket: _Ticket) -> None:
        for queue in self._queues.values():
            if ticket in queue:
                queue.remove(ticket)
        # It may have been what those behind it waited for.
        self._grant()

    def _grant(self) -> None:
        # What is shed in here comes back through `give_back`.
        if not self._is_granting:
            self._is_granting = True
            try:
                self._grant_in_turn()
            finally:
                self._is_granting = False
                self._metrics.set("in_flight_bytes", self.used_bytes)

    def _grant_in_turn(self) -> None:
        for kind, queue in self._queues.items():
            while queue:
                ticket = queue[0]
                if not ticket.granted.done():
                    if not self._make_fit(ticket.size_bytes, kind):
                        return
                    self.used_bytes += ticket.size_bytes
                    ticket.granted.set_result(None)
                queue.popleft()

    def _make_fit(self, size_bytes: int, kind: _Class) -> bool:
        while not self._fits(size_bytes, kind):
            if kind is _Class.PREFETCH or not self._offers:
                return False
            owner = next(iter(self._offers))
            self._offers.pop(owner)()
        return True

    def _fits(self, size_bytes: int, kind: _Class) -> bool:
        return self.used_bytes == 0 or self.used_bytes + size_bytes <= self._ceiling_bytes[kind]
