"""When a write of an extent may begin: within the cap, and few at a time. On the loop's thread."""

from __future__ import annotations

import asyncio

from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.store.writecap import WriteCap


class WritePace:
    """See the top of the file. `cap` also decides which shards may come (`store.writecap`)."""

    def __init__(self, cap: WriteCap, in_flight_max: int, clock: Clock) -> None:
        self.cap = cap
        self._clock = clock
        self._free = asyncio.Semaphore(in_flight_max)

    @property
    def is_free(self) -> bool:
        """Whether `take_turn` would not wait."""
        return not self._free.locked() and not self.cap.is_set

    async def take_turn(self, size_bytes: int) -> None:
        """Wait for the turn of a write of so many bytes; `end_turn` after it."""
        await self._free.acquire()
        try:
            delay_s = self.cap.delay_s(size_bytes, self._clock.monotonic_s())
            if delay_s > 0:
                await asyncio.sleep(delay_s)
        except BaseException:
            self._free.release()
            raise

    def end_turn(self) -> None:
        """The write is over, or the disk has not answered for so long that another may try."""
        self._free.release()
