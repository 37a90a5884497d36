"""The cache: where a reader asks for a shard's extents, and from which tier they come.

`ShardCache.open` gives a `ShardReader`, one a session and plan position. Its `extent(i)` finds the
extent in the arena, reads it from the store (verified before it is shown), or takes it from the
shard's fill, of which there is at most one at a time. What a reader missed of a fill it gets from
the store once that is committed, or by a range request of its own.

Invariants:
    - every slot that `extent` returns is held once for the caller, who drops it;
    - a shard found wrong on disk is quarantined and filled again; the reader does not notice;
    - a fill that bypasses the store ends with its last reader; one that caches goes on.

Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from gpufeed.cachefs.errors import GpufeedError, IntegrityError, StorageError
from gpufeed.cachefs.fill import Fill, FillTools, Indexer
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.placement import extent_length, works_of_extent
from gpufeed.cachefs.sampleindex import SampleIndex
from gpufeed.cachefs.store.store import Reservation

# A shard found wrong again right after its refill means a disk or memory that lies.
REFILLS_MAX = 2

MakeIndexer = Callable[[ShardSpec], Indexer | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """A shard, how to reach it, and how to find its samples."""

    spec: ShardSpec
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    make_indexer: MakeIndexer


class KnownIndexer:
    """Satisfies `Indexer` for shards whose samples are known before a byte has come."""

    def __init__(self, index: SampleIndex) -> None:
        self._index = index
        self._ends = index.ends()
        self._position = 0
        self._taken = 0
        self.sample_count = len(index)

    def feed(self, view: memoryview) -> None:
        """The next contiguous bytes; only their number matters."""
        self._position += len(view)

    def take(self) -> SampleIndex | None:
        """Samples completed since the last call."""
        end = int(np.searchsorted(self._ends, self._position, side="right"))
        begin, self._taken = self._taken, max(end, self._taken)
        return self._index.slice(begin, end) if end > begin else None

    def finish(self) -> None:
        """Nothing is left to find."""


class ShardCache:
    """All shards of a daemon. `wanted` tells which shards a live session claims."""

    def __init__(self, tools: FillTools, *, wanted: Callable[[str], bool]) -> None:
        self.tools = tools
        self._wanted = wanted
        self._fills: dict[str, Fill] = {}
        self._tasks: dict[Fill, asyncio.Task[None]] = {}
        self._loads: dict[tuple[str, int], asyncio.Future[None]] = {}

    def open(self, source: ShardSource) -> ShardReader:
        """A reader of this shard; close it."""
        return ShardReader(self, source)

    def prefetch(self, source: ShardSource) -> asyncio.Task[None] | None:
        """Begin to fill a shard into the store. None: it is there, under way, or has no room."""
        digest = source.spec.digest
        if self._joinable(digest) is not None or self.tools.store.lookup(digest) is not None:
            return None
        reservation = self.tools.store.reserve(source.spec, wanted=self._wanted)
        if reservation is None:
            return None
        self.tools.metrics.add("misses_total")
        return self._tasks[self._start(source, reservation)]

    @property
    def fills_count(self) -> int:
        """Fills under way."""
        return len(self._tasks)

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

    # --- fills --------------------------------------------------------------------------------

    def join(self, source: ShardSource) -> Fill:
        """The shard's fill: the one in flight, or a new one."""
        digest = source.spec.digest
        metrics = self.tools.metrics
        fill = self._joinable(digest)
        if fill is not None:
            metrics.add("coalesced_total")
        else:
            metrics.add("misses_total")
            reservation = self.tools.store.reserve(source.spec, wanted=self._wanted)
            if reservation is None:
                metrics.add("bypass_total")
            fill = self._start(source, reservation)
        fill.demanded = True
        fill.readers += 1
        return fill

    def _joinable(self, digest: str) -> Fill | None:
        fill = self._fills.get(digest)
        return None if fill is None or fill.has_failed else fill

    def is_filled_by_another(self, fill: Fill) -> bool:
        """Whether the shard's fill in flight is another one than `fill`."""
        current = self._joinable(fill.spec.digest)
        return current is not None and current is not fill

    def leave(self, fill: Fill) -> None:
        """A reader is done with a fill."""
        fill.readers -= 1
        if fill.readers or fill.is_cached or fill not in self._tasks or fill.has_failed:
            return
        # Whoever asks from now on gets another fill, not one that is about to be cancelled.
        digest = fill.spec.digest
        if self._fills.get(digest) is fill:
            del self._fills[digest]
            self.tools.pool.forget(digest)
        fill.given_up = True
        self._tasks[fill].cancel()

    def _start(self, source: ShardSource, reservation: Reservation | None) -> Fill:
        digest = source.spec.digest
        fill = Fill(
            source.spec, self.tools, options=source.options,
            indexer=source.make_indexer(source.spec), reservation=reservation,
        )  # fmt: skip
        # Leftovers in the arena may be of an incarnation that was found wrong.
        self.tools.pool.forget(digest)
        self._fills[digest] = fill
        task = asyncio.get_running_loop().create_task(fill.run(), name=f"fill {source.spec.name}")
        self._tasks[fill] = task

        def done(_: asyncio.Task[None]) -> None:
            del self._tasks[fill]
            if self._fills.get(digest) is fill:
                del self._fills[digest]

        task.add_done_callback(done)
        return fill

    async def settled(self, fill: Fill) -> None:
        """Wait until a fill has committed or given up."""
        task = self._tasks.get(fill)
        if task is not None:
            await asyncio.wait([task])

    # --- extents ------------------------------------------------------------------------------

    async def load(self, source: ShardSource, extent: int, *, from_store: bool) -> int | None:
        """An extent from the store, or from the origin by a range request; held for the caller.

        One load an extent at a time: others wait and find it in the arena. None: a fill that began
        meanwhile has the extent under way.
        """
        digest = source.spec.digest
        pool = self.tools.pool
        while True:
            slot = pool.table.find(digest, extent)
            if slot is not None:
                pool.hold(slot)
                return slot
            under_way = self._loads.get((digest, extent))
            if under_way is not None:
                await asyncio.wait([under_way])
                continue
            slot = await pool.allocate(digest, extent, demand=True)
            if slot is not None:
                break
            if (digest, extent) not in self._loads:
                return None
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loads[(digest, extent)] = loaded
        try:
            if from_store:
                await self.tools.store.read_extent(digest, extent, pool.view(slot))
            else:
                await self._range(source, extent, pool.view(slot))
            pool.table.mark_ready(slot)
        except BaseException:
            pool.drop(slot)
            raise
        finally:
            del self._loads[(digest, extent)]
            loaded.set_result(None)
        return slot

    async def _range(self, source: ShardSource, extent: int, view: memoryview) -> None:
        tools = self.tools
        length = extent_length(source.spec, extent, tools.extent_bytes)
        covered = 0
        works = list(works_of_extent(source.spec, extent, tools.extent_bytes))
        for work in works:
            begin, end = work.targets[0].begin_bytes, work.targets[0].end_bytes
            view[covered:begin] = bytes(begin - covered)
            covered = end
        view[covered:length] = bytes(length - covered)
        for work in works:
            target = work.targets[0]
            piece = view[target.begin_bytes : target.end_bytes]
            await tools.engine.read_into(
                work.info, work.begin_bytes, [piece], _ignore_target, source.options
            )


