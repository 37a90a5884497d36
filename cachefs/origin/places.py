"""Who may be inside: a limit that moves, demand before prefetch.

Like a semaphore with two queues. As long as anybody waits on demand, no prefetch gets a place; and
prefetch leaves a part of the places free (`DEMAND_SHARE`), so that demand that comes later finds
one at once. The limit is asked for at every change: where it has fallen, nobody is sent away, but
fewer come in.

Invariant: whoever waits is let in by somebody who leaves, or by a change of the limit that the next
one who leaves sees. Since the limit is at least one, somebody is inside where somebody waits.

Lives on one loop.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

# One of so many places is kept from prefetch.
DEMAND_SHARE = 4


class Places:
    """See the top of the file. `limit` gives the number of places, at least one."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._taken_count = 0
        self._demand: collections.deque[asyncio.Future[None]] = collections.deque()
        self._prefetch: collections.deque[asyncio.Future[None]] = collections.deque()

    def try_take(self, *, demand: bool) -> bool:
        """Take a place if that is possible at once."""
        if self._waits(self._demand) or (not demand and self._waits(self._prefetch)):
            return False
        if self._taken_count >= self._allowed(demand=demand):
            return False
        self._taken_count += 1
        return True

    async def take(self, *, demand: bool) -> None:
        """Wait for a place, behind those who came before; `give` it back."""
        if self.try_take(demand=demand):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._demand if demand else self._prefetch).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give()
            raise

    def give(self) -> None:
        """Leave."""
        assert self._taken_count > 0, "nobody is inside"
        self._taken_count -= 1
        for queue, demand in ((self._demand, True), (self._prefetch, False)):
            while self._waits(queue) and self._taken_count < self._allowed(demand=demand):
                self._taken_count += 1
                queue.popleft().set_result(None)
            if self._waits(queue):
                return

    def _allowed(self, *, demand: bool) -> int:
        limit = self._limit()
        return limit if demand else limit - limit // DEMAND_SHARE

    @staticmethod
    def _waits(queue: collections.deque[asyncio.Future[None]]) -> bool:
        """Whether anybody in the queue still waits; drops those who went away."""
        while queue and queue[0].done():
            queue.popleft()
        return bool(queue)
