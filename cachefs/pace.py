"""How far ahead of its readers a fill may go that bypasses the store.

What a reader of a plain shard missed it can fetch again as a range, so such a fill follows its
fastest reader, at most `AHEAD_EXTENTS` in front. Nobody can begin in the middle of a compressed
stream: such a fill goes on only when every reader has come as far, so that none misses anything.

A fill into the store waits for nobody. Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

AHEAD_EXTENTS = 16


class Pace:
    """See the top of the file. `keeps_together`: for compressed shards."""

    def __init__(self, *, is_cached: Callable[[], bool], keeps_together: bool) -> None:
        self._is_cached = is_cached
        self._keeps_together = keeps_together
        self._wanted: dict[object, int] = {}
        self._fastest = 0
        self._moved = asyncio.Event()

    @property
    def readers_count(self) -> int:
        """Readers attached."""
        return len(self._wanted)

    def enter(self, reader: object) -> None:
        """A reader came; what it wants first it says next."""
        self._wanted[reader] = 0

    def advance(self, reader: object, extent: int) -> None:
        """A reader wants `extent`, and what lies before it no more unless it has asked."""
        self._wanted[reader] = max(extent, self._wanted[reader])
        self._fastest = max(extent, self._fastest)
        self._moved.set()

    def leave(self, reader: object) -> None:
        """A reader went."""
        del self._wanted[reader]
        self._moved.set()

    def allows(self, extent: int) -> bool:
        """Whether the fill may bring `extent` now."""
        if self._is_cached():
            return True
        if self._keeps_together:
            return extent <= min(self._wanted.values(), default=0)
        return extent <= self._fastest + AHEAD_EXTENTS

    async def wait(self, extent: int) -> None:
        """Wait until `extent` is allowed."""
        while not self.allows(extent):
            self._moved.clear()
            await self._moved.wait()