def _ignore_target(_: int) -> None:
    """A range request's caller waits for the whole."""


class ShardReader:
    """Reads one shard from its first extent to its last. See the top of the file."""

    def __init__(self, cache: ShardCache, source: ShardSource) -> None:
        self._cache = cache
        self._source = source
        self._digest = source.spec.digest
        self._fill: Fill | None = None
        self._leased = False
        self._refills = 0
        # A new token whenever the shard was looked up anew: several extents are sought at once,
        # and what befalls them together is acted on once.
        self._attachment = object()
        self._index: SampleIndex | None = None
        self._index_is_whole = False
        self._ends = np.zeros(0, dtype=np.uint64)
        self._chunks_taken = 0
        self._attach()

    @property
    def extent_count(self) -> int:
        """Extents of the shard."""
        return self._source.spec.extent_count(self._cache.tools.extent_bytes)

    def length(self, extent: int) -> int:
        """Bytes in this extent."""
        return extent_length(self._source.spec, extent, self._cache.tools.extent_bytes)

    def _attach(self) -> None:
        """Lease the stored shard, or join its fill."""
        store = self._cache.tools.store
        if store.lookup(self._digest) is None:
            self._fill = self._cache.join(self._source)
            return
        store.lease(self._digest)
        store.touch(self._digest)
        self._leased = True
        self._cache.tools.metrics.add("hits_total")
        encoded = store.sample_index(self._digest)
        if encoded is not None:
            self._set_index(SampleIndex.decode(encoded))
            self._index_is_whole = True

    def _set_index(self, index: SampleIndex) -> None:
        self._index = index
        self._ends = index.ends()

    def _detach(self) -> None:
        if self._fill is not None:
            fill, self._fill = self._fill, None
            self._cache.leave(fill)
        if self._leased:
            self._leased = False
            self._cache.tools.store.release(self._digest)

    async def extent(self, extent: int) -> tuple[int, str]:
        """Returns the slot that holds the extent, held for the caller, and the tier it came from.

        Raises:
            GpufeedError: the origin failed, or the shard is wrong there.
        """
        pool = self._cache.tools.pool
        metrics = self._cache.tools.metrics
        while True:
            seen = self._attachment
            slot = pool.table.find(self._digest, extent)
            if slot is not None:
                pool.hold(slot)
                metrics.add("arena_hit_bytes_total", self.length(extent))
                return slot, "arena"
            if self._fill is not None:
                found = await self._from_fill(self._fill, extent)
                if found is not None:
                    return found, "origin"
                self._reattach(seen)
                continue
            try:
                slot = await self._cache.load(self._source, extent, from_store=True)
            except IntegrityError:
                if self._attachment is seen:
                    self._refills += 1
                if self._refills > REFILLS_MAX:
                    raise
                slot = None
            except StorageError:
                # The machine is short of something for now; the shard itself is not to blame.
                slot = await self._cache.load(self._source, extent, from_store=False)
                if slot is not None:
                    return slot, "origin"
            if slot is not None:
                return slot, "nvme"
            self._reattach(seen)

    def _reattach(self, seen: object) -> None:
        """Look the shard up anew, unless another extent's seeker has done so since `seen`."""
        if self._attachment is not seen:
            return
        self._attachment = object()
        fill = self._fill
        if fill is not None and fill.verified.done() and not fill.has_failed:
            self._set_index(fill.sample_index)
            self._index_is_whole = True
        self._detach()
        self._attach()

    async def _from_fill(self, fill: Fill, extent: int) -> int | None:
        """A slot, or None: look the shard up anew (it is stored now, or another fill has it)."""
        fill.advance(extent)
        if fill.has_failed:
            raise _again(fill.verified.exception())
        if not fill.has_passed(extent):
            waiting = fill.wait(extent)
            try:
                return await waiting
            except asyncio.CancelledError:
                if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                    self._cache.tools.pool.drop(waiting.result())
                raise
        if fill.is_cached:
            await self._cache.settled(fill)
            if self._cache.tools.store.lookup(self._digest) is not None:
                return None
        if self._cache.is_filled_by_another(fill):
            return None
        return await self._cache.load(self._source, extent, from_store=False)

    def raise_if_failed(self) -> None:
        """Raise what the shard's fill has met, if it has.

        Raises:
            GpufeedError: the fill's own error.
        """
        if self._fill is not None and self._fill.has_failed:
            raise _again(self._fill.verified.exception())

    def samples(self, first: int, extents_done: int) -> list[SampleIndex]:
        """Samples that lie wholly in the first `extents_done` extents and were not returned before.

        Args:
            first: how many were returned before.
            extents_done: grows from call to call.
        """
        if self._fill is not None and not self._index_is_whole:
            return self._chunks_until(extents_done)
        if self._index is None:
            return []
        limit = extents_done * self._cache.tools.extent_bytes
        end = int(np.searchsorted(self._ends, limit, side="right"))
        return [self._index.slice(first, end)] if end > first else []

    def _chunks_until(self, extents_done: int) -> list[SampleIndex]:
        assert self._fill is not None
        found = []
        for extent, index in self._fill.chunks[self._chunks_taken :]:
            if extent >= extents_done:
                break
            found.append(index)
        self._chunks_taken += len(found)
        return found

    @property
    def is_stored(self) -> bool:
        """Whether it reads from the store, not from a fill."""
        return self._fill is None

    async def finish(self) -> None:
        """Wait until the shard as a whole was found right.

        Raises:
            IntegrityError: its checksum is wrong; what was read of it must not be trusted.
        """
        if self._fill is not None:
            try:
                await asyncio.shield(self._fill.verified)
            except GpufeedError as error:
                raise _again(error) from None

    def close(self) -> None:
        """Let go of the store's lease and of the fill. Slots are the caller's own."""
        self._detach()


def _again(error: BaseException | None) -> GpufeedError:
    """A fresh copy, so that many readers do not grow one traceback."""
    assert isinstance(error, GpufeedError), error
    return type(error)(*error.args)
