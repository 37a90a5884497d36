"""When a write of an extent may begin: within the cap, and few at a time. On the loop's thread.

First come, first served. Those that wait for others are turned away at once when the disk fails.
"""

from __future__ import annotations

import asyncio
import collections

from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.errors import StorageError
from gpufeed.cachefs.store.writecap import WriteCap


class WritePace:
    """See the top of the file. `cap` also decides which shards may come (`store.writecap`)."""

    def __init__(self, cap: WriteCap, in_flight_max: int, clock: Clock) -> None:
        self.cap = cap
        self._clock = clock
        self._free_count = in_flight_max
        self._turns: collections.deque[asyncio.Future[None]] = collections.deque()

    async def take_turn(self, size_bytes: int) -> None:
        """Wait for the turn of a write of so many bytes; `end_turn` after it.

        Raises:
            StorageError: turned away.
        """
        if self._free_count:
            self._free_count -= 1
        else:
            await self._wait()
        delay_s = self.cap.delay_s(size_bytes, self._clock.monotonic_s())
        if delay_s > 0:
            try:
                await asyncio.sleep(delay_s)
            except BaseException:
                self.end_turn()
                raise

    async def _wait(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            # A cancelled turn is skipped when it comes up.
            if not turn.cancelled() and turn.exception() is None:
                self.end_turn()
            raise

    def end_turn(self) -> None:
        """The write is over, or the disk has not answered for so long that another may try."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free_count += 1

    def turn_away(self, error: StorageError) -> None:
        """The disk failed: whoever waits for a turn gets the error."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_exception(StorageError(*error.args))
