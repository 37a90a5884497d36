"""Extents of one shard under way at once, taken in order: a disk wants a queue.

An extent that is in the arena is found at once, without a task; the others are sought by up to
`READ_AHEAD_EXTENTS` tasks. They are handed out in order, as many together as are there.

Owned by one publishing task, on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import collections

from gpufeed.cachefs.cache import ShardReader
from gpufeed.cachefs.errors import PastEndError

READ_AHEAD_EXTENTS = 4

Found = tuple[int, str]


class Seeker:
    """See the top of the file."""

    def __init__(self, reader: ShardReader) -> None:
        self._reader = reader
        self._next = 0
        self._entries: collections.deque[asyncio.Task[Found] | Found] = collections.deque()
        self._tasks_count = 0
        self.pending_at_close = 0

    @property
    def has_pending(self) -> bool:
        """Whether there is one to take, be it found or still under way."""
        return bool(self._entries)

    @property
    def has_sought_all(self) -> bool:
        """Whether every extent of the shard was sought."""
        count = self._reader.extent_count
        return count is not None and self._next >= count

    @property
    def wants_more(self) -> bool:
        """Whether to seek another one."""
        return not self.has_sought_all and self._tasks_count < READ_AHEAD_EXTENTS

    def seek_next(self) -> None:
        """Seek the next extent, for which the caller has taken a place."""
        slot = self._reader.ready(self._next)
        if slot is not None:
            self._entries.append((slot, "arena"))
        else:
            coroutine = self._reader.extent(self._next)
            self._entries.append(asyncio.get_running_loop().create_task(coroutine))
            self._tasks_count += 1
        self._next += 1

    def take_found(self, count_max: int) -> list[Found]:
        """Those next in order that are there, which are the caller's from then on."""
        found: list[Found] = []
        entries = self._entries
        while entries and len(found) < count_max:
            entry = entries[0]
            if isinstance(entry, asyncio.Task):
                if not entry.done() or entry.cancelled() or entry.exception() is not None:
                    break
                entry = entry.result()
                self._tasks_count -= 1
            found.append(entry)
            entries.popleft()
        return found

    async def wait(self) -> bool:
        """Wait until the next one in order is there; False if the shard ends before it.

        Raises:
            GpufeedError: see `ShardReader.extent`.
        """
        entry = self._entries[0]
        if isinstance(entry, asyncio.Task):
            try:
                await asyncio.shield(entry)
            except PastEndError:
                return False
        return True

    async def close(self) -> list[int]:
        """Cancel what is under way; returns slots that were found and not taken.

        Places of `pending_at_close` extents go back.
        """
        self.pending_at_close = len(self._entries)
        found = [entry[0] for entry in self._entries if isinstance(entry, tuple)]
        tasks = [entry for entry in self._entries if isinstance(entry, asyncio.Task)]
        self._entries.clear()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return found + [result[0] for result in results if isinstance(result, tuple)]
