"""Several extents of one shard under way at once, taken in order: a disk wants a queue.

Owned by one publishing task, on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import collections

from gpufeed.cachefs.cache import ShardReader
from gpufeed.cachefs.errors import PastEndError

READ_AHEAD_EXTENTS = 4


class Seeker:
    """Up to `READ_AHEAD_EXTENTS` extents of one shard under way."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self._next = 0
        self._tasks: collections.deque[asyncio.Task[tuple[int, str]]] = collections.deque()
        self.pending_at_close = 0

    @property
    def has_pending(self) -> bool:
        """Whether there is one to take."""
        return bool(self._tasks)

    @property
    def has_sought_all(self) -> bool:
        """Whether every extent of the shard was sought."""
        count = self._reader.extent_count
        return count is not None and self._next >= count

    def wants_more(self, extent: int) -> bool:
        """Whether to seek another one while `extent` is the next to be taken."""
        return not self.has_sought_all and self._next < extent + READ_AHEAD_EXTENTS

    def seek_next(self) -> None:
        """Seek the next extent, for which the caller has taken a credit."""
        coroutine = self._reader.extent(self._next)
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine))
        self._next += 1

    def skip_to(self, extent: int) -> None:
        """Those before `extent` were found without being sought. Nothing is under way."""
        assert not self._tasks, "skipped while extents are under way"
        self._next = extent

    async def next(self) -> tuple[int, str] | None:
        """The next extent in order, which is the caller's from then on; None past the end.

        Raises:
            GpufeedError: see `ShardReader.extent`.
        """
        try:
            found = await asyncio.shield(self._tasks[0])
        except PastEndError:
            return None
        self._tasks.popleft()
        return found

    async def close(self) -> list[int]:
        """Cancel what is under way; returns slots that were found and not taken.

        Credits of `pending_at_close` extents go back.
        """
        self.pending_at_close = len(self._tasks)
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        return [result[0] for result in results if isinstance(result, tuple)]
