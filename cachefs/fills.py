"""The fills under way: at most one a shard that a reader can join.

What ends a fill:
    - not its first reader's death: a fill is a task of its own;
    - its last reader's, if it bypasses the store; one into the store goes on without readers;
    - `close`, which waits until slots, room and temporary files have gone back.

Tenants have fills of their own, into arenas of their own. A shard that another tenant's fill brings
is not fetched again: whoever may read it borrows that fill (`gpufeed.cachefs.borrowed`).

Whoever comes after a fill has failed, or was given up, gets another; so does who needs what a
streamed compressed shard has brought already.

Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gpufeed.cachefs.borrowed import BorrowedFill, lends
from gpufeed.cachefs.fill import Fill
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.loads import Loads
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.sources import ShardSource
from gpufeed.cachefs.store.store import Reservation

# Lengths of compressed shards that are remembered without the store's help, 150 bytes each.
SIZES_MAX = 65536


class Fills:
    """See the top of the file.

    Args:
        tools: of the tenant.
        loads: of the tenant, which bring what is borrowed.
        neighbours: the fills of all tenants, these among them.
    """

    def __init__(self, tools: FillTools, loads: Loads, neighbours: Sequence[Fills] = ()) -> None:
        self._tools = tools
        self._loads = loads
        self._neighbours = neighbours
        self._current: dict[str, Fill] = {}
        self._sizes: dict[str, int] = {}
        self._tasks: dict[Fill, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def prefetch(self, source: ShardSource) -> asyncio.Task[None] | None:
        """Begin to fill a shard into the store. None: it is there, under way, or has no room."""
        digest = source.spec.digest
        if self.joinable(digest) is not None or self.has_elsewhere(digest):
            return None
        reservation = self._reserve(source, ahead=True)
        if reservation is None:
            return None
        self._tools.metrics.add("misses_total")
        return self._tasks[self._start(source, reservation)]

    def has_elsewhere(self, digest: str) -> bool:
        """Whether the shard is in the store, or comes by another tenant's fill."""
        return self._tools.store.lookup(digest) is not None or self._lender(digest) is not None

    def _lender(self, digest: str) -> tuple[Fills, Fill] | None:
        for fills in self._neighbours:
            fill = fills.joinable(digest) if fills is not self else None
            if fill is not None and lends(fill):
                return fills, fill
        return None

    def _borrow(self, source: ShardSource) -> BorrowedFill | None:
        digest = source.spec.digest
        found = self._lender(digest) if self._tools.may_share(digest) else None
        if found is None:
            return None
        fills, fill = found
        return BorrowedFill(source, fill, fills.leave, fills._tools.pool, self._loads)

    def join(self, source: ShardSource, reader: object, extent: int = 0) -> Fill | BorrowedFill:
        """The shard's fill, under way or new, for a reader that wants `extent` next."""
        metrics = self._tools.metrics
        fill: Fill | BorrowedFill | None = self.joinable(source.spec.digest)
        if fill is None or not fill.serves(extent):
            fill = self._borrow(source)
        if fill is not None:
            metrics.add("coalesced_total")
        else:
            metrics.add("misses_total")
            reservation = self._reserve(source, ahead=False)
            if reservation is None:
                metrics.add("bypass_total")
            fill = self._start(source, reservation)
        fill.enter(reader)
        return fill

    def _reserve(self, source: ShardSource, *, ahead: bool) -> Reservation | None:
        spec = source.spec
        size_bytes = self._sizes.get(spec.digest)
        if size_bytes is not None:
            spec = spec.sized(size_bytes)
        return self._tools.store.reserve(spec, standing=source.standing, ahead=ahead)

    def size_of(self, digest: str) -> int | None:
        """How long a compressed shard turned out to be, if a fill of it has come to its end.

        Its extents may be in the arena, where readers of other fills, that are behind, find them.
        """
        for fill in self._tasks:
            if fill.spec.is_sized and fill.spec.digest == digest:
                return fill.spec.size_bytes
        return self._sizes.get(digest)

    def joinable(self, digest: str) -> Fill | None:
        """The shard's fill in flight, if there is one that has not failed."""
        fill = self._current.get(digest)
        return None if fill is None or fill.has_failed else fill

    def has_another(self, fill: Fill | BorrowedFill, extent: int) -> bool:
        """Whether a reader that wants `extent` had better look for another fill than `fill`."""
        if isinstance(fill, BorrowedFill):
            return not fill.serves(extent)
        current = self.joinable(fill.spec.digest)
        return (current is not None and current is not fill) or not fill.serves(extent)

    def leave(self, fill: Fill | BorrowedFill, reader: object) -> None:
        """A reader is done with a fill."""
        if isinstance(fill, BorrowedFill):
            fill.leave(reader)
            return
        if fill.leave(reader) or fill.is_cached or fill not in self._tasks or fill.has_failed:
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
        fill.verified.add_done_callback(lambda verified: self._note_access(digest, verified))

        def done(_: asyncio.Task[None]) -> None:
            del self._tasks[fill]
            self._learn(fill.spec)
            if self._current.get(digest) is fill:
                del self._current[digest]

        task.add_done_callback(done)
        return fill

    def _note_access(self, digest: str, verified: asyncio.Future[None]) -> None:
        """All of it came by the tenant's own credentials."""
        access = self._tools.access
        if access is not None and not verified.cancelled() and verified.exception() is None:
            access.note(digest)

    def _learn(self, spec: ShardSpec) -> None:
        """What a compressed shard expands to: the next time, it is reserved for exactly."""
        if spec.codec and spec.is_sized:
            while len(self._sizes) >= SIZES_MAX:
                self._sizes.pop(next(iter(self._sizes)))
            self._sizes[spec.digest] = spec.size_bytes

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
