"""Reads one shard for one session, extent by extent, from whichever tier has it.

`extent(i)` finds the extent in the arena, reads it from the store (verified before it is shown), or
takes it from the shard's fill; from another tenant's it is copied. What a reader missed of a fill
it gets from the store once that is committed, or by a range request of its own.

Invariants:
    - every slot that `extent` returns is held once for the caller, who drops it;
    - what another tenant brought, to the store or into its arena, is served only to a tenant that
      was seen to have access (`FillTools.may_share`); else its own credentials fetch the shard;
    - a shard found wrong on disk is quarantined and filled again; the reader does not notice.

Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from gpufeed.cachefs.borrowed import BorrowedFill
from gpufeed.cachefs.errors import GpufeedError, IntegrityError, PastEndError, StorageError, again
from gpufeed.cachefs.fill import Fill
from gpufeed.cachefs.fills import Fills
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.loads import Loads
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.placement import extent_length
from gpufeed.cachefs.sampleindex import SampleIndex
from gpufeed.cachefs.sources import ShardSource

# A shard found wrong again right after its refill means a disk or memory that lies.
REFILLS_MAX = 2
# Past the end of any shard: a reader that has all of it holds up nobody.
_THE_END = 1 << 60


class ShardReader:
    """Reads one shard from its first extent to its last. See the top of the file."""

    def __init__(
        self, source: ShardSource, tools: FillTools, *, fills: Fills, loads: Loads
    ) -> None:
        self._source = source
        self._tools = tools
        self._fills = fills
        self._loads = loads
        self._digest = source.spec.digest
        self._fill: Fill | BorrowedFill | None = None
        self._leased = False
        self._refills = 0
        # A new token whenever the shard was looked up anew: several extents are sought at once,
        # and what befalls them together is acted on once.
        self._attachment = object()
        self._describing = asyncio.Lock()
        self._index: SampleIndex | None = None
        self._index_is_whole = False
        self._ends = np.zeros(0, dtype=np.uint64)
        self._chunks_taken = 0
        self._attach(0)

    @property
    def _spec(self) -> ShardSpec:
        spec = self._source.spec if self._fill is None else self._fill.spec
        if spec.is_sized:
            return spec
        size_bytes = self._fills.size_of(self._digest)
        return spec if size_bytes is None else spec.sized(size_bytes)

    @property
    def extent_count(self) -> int | None:
        """Extents of the shard; None as long as that is not known."""
        spec = self._spec
        return spec.extent_count(self._tools.extent_bytes) if spec.is_sized else None

    def length(self, extent: int) -> int:
        """Bytes in this extent, which `extent` has returned."""
        spec, extent_bytes = self._spec, self._tools.extent_bytes
        return extent_length(spec, extent, extent_bytes) if spec.is_sized else extent_bytes

    def _attach(self, extent: int, *, past_store: bool = False) -> None:
        """Lease the stored shard, or join its fill, to go on with `extent`."""
        store = self._tools.store
        stored = store.lookup(self._digest)
        if stored is None or past_store or not self._tools.may_share(self._digest):
            self._fill = self._fills.join(self._source, self, extent)
            return
        if not self._source.spec.is_sized:
            spec = self._source.spec.sized(stored.size_bytes)
            self._source = replace(self._source, spec=spec)
        store.lease(self._digest)
        store.touch(self._digest)
        self._leased = True
        known = self._tools.indexes.get(self._digest)
        if known is not None:
            self._index, self._ends = known
            self._index_is_whole = True
        self._tools.metrics.add("hits_total")

    async def _know_samples(self, seen: object, extent: int) -> None:
        """Read the stored shard's sample index, once for all seekers; or look elsewhere for it."""
        async with self._describing:
            if self._attachment is not seen or self._index_is_whole:
                return
            try:
                encoded = await self._tools.store.sample_index(self._digest)
            except IntegrityError:
                self._refills += 1
                if self._refills > REFILLS_MAX:
                    raise
                self._reattach(seen, extent)
            except StorageError:
                # The disk cannot say for now. The shard streams by, past the store.
                self._attachment = object()
                self._detach()
                self._fill = self._fills.join(self._source, self, extent)
            else:
                if encoded is not None:
                    index = SampleIndex.decode(encoded)
                    self._set_index(index)
                    self._tools.indexes.put(self._digest, index, self._ends)
                self._index_is_whole = True

    def _set_index(self, index: SampleIndex) -> None:
        self._index = index
        self._ends = index.ends()

    def _detach(self) -> None:
        if self._fill is not None:
            fill, self._fill = self._fill, None
            self._fills.leave(fill, self)
        if self._leased:
            self._leased = False
            self._tools.store.release(self._digest)

    def ready(self, extent: int) -> int | None:
        """The slot that holds the extent, held for the caller, if it is in the arena now.

        Never waits: what every reader but the first of a node meets, and all that it costs.
        """
        if self._leased and not self._index_is_whole:
            return None
        slot = self._tools.pool.find(self._digest, extent)
        if slot is not None:
            self._tools.metrics.add("arena_hit_bytes_total", self.length(extent))
        return slot

    async def extent(self, extent: int) -> tuple[int, str]:
        """Returns the slot that holds the extent, held for the caller, and the tier it came from.

        Raises:
            PastEndError: the shard has no such extent.
            GpufeedError: the origin failed, or the shard is wrong there.
        """
        while True:
            seen = self._attachment
            if self._leased and not self._index_is_whole:
                await self._know_samples(seen, extent)
                continue
            slot = self.ready(extent)
            if slot is not None:
                return slot, "arena"
            if self._fill is not None:
                found = await self._from_fill(self._fill, extent)
                if found is not None:
                    return found, "origin"
                self._reattach(seen, extent)
                continue
            self._check_end(extent)
            try:
                return await self._loads.load(self._source, extent, from_store=True), "nvme"
            except IntegrityError:
                if self._attachment is seen:
                    self._refills += 1
                if self._refills > REFILLS_MAX:
                    raise
            except StorageError:
                # The machine is short of something for now; the shard itself is not to blame.
                if not self._source.spec.codec:
                    return await self._loads.load(self._source, extent, from_store=False), "origin"
                self._reattach(seen, extent, past_store=True)
                continue
            self._reattach(seen, extent)

    def _check_end(self, extent: int) -> None:
        count = self.extent_count
        if count is not None and extent >= count:
            raise PastEndError(
                f"{self._source.spec.name} has {count} extents; extent {extent} lies past its end"
            )

    def _reattach(self, seen: object, extent: int, *, past_store: bool = False) -> None:
        """Look the shard up anew, unless another extent's seeker has done so since `seen`."""
        if self._attachment is not seen:
            return
        self._attachment = object()
        fill = self._fill
        if fill is not None and fill.verified.done() and fill.verified.exception() is None:
            self._set_index(fill.sample_index)
            self._index_is_whole = True
        self._detach()
        self._attach(extent, past_store=past_store)

    async def _from_fill(self, fill: Fill | BorrowedFill, extent: int) -> int | None:
        """A slot, or None: look the shard up anew (it is stored now, or another fill has it)."""
        if isinstance(fill, BorrowedFill) and fill.is_lost:
            return None
        fill.advance(self, extent)
        if fill.has_failed:
            raise again(fill.verified.exception())
        if not fill.has_passed(extent):
            return await fill.take(extent)
        if fill.is_cached:
            await fill.decided()
            is_stored = self._tools.store.lookup(self._digest) is not None
            if is_stored and self._tools.may_share(self._digest):
                return None
        if self._fills.has_another(fill, extent):
            return None
        return await self._loads.load(self._source, extent, from_store=False)

    def raise_if_failed(self) -> None:
        """Raise what the shard's fill has met, if it has.

        Raises:
            GpufeedError: the fill's own error.
        """
        if self._fill is not None and self._fill.has_failed:
            raise again(self._fill.verified.exception())

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
        limit = extents_done * self._tools.extent_bytes
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
        while (fill := self._fill) is not None:
            fill.advance(self, _THE_END)
            try:
                await asyncio.shield(fill.verified)
            except GpufeedError as error:
                if not (isinstance(fill, BorrowedFill) and fill.is_lost):
                    raise again(error) from None
                # Nobody will say whether it is right as a whole: it is fetched once more for that.
                self._reattach(self._attachment, 0)
            else:
                return

    def close(self) -> None:
        """Let go of the store's lease and of the fill. Slots are the caller's own."""
        self._detach()
