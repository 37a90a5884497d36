"""The extents of one fill on their way: into a slot, to the readers, to the index, to the disk.

Order of duties for an extent: received → shown to the readers that wait → indexed, in order →
checksummed and written → let go. A slot is held by the fill only while bytes are under way into
it, to the index or to disk, never for a reader: no reader can block a fill, and no fill another.

Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpufeed.cachefs import checksum
from gpufeed.cachefs.errors import GpufeedError, again
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.indexing import Indexing
from gpufeed.cachefs.inflight import Urgency
from gpufeed.cachefs.keeper import Keeper
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.placement import extent_length, works, zero_ranges


@dataclass(slots=True)
class _Extent:
    slot: int
    missing: int
    arrived: bool = False
    settled: bool = False
    waiters: list[asyncio.Future[int]] = field(default_factory=list)


class FillExtents:
    """See the top of the file.

    Attributes:
        crcs: CRC-64/XZ of each extent, once known.
    """

    def __init__(
        self, spec: ShardSpec, tools: FillTools, *, indexing: Indexing, keeper: Keeper,
        on_broken: Callable[[GpufeedError], None],
    ) -> None:  # fmt: skip
        self._spec = spec
        self._tools = tools
        self._indexing = indexing
        self._keeper = keeper
        self._on_broken = on_broken
        self.count = spec.extent_count(tools.extent_bytes)
        self._open: dict[int, _Extent] = {}
        self._early: dict[int, list[asyncio.Future[int]]] = collections.defaultdict(list)
        self._received: set[int] = set()
        self._zeros = zero_ranges(spec, tools.extent_bytes)
        self._missing = self._count_missing()
        self._settling: set[asyncio.Task[None]] = set()
        self._all_summed = asyncio.Event()
        self.crcs: dict[int, int] = {}

    def _count_missing(self) -> dict[int, int]:
        counts: dict[int, int] = dict.fromkeys(range(self.count), 0)
        for work in works(self._spec, self._tools.extent_bytes, self._tools.part_bytes):
            for target in work.targets:
                counts[target.extent] += 1
        return counts

    # --- for readers --------------------------------------------------------------------------

    def has_passed(self, extent: int) -> bool:
        """The extent was received before; it may be gone from the arena by now."""
        return extent in self._received

    def has_opened(self, extent: int) -> bool:
        """The extent is on its way."""
        return extent in self._open

    def wait(self, extent: int) -> asyncio.Future[int]:
        """A slot number, held for the caller, when the extent arrives."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        state = self._open.get(extent)
        (state.waiters if state else self._early[extent]).append(future)
        return future

    # --- for the receiver ---------------------------------------------------------------------

    async def open(self, extents: Sequence[int], urgency: Urgency) -> None:
        """Take room and slots for what is not open yet, and clear what no source covers.

        All of them at once: they are one request's.
        """
        new = [e for e in extents if e not in self._open and e not in self._received]
        if not new:
            return
        tools = self._tools
        taken_bytes = len(new) * tools.extent_bytes
        await tools.in_flight.take(taken_bytes, urgency, continues=len(new) < len(extents))
        try:
            for extent in new:
                await self._open_one(extent)
                taken_bytes -= tools.extent_bytes
        finally:
            # Those that are open give theirs back one by one.
            tools.in_flight.give_back(taken_bytes)

    async def _open_one(self, extent: int) -> None:
        pool, digest = self._tools.pool, self._spec.digest
        near = self._open.get(extent - 1)
        slot = None
        while slot is None:
            slot = await pool.allocate(digest, extent, near=near.slot if near else None)
            if slot is None:
                # A reader fetched this very extent by itself; it keeps its slot, we need our own.
                pool.disown(digest, extent)
        view = pool.view(slot)
        for begin, end in self._zeros.get(extent, ()):
            view[begin:end] = bytes(end - begin)
        state = _Extent(slot, self._missing[extent])
        state.waiters = self._early.pop(extent, [])
        self._open[extent] = state

    async def open_gaps(self, urgency: Urgency) -> None:
        """The extents that no source touches: they arrive as they are opened."""
        for extent, missing in self._missing.items():
            if missing == 0:
                await self.open([extent], urgency)
                self._arrive(extent)

    def view(self, extent: int) -> memoryview:
        """The memory of an open extent."""
        return self._tools.pool.view(self._open[extent].slot)

    def part_arrived(self, extent: int) -> None:
        """One of the requests that fill the extent is done with it."""
        state = self._open[extent]
        state.missing -= 1
        if state.missing == 0:
            self._arrive(extent)

    def _arrive(self, extent: int) -> None:
        """All bytes of the extent are in its slot: show it, index it, settle it."""
        pool = self._tools.pool
        state = self._open[extent]
        state.arrived = True
        self._received.add(extent)
        pool.table.mark_ready(state.slot)
        for future in state.waiters:
            if not future.done():
                pool.hold(state.slot)
                future.set_result(state.slot)
        state.waiters.clear()
        task = asyncio.get_running_loop().create_task(self._settle(extent, state))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        self._index_ready()

    def _index_ready(self) -> None:
        indexing = self._indexing
        while (state := self._open.get(indexing.next_extent)) and state.arrived:
            extent = indexing.next_extent
            view = self._tools.pool.view(state.slot)[: self._length(extent)]
            try:
                indexing.feed(view, is_last=extent == self.count - 1)
            except GpufeedError as error:
                self._on_broken(error)
            self._let_go(extent)

    async def _settle(self, extent: int, state: _Extent) -> None:
        """Checksum and write one extent, then let its slot go."""
        view = self._tools.pool.view(state.slot)
        length = self._length(extent)
        try:
            loop = asyncio.get_running_loop()
            self.crcs[extent] = await loop.run_in_executor(None, checksum.crc64, view[:length])
            if len(self.crcs) == self.count:
                self._all_summed.set()
            await self._keeper.write(extent, view, length)
        finally:
            state.settled = True
            self._let_go(extent)

    def _length(self, extent: int) -> int:
        return extent_length(self._spec, extent, self._tools.extent_bytes)

    def _let_go(self, extent: int) -> None:
        state = self._open[extent]
        if state.settled and extent < self._indexing.next_extent:
            del self._open[extent]
            self._drop(state.slot, wanted=self._tools.pending(self._spec.digest))

    def _drop(self, slot: int, *, wanted: bool) -> None:
        self._tools.pool.drop(slot, wanted=wanted)
        self._tools.in_flight.give_back(self._tools.extent_bytes)

    # --- the end ------------------------------------------------------------------------------

    async def summed(self) -> None:
        """Wait until every extent's checksum is known. They may be on their way to the disk."""
        if self.count:
            await self._all_summed.wait()

    async def drain(self) -> None:
        """Wait until no extent is on its way to the disk."""
        while self._settling:
            await asyncio.wait(self._settling)

    def crc64(self) -> int:
        """The whole shard's, once every extent's is known."""
        found = checksum.CRC64_EMPTY
        for extent in range(self.count):
            found = checksum.combine(found, self.crcs[extent], self._length(extent))
        return found

    def fail(self, error: GpufeedError) -> None:
        """Whoever waits gets `error`."""
        waiters = [f for state in self._open.values() for f in state.waiters]
        waiters += [f for early in self._early.values() for f in early]
        for future in waiters:
            if not future.done():
                future.set_exception(again(error))
        self._early.clear()

    def drop_all(self) -> None:
        """Give up the slots of a fill that failed. Nothing is under way any more."""
        for state in self._open.values():
            self._drop(state.slot, wanted=False)
        self._open.clear()
