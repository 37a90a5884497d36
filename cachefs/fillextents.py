"""The extents of one fill on their way: into a slot, to the readers, to the index, to the disk.

Order of duties for an extent: received → shown to the readers that wait → indexed, in order →
checksummed and written → let go. A slot is held by the fill only while bytes are under way into
it, to the index or to disk, never for a reader: no reader can block a fill, and no fill another.

How many there are is known from the start, or, for a compressed shard, at the end. Owned by the
daemon's loop.
"""

from __future__ import annotations

import asyncio
import collections
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpufeed.cachefs import checksum
from gpufeed.cachefs.errors import GpufeedError, PastEndError, again
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.indexing import Indexing
from gpufeed.cachefs.inflight import Urgency
from gpufeed.cachefs.keeper import Keeper
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.placement import extent_length


@dataclass(slots=True)
class _Extent:
    slot: int
    room_bytes: int
    arrived: bool = False
    settled: bool = False
    waiters: list[asyncio.Future[int]] = field(default_factory=list)


class FillExtents:
    """See the top of the file.

    Attributes:
        spec: the shard; its length is known once `spec.is_sized`.
        crcs: CRC-64/XZ of each extent, once known.
    """

    def __init__(
        self, spec: ShardSpec, tools: FillTools, *, indexing: Indexing, keeper: Keeper,
        on_broken: Callable[[GpufeedError], None],
    ) -> None:  # fmt: skip
        self.spec = spec
        self._digest = spec.digest
        self._tools = tools
        self._indexing = indexing
        self._keeper = keeper
        self._on_broken = on_broken
        self._open: dict[int, _Extent] = {}
        self._early: dict[int, list[asyncio.Future[int]]] = collections.defaultdict(list)
        self._received: set[int] = set()
        self._settling: set[asyncio.Task[None]] = set()
        self._all_summed = asyncio.Event()
        self._fewer = asyncio.Event()
        self.crcs: dict[int, int] = {}

    # --- for readers --------------------------------------------------------------------------

    @property
    def count(self) -> int | None:
        """How many extents the shard has, once that is known."""
        spec = self.spec
        return spec.extent_count(self._tools.extent_bytes) if spec.is_sized else None

    def has_passed(self, extent: int) -> bool:
        """The extent was received before; it may be gone from the arena by now."""
        return extent in self._received

    def has_opened(self, extent: int) -> bool:
        """The extent is on its way."""
        return extent in self._open

    def wait(self, extent: int) -> asyncio.Future[int]:
        """A slot number, held for the caller, when the extent arrives; `PastEndError` if never."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self.count is not None and extent >= self.count:
            future.set_exception(self._past_end(extent))
            return future
        state = self._open.get(extent)
        (state.waiters if state else self._early[extent]).append(future)
        return future

    def _past_end(self, extent: int) -> PastEndError:
        return PastEndError(
            f"{self.spec.name} has {self.count} extents; extent {extent} lies past its end"
        )

    # --- for the receiver ---------------------------------------------------------------------

    async def open(self, extents: Sequence[int], urgency: Urgency) -> list[int]:
        """Take room and slots for those that are not open yet; returns them.

        All of them at once: they are one request's.
        """
        new = [e for e in extents if e not in self._open and e not in self._received]
        if not new:
            return new
        tools = self._tools
        taken_bytes = len(new) * tools.extent_bytes
        await tools.in_flight.take(taken_bytes, urgency, continues=len(new) < len(extents))
        try:
            for extent in new:
                self._register(extent, await self.allocate(extent), tools.extent_bytes)
                taken_bytes -= tools.extent_bytes
        finally:
            # Those that are open give theirs back one by one.
            tools.in_flight.give_back(taken_bytes)
        return new

    async def allocate(self, extent: int) -> int:
        """A slot for the extent. It is the caller's until the extent is open."""
        pool, digest = self._tools.pool, self._digest
        while True:
            slot = await pool.allocate(digest, extent)
            if slot is not None:
                return slot
            # A reader fetched this very extent by itself; it keeps its slot, we need our own.
            pool.disown(digest, extent)

    def _register(self, extent: int, slot: int, room_bytes: int) -> None:
        state = _Extent(slot, room_bytes)
        state.waiters = self._early.pop(extent, [])
        self._open[extent] = state

    def view(self, extent: int) -> memoryview:
        """The memory of an open extent."""
        return self._tools.pool.view(self._open[extent].slot)

    def arrive_in(self, extent: int, slot: int, crc64: int) -> None:
        """An extent that is whole already, in a slot and within room of the caller's."""
        self._register(extent, slot, 0)
        self.crcs[extent] = crc64
        self.arrive(extent)

    def arrive(self, extent: int) -> None:
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

    def end(self, size_bytes: int) -> None:
        """The shard turned out to be so long. Extents but the last have arrived."""
        self.spec = self.spec.sized(size_bytes)
        count = self.spec.extent_count(self._tools.extent_bytes)
        for extent in [extent for extent in self._early if extent >= count]:
            for future in self._early.pop(extent):
                if not future.done():
                    future.set_exception(self._past_end(extent))
        self._index_ready()

    def _index_ready(self) -> None:
        indexing = self._indexing
        try:
            while (state := self._open.get(indexing.next_extent)) and state.arrived:
                extent = indexing.next_extent
                view = self._tools.pool.view(state.slot)[: self._length(extent)]
                try:
                    indexing.feed(view)
                finally:
                    self._let_go(extent)
            if indexing.next_extent == self.count:
                indexing.finish()
        except GpufeedError as error:
            self._on_broken(error)
            self._index_ready()

    async def _settle(self, extent: int, state: _Extent) -> None:
        """Checksum and write one extent, then let its slot go."""
        view = self._tools.pool.view(state.slot)
        length = self._length(extent)
        try:
            # One trip to a thread does both, but for a disk that is slow no reader waits.
            if extent not in self.crcs and self._keeper.sums_at_once:
                on_sum = functools.partial(self._summed, extent)
                await self._keeper.write(extent, view, length, on_sum)
                await self._sum(extent, view[:length])
            else:
                await self._sum(extent, view[:length])
                await self._keeper.write(extent, view, length, None)
        finally:
            state.settled = True
            self._let_go(extent)

    async def _sum(self, extent: int, data: memoryview) -> None:
        if extent not in self.crcs:
            loop = asyncio.get_running_loop()
            self._summed(extent, await loop.run_in_executor(None, checksum.crc64, data))

    def _summed(self, extent: int, crc64: int) -> None:
        self.crcs[extent] = crc64
        if len(self.crcs) == self.count:
            self._all_summed.set()

    def _length(self, extent: int) -> int:
        if not self.spec.is_sized:
            return self._tools.extent_bytes  # only the last one may be shorter
        return extent_length(self.spec, extent, self._tools.extent_bytes)

    def _let_go(self, extent: int) -> None:
        state = self._open[extent]
        if state.settled and extent < self._indexing.next_extent:
            del self._open[extent]
            self._drop(state)
            self._fewer.set()

    def _drop(self, state: _Extent) -> None:
        self._tools.pool.drop(state.slot)
        self._tools.in_flight.give_back(state.room_bytes)

    async def until_fewer_than(self, count: int) -> None:
        """Wait until fewer than `count` extents are open."""
        while len(self._open) >= count:
            self._fewer.clear()
            await self._fewer.wait()

    # --- the end ------------------------------------------------------------------------------

    async def summed(self) -> None:
        """Wait until every extent's checksum is known. They may be on their way to the disk."""
        if len(self.crcs) != self.count:
            await self._all_summed.wait()

    async def drain(self) -> None:
        """Wait until no extent is on its way to the disk."""
        while self._settling:
            await asyncio.wait(self._settling)

    def all_crcs(self) -> list[int]:
        """The checksum of each extent of a shard that is all there, in order."""
        return [self.crcs[extent] for extent in range(len(self.crcs))]

    def crc64(self) -> int:
        """The whole shard's, once every extent's is known."""
        found = checksum.CRC64_EMPTY
        for extent, crc in enumerate(self.all_crcs()):
            found = checksum.combine(found, crc, self._length(extent))
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
            self._drop(state)
        self._open.clear()
