"""When a write of an extent may begin: within the cap, and few at a time. On the loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.store.writecap import WriteCap


class WritePace:
    """See the top of the file. `cap` also decides which shards may come (`store.writecap`)."""

    def __init__(self, cap: WriteCap, in_flight_max: int, clock: Clock) -> None:
        self.cap = cap
        self._clock = clock
        self._free = asyncio.Semaphore(in_flight_max)

    @asynccontextmanager
    async def turn(self, size_bytes: int) -> AsyncIterator[None]:
        """Wait for the turn of a write of so many bytes."""
        async with self._free:
            delay_s = self.cap.delay_s(size_bytes, self._clock.monotonic_s())
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            yield
