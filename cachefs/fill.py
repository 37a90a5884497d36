"""One fill: fetch a shard into arena slots, verify it, commit it to the store; or leave nothing.

However many readers ask, there is one `Fill` a shard at a time (`cachefs.cache` sees to that), run
as a task of the cache, so that its first reader's death does not end it. Readers get extents as
they arrive. Order of duties for an extent: received (status, version, range and length checked on
the way) → shown to the readers that wait → indexed, in order → checksummed and written → let go.

Invariants:
    - a slot is held by the fill only while bytes are under way into it, to the index or to disk,
      never for a reader: no reader can block a fill, and no fill another;
    - nothing is committed unless every byte arrived and the checksums that the origin tells agree;
    - a disk that fails mid-way turns a cached fill into a streamed one (**bypass**); readers do not
      notice;
    - a bypassing fill stays at most `BYPASS_AHEAD_EXTENTS` ahead of its fastest reader, since what
      a reader missed must be fetched again.

Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gpufeed.cachefs import checksum
from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.errors import (
    GpufeedError,
    IntegrityError,
    OriginUnavailableError,
    StorageError,
)
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo, ShardSpec
from gpufeed.cachefs.placement import Work, extent_length, works, zero_ranges
from gpufeed.cachefs.sampleindex import SampleIndex, SampleIndexBuilder
from gpufeed.cachefs.store.store import Reservation, ShardStore
from gpufeed.cachefs.tasks import finished
from gpufeed.cachefs.units import MIB

_LOG = logging.getLogger("gpufeed.fill")

# Requests of one fill under way at once. Parts are megabytes; small objects are latency.
PARTS_IN_FLIGHT_DEMAND = 8
PARTS_IN_FLIGHT_PREFETCH = 4
OBJECTS_IN_FLIGHT_DEMAND = 64
OBJECTS_IN_FLIGHT_PREFETCH = 32
SMALL_OBJECT_BYTES = MIB
BYPASS_AHEAD_EXTENTS = 16


class Engine(Protocol):
    """What a fill needs of the origin engine."""

    async def head(self, url: str, options: Mapping[str, str] | None = None) -> ObjectInfo:
        """See `gpufeed.cachefs.origin.engine.OriginEngine`."""
        ...

    async def read_into(
        self,
        info: ObjectInfo,
        begin_bytes: int,
        targets: Sequence[memoryview],
        on_target: Callable[[int], None],
        options: Mapping[str, str] | None = None,
        *,
        demand: bool = True,
    ) -> int | None:
        """See `gpufeed.cachefs.origin.engine.OriginEngine`."""
        ...


class Indexer(Protocol):
    """Finds samples in a shard's bytes as they stream by."""

    def feed(self, view: memoryview) -> None:
        """The next contiguous bytes."""
        ...

    def take(self) -> SampleIndex | None:
        """Samples completed since the last call."""
        ...

    def finish(self) -> None:
        """The shard is over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FillTools:
    """What every fill of a daemon shares."""

    engine: Engine
    store: ShardStore
    pool: SlotPool
    metrics: Metrics
    extent_bytes: int
    part_bytes: int
    pending: Callable[[str], bool]


@dataclass(slots=True)
class _Extent:
    slot: int
    missing: int
    arrived: bool = False
    settled: bool = False
    waiters: list[asyncio.Future[int]] = field(default_factory=list)


class Fill:
    """One shard's fill. `run` is its task; the rest is for readers.

    Attributes:
        chunks: ``(extent, samples)``: samples whose bytes all lie in extents up to `extent`.
        crcs: CRC-64/XZ of each extent, once known.
    """

    def __init__(
        self,
        spec: ShardSpec,
        tools: FillTools,
        *,
        options: Mapping[str, str] | None,
        indexer: Indexer | None,
        reservation: Reservation | None,
    ) -> None:
        self.spec = spec
        self._tools = tools
        self._options = options
        self._indexer = indexer
        self._reservation = reservation
        self._has_room = reservation is not None
        self._count = spec.extent_count(tools.extent_bytes)
        self._extents: dict[int, _Extent] = {}
        self._early: dict[int, list[asyncio.Future[int]]] = collections.defaultdict(list)
        self._received: set[int] = set()
        self._indexed_count = 0
        self._builder = SampleIndexBuilder()
        self._zeros = zero_ranges(spec, tools.extent_bytes)
        self._missing = self._count_missing()
        self._crc_told: int | None = None
        self._settling: set[asyncio.Task[None]] = set()
        self._fastest = 0
        self._moved = asyncio.Event()
        self._write_failed = False
        self.chunks: list[tuple[int, SampleIndex]] = []
        self.crcs: dict[int, int] = {}
        self.demanded = False
        self.readers = 0
        self.given_up = False
        loop = asyncio.get_running_loop()
        self.verified: asyncio.Future[None] = loop.create_future()
        # A fill that only prefetches has nobody who looks at its error.
        self.verified.add_done_callback(lambda f: None if f.cancelled() else f.exception())

    def _count_missing(self) -> dict[int, int]:
        counts: dict[int, int] = dict.fromkeys(range(self._count), 0)
        for work in works(self.spec, self._tools.extent_bytes, self._tools.part_bytes):
            for target in work.targets:
                counts[target.extent] += 1
        return counts

    @property
    def is_cached(self) -> bool:
        """Whether the shard is on its way into the store (not bypassing it)."""
        return self._has_room and not self._write_failed

    # --- for readers --------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """It is about to end with nothing; who comes now needs another fill."""
        return self.verified.done() and self.verified.exception() is not None

    def has_passed(self, extent: int) -> bool:
        """The extent was received before; it may be gone from the arena by now."""
        return extent in self._received

    def wait(self, extent: int) -> asyncio.Future[int]:
        """A slot number, held for the caller, when the extent arrives."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        state = self._extents.get(extent)
        (state.waiters if state else self._early[extent]).append(future)
        return future

    def advance(self, extent: int) -> None:
        """A reader wants `extent` next."""
        if extent > self._fastest:
            self._fastest = extent
            self._moved.set()

    # --- the task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Do it all. Never raises: the outcome is in `verified` and in the waiters."""
        metrics = self._tools.metrics
        metrics.add("fills_in_flight", 1)
        try:
            await self._fetch()
            await self._verify()
            self.verified.set_result(None)
            metrics.add("fills_total")
            await self._commit()
        except GpufeedError as error:
            await self._fail_whole(error)
        except asyncio.CancelledError:
            given_up = OriginUnavailableError(f"the fill of {self.spec.name} was given up")
            await self._fail_whole(given_up)
            raise
        except Exception:
            # The top of a task: whatever it is, readers must not wait for ever.
            _LOG.exception("the fill of %s met an internal error", self.spec.name)
            broken = GpufeedError(f"{self.spec.name}: internal error; the daemon's log has it")
            await self._fail_whole(broken)
        finally:
            metrics.add("fills_in_flight", -1)

    async def _fetch(self) -> None:
        tools = self._tools
        limit = asyncio.Semaphore(self._in_flight_max())
        try:
            async with asyncio.TaskGroup() as group:
                for work in works(self.spec, tools.extent_bytes, tools.part_bytes):
                    await limit.acquire()
                    await self._pace(work.targets[0].extent)
                    async with tools.pool.taking[self.demanded]:
                        for target in work.targets:
                            await self._open(target.extent)
                    task = group.create_task(self._receive(work))
                    task.add_done_callback(lambda _: limit.release())
                for extent, missing in self._missing.items():
                    if missing == 0:
                        await self._open(extent)
                        self._arrive(extent)
        except* GpufeedError as errors:
            raise _first(errors) from None
        await self._drain_settling()

    def _in_flight_max(self) -> int:
        small = self.spec.sources[0].info.size_bytes <= SMALL_OBJECT_BYTES
        if small and len(self.spec.sources) > 1:
            return OBJECTS_IN_FLIGHT_DEMAND if self.demanded else OBJECTS_IN_FLIGHT_PREFETCH
        return PARTS_IN_FLIGHT_DEMAND if self.demanded else PARTS_IN_FLIGHT_PREFETCH

    async def _pace(self, extent: int) -> None:
        while not self.is_cached and extent > self._fastest + BYPASS_AHEAD_EXTENTS:
            self._moved.clear()
            await self._moved.wait()

    async def _open(self, extent: int) -> None:
        """Take a slot for the extent and clear what no source covers."""
        if extent in self._extents or extent in self._received:
            return
        tools = self._tools
        near = self._extents.get(extent - 1)
        slot = None
        while slot is None:
            slot = await tools.pool.allocate(
                self.spec.digest, extent, near=near.slot if near else None, demand=self.demanded
            )
            if slot is None:
                # A reader fetched this very extent by itself; it keeps its slot, we need our own.
                tools.pool.disown(self.spec.digest, extent)
        view = tools.pool.view(slot)
        for begin, end in self._zeros.get(extent, ()):
            view[begin:end] = bytes(end - begin)
        state = _Extent(slot, self._missing[extent])
        state.waiters = self._early.pop(extent, [])
        self._extents[extent] = state

    async def _receive(self, work: Work) -> None:
        tools = self._tools
        views = [
            tools.pool.view(self._extents[t.extent].slot)[t.begin_bytes : t.end_bytes]
            for t in work.targets
        ]
        # A part's extents are shown as they come; a small object's only once it is verified.
        streams = not (work.whole and len(self.spec.sources) > 1)

        def on_target(i: int) -> None:
            if streams:
                self._part_arrived(work.targets[i].extent)

        told = await tools.engine.read_into(
            work.info, work.begin_bytes, views, on_target, self._options
        )
        if len(self.spec.sources) == 1:
            self._crc_told = told if told is not None else self._crc_told
        if not streams:
            self._check_object(work.info, told, views)
            for target in work.targets:
                self._part_arrived(target.extent)

    @staticmethod
    def _check_object(info: ObjectInfo, told: int | None, views: Sequence[memoryview]) -> None:
        want = told if told is not None else info.crc64
        if want is None:
            return
        found = 0
        for i, view in enumerate(views):
            found = checksum.crc64(view, found) if i else checksum.crc64(view)
        if found != want:
            raise IntegrityError(
                f"{info.url}: the {info.size_bytes} bytes received have CRC-64 {found}, the origin "
                f"says {want}; nothing was kept, and reading again fetches it again"
            )

    def _part_arrived(self, extent: int) -> None:
        state = self._extents[extent]
        state.missing -= 1
        if state.missing == 0:
            self._arrive(extent)

    def _arrive(self, extent: int) -> None:
        """All bytes of the extent are in its slot: show it, index it, settle it."""
        pool = self._tools.pool
        state = self._extents[extent]
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
        while (state := self._extents.get(self._indexed_count)) and state.arrived:
            extent = self._indexed_count
            if self._indexer is not None:
                length = extent_length(self.spec, extent, self._tools.extent_bytes)
                try:
                    self._indexer.feed(self._tools.pool.view(state.slot)[:length])
                    if extent == self._count - 1:
                        self._indexer.finish()
                except GpufeedError as error:
                    self._refuse(error)
                    return
                self._add_chunk(extent, self._indexer.take())
            self._indexed_count += 1
            self._let_go(extent)

    def _refuse(self, error: GpufeedError) -> None:
        """The format is broken: readers learn it now, and nothing is committed."""
        self._indexer = None
        if not self.verified.done():
            self.verified.set_exception(error)
        self._index_ready()

    def _add_chunk(self, extent: int, samples: SampleIndex | None) -> None:
        if samples is not None and len(samples):
            self.chunks.append((extent, samples))
            self._builder.extend(samples)

    async def _settle(self, extent: int, state: _Extent) -> None:
        """Checksum and write one extent, then let its slot go."""
        tools = self._tools
        view = tools.pool.view(state.slot)
        length = extent_length(self.spec, extent, tools.extent_bytes)
        try:
            loop = asyncio.get_running_loop()
            self.crcs[extent] = await loop.run_in_executor(None, checksum.crc64, view[:length])
            if self.is_cached and self._reservation is not None:
                await tools.store.write_extent(self._reservation, extent, view, length)
        except StorageError:
            # The disk refused; the readers' bytes are fine. Stream on without the cache.
            self._write_failed = True
            tools.metrics.add("bypass_total")
        finally:
            state.settled = True
            self._let_go(extent)

    def _let_go(self, extent: int) -> None:
        state = self._extents[extent]
        if state.settled and extent < self._indexed_count:
            del self._extents[extent]
            self._tools.pool.drop(state.slot, wanted=self._tools.pending(self.spec.digest))

    async def _drain_settling(self) -> None:
        while self._settling:
            await asyncio.wait(self._settling)

    async def _verify(self) -> None:
        if self.verified.done():
            self.verified.result()
        if len(self.spec.sources) != 1 or self._count == 0:
            return
        info = self.spec.sources[0].info
        want = self._crc_told if self._crc_told is not None else info.crc64
        if want is None:
            want = (await self._tools.engine.head(info.url, self._options)).crc64
        if want is None:
            return
        found = self.crcs[0]
        for extent in range(1, self._count):
            length = extent_length(self.spec, extent, self._tools.extent_bytes)
            found = checksum.combine(found, self.crcs[extent], length)
        if found != want:
            raise IntegrityError(
                f"{self.spec.name}: the {self.spec.size_bytes} bytes received have CRC-64 {found}, "
                f"the origin says {want}; nothing was kept, and reading again fetches it again"
            )

    @property
    def sample_index(self) -> SampleIndex:
        """All samples found so far."""
        return self._builder.build()

    async def _commit(self) -> None:
        reservation, self._reservation = self._reservation, None
        if reservation is None:
            return
        # Not to be cut short: a commit ends whole, or leaves nothing.
        await finished(asyncio.get_running_loop().create_task(self._end(reservation)))

    async def _end(self, reservation: Reservation) -> None:
        store = self._tools.store
        if self._write_failed:
            await store.abort(reservation)
            return
        crcs = [self.crcs[i] for i in range(self._count)]
        index = self.sample_index.encode() if self.chunks else None
        try:
            await store.commit(reservation, crcs, index)
        except StorageError:
            self._tools.metrics.add("bypass_total")

    async def _fail_whole(self, error: GpufeedError) -> None:
        """`_fail`, not to be cut short."""
        await finished(asyncio.get_running_loop().create_task(self._fail(error)))

    async def _fail(self, error: GpufeedError) -> None:
        """Tell everybody, keep nothing."""
        self._tools.metrics.add("fills_failed_total")
        if not self.verified.done():
            self.verified.set_exception(error)
        waiters = [f for state in self._extents.values() for f in state.waiters]
        waiters += [f for early in self._early.values() for f in early]
        for future in waiters:
            if not future.done():
                future.set_exception(error)
        self._early.clear()
        # At once: the next fill of the same shard may begin before this one has ended. Given up,
        # that was done already, and the next one may be under way.
        if not self.given_up:
            self._tools.pool.forget(self.spec.digest)
        await self._drain_settling()
        for state in self._extents.values():
            self._tools.pool.drop(state.slot)
        self._extents.clear()
        if self._reservation is not None:
            reservation, self._reservation = self._reservation, None
            await self._tools.store.abort(reservation)


def _first(group: BaseExceptionGroup[GpufeedError]) -> GpufeedError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GpufeedError), error
    return error
