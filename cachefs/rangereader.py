"""Reads some extents of one shard, in any order, without filling it: for file-like access.

What the store has comes from there; a fill in flight is joined; everything else is fetched as
ranges, which live in the arena only, until `rangerule` says that the whole is wanted and the store
has room for it.

The caller has a credit of its session's window for every slot that it holds or waits for. Owned by
the daemon's loop.
"""

from __future__ import annotations

from gpufeed.cachefs.errors import IntegrityError, StorageError, UsageError
from gpufeed.cachefs.fill import Fill
from gpufeed.cachefs.fills import Fills
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.loads import Loads
from gpufeed.cachefs.placement import extent_length
from gpufeed.cachefs.rangerule import Touched
from gpufeed.cachefs.sources import ShardSource

# A shard found wrong on disk again right after it was fetched means a disk or memory that lies.
WRONG_MAX = 3


class RangeReader:
    """See the top of the file. Close it.

    Raises:
        UsageError: the shard is compressed.
    """

    def __init__(
        self, source: ShardSource, tools: FillTools, *, fills: Fills, loads: Loads
    ) -> None:
        if source.spec.codec:
            raise UsageError(
                f"{source.spec.name} is compressed ({source.spec.codec}): it can be read from its "
                "start only; open it as it is stored, without decompressing"
            )
        self._source = source
        self._digest = source.spec.digest
        self._tools = tools
        self._fills = fills
        self._loads = loads
        self._touched = Touched(self.extent_count)
        self._asked_for_whole = False
        self._fill: Fill | None = None
        self._leased = False
        self._wrong_count = 0

    @property
    def extent_count(self) -> int:
        """Extents of the shard."""
        return self._source.spec.extent_count(self._tools.extent_bytes)

    def length(self, extent: int) -> int:
        """Bytes in this extent."""
        return extent_length(self._source.spec, extent, self._tools.extent_bytes)

    async def extent(self, extent: int) -> tuple[int, str]:
        """Returns the slot that holds the extent, held for the caller, and the tier it came from.

        Extents asked for together that lie side by side are fetched together.

        Raises:
            GpufeedError: the origin failed, or the shard is wrong there.
        """
        assert 0 <= extent < self.extent_count, (extent, self.extent_count)
        is_due = self._touched.note(extent)
        while True:
            slot = self._tools.pool.find(self._digest, extent)
            if slot is not None:
                self._tools.metrics.add("arena_hit_bytes_total", self.length(extent))
                return slot, "arena"
            if self._is_stored():
                found = await self._from_store(extent)
            else:
                if is_due and not self._asked_for_whole:
                    self._asked_for_whole = True
                    self._fills.prefetch(self._source)
                found = await self._from_origin(extent)
            if found is not None:
                return found

    def _is_stored(self) -> bool:
        store = self._tools.store
        if store.lookup(self._digest) is None or not self._tools.may_share(self._digest):
            self._let_go()
            return False
        if not self._leased:
            self._let_go()
            store.lease(self._digest)
            store.touch(self._digest)
            self._leased = True
            self._tools.metrics.add("hits_total")
        return True

    async def _from_store(self, extent: int) -> tuple[int, str] | None:
        try:
            return await self._loads.load(self._source, extent, from_store=True), "nvme"
        except IntegrityError:
            # It was set aside: from now on it comes from the origin.
            self._wrong_count += 1
            if self._wrong_count > WRONG_MAX:
                raise
            return None
        except StorageError:
            # The machine is short of something for now; the shard itself is not to blame.
            return await self._loads.load(self._source, extent, from_store=False), "origin"

    async def _from_origin(self, extent: int) -> tuple[int, str] | None:
        fill = self._fills.joinable(self._digest)
        comes = fill is not None and not fill.has_passed(extent)
        if fill is None or not comes or not (fill.is_cached or fill.has_opened(extent)):
            return await self._loads.load(self._source, extent, from_store=False), "origin"
        if self._fill is not fill:
            self._let_go()
            fill.enter(self)
            self._fill = fill
        # Should the fill lose its place in the store, it must still come here.
        fill.advance(self, extent)
        return await fill.take(extent), "origin"

    def _let_go(self) -> None:
        if self._fill is not None:
            fill, self._fill = self._fill, None
            self._fills.leave(fill, self)
        if self._leased:
            self._leased = False
            self._tools.store.release(self._digest)

    def close(self) -> None:
        """Let go of the store's lease and of the fill. Slots are the caller's own."""
        self._let_go()
