"""The fills under way: at most one a shard that a reader can join.

Invariants:
    - a fill that bypasses the store ends with its last reader; one that caches goes on;
    - whoever comes after a fill has failed or was given up gets another.

Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gpufeed.cachefs.fill import Fill
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.sources import ShardSource
from gpufeed.cachefs.store.store import Reservation


class Fills:
    """See the top of the file. `wanted` tells which shards a live session claims."""

    def __init__(self, tools: FillTools, *, wanted: Callable[[str], bool]) -> None:
        self._tools = tools
        self._wanted = wanted
        self._current: dict[str, Fill] = {}
        self._tasks: dict[Fill, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def prefetch(self, source: ShardSource) -> asyncio.Task[None] | None:
        """Begin to fill a shard into the store. None: it is there, under way, or has no room."""
        digest = source.spec.digest
        if self.joinable(digest) is not None or self._tools.store.lookup(digest) is not None:
            return None
        reservation = self._tools.store.reserve(source.spec, wanted=self._wanted)
        if reservation is None:
            return None
        self._tools.metrics.add("misses_total")
        return self._tasks[self._start(source, reservation)]

    def join(self, source: ShardSource) -> Fill:
        """The shard's fill: the one in flight, or a new one."""
        metrics = self._tools.metrics
        fill = self.joinable(source.spec.digest)
        if fill is not None:
            metrics.add("coalesced_total")
        else:
            metrics.add("misses_total")
            reservation = self._tools.store.reserve(source.spec, wanted=self._wanted)
            if reservation is None:
                metrics.add("bypass_total")
            fill = self._start(source, reservation)
        self.attach(fill)
        return fill

    def attach(self, fill: Fill) -> None:
        """A reader waits for a fill from now on, until it leaves."""
        fill.demand()
        fill.readers += 1

    def joinable(self, digest: str) -> Fill | None:
        """The shard's fill in flight, if there is one that has not failed."""
        fill = self._current.get(digest)
        return None if fill is None or fill.has_failed else fill

    def has_another(self, fill: Fill) -> bool:
        """Whether the shard's fill in flight is another one than `fill`."""
        current = self.joinable(fill.spec.digest)
        return current is not None and current is not fill

    def leave(self, fill: Fill) -> None:
        """A reader is done with a fill."""
        fill.readers -= 1
        if fill.readers or fill.is_cached or fill not in self._tasks or fill.has_failed:
            return
        # Whoever asks from now on gets another fill, not one that is about to be cancelled.
        digest = fill.spec.digest
        if self._current.get(digest) is fill:
            del self._current[digest]
            self._tools.pool.forget(digest)
        fill.given_up = True
        self._tasks[fill].cancel()

    def _start(self, source: ShardSource, reservation: Reservation | None) -> Fill:
        digest = source.spec.digest
        fill = Fill(source, self._tools, reservation)
        # Leftovers in the arena may be of an incarnation that was found wrong.
        self._tools.pool.forget(digest)
        self._current[digest] = fill
        task = asyncio.get_running_loop().create_task(fill.run(), name=f"fill {source.spec.name}")
        self._tasks[fill] = task

        def done(_: asyncio.Task[None]) -> None:
            del self._tasks[fill]
            if self._current.get(digest) is fill:
                del self._current[digest]

        task.add_done_callback(done)
        return fill

    async def idle(self) -> None:
        """Wait until no fill is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def close(self) -> None:
        """Cancel all fills and wait until they let go of everything."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
