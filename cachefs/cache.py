"""The cache: where a reader asks for a shard's extents.

`ShardCache.open` gives a `ShardReader`, one a session and plan position; `prefetch` fills a shard
into the store before anybody asks; `open_ranges` is for those who want a little of a large shard.
The work is in `shardreader`, `rangereader`, `fills` and `loads`.

Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio

from gpufeed.cachefs.fills import Fills
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.loads import Loads
from gpufeed.cachefs.rangereader import RangeReader
from gpufeed.cachefs.shardreader import ShardReader
from gpufeed.cachefs.sources import KnownIndexer, ShardSource

__all__ = ["KnownIndexer", "RangeReader", "ShardCache", "ShardReader", "ShardSource"]


class ShardCache:
    """All shards of a daemon, as one tenant may read them.

    Args:
        tools: of the tenant.
        neighbours: the fills of all tenants, which this one's are added to; None: no other tenant.
    """

    def __init__(self, tools: FillTools, neighbours: list[Fills] | None = None) -> None:
        self.tools = tools
        self._loads = Loads(tools)
        self._fills = Fills(tools, self._loads, () if neighbours is None else neighbours)
        if neighbours is not None:
            neighbours.append(self._fills)

    def open(self, source: ShardSource) -> ShardReader:
        """A reader of this shard; close it."""
        return ShardReader(source, self.tools, fills=self._fills, loads=self._loads)

    async def permit(self, source: ShardSource) -> None:
        """Let the tenant have what others have cached of this shard, if it may read it.

        What nobody has cached needs no permission: it comes by the tenant's own credentials. Call
        it right before `open` or a read, with no wait in between.

        Raises:
            AccessDeniedError: the tenant's own credentials may not read it.
            GpufeedError: the origin cannot say, or has another version.
        """
        access, digest = self.tools.access, source.spec.digest
        if access is None or access.is_proven(digest) or not self._fills.has_elsewhere(digest):
            return
        await access.prove(source)
        self.tools.store.adopt([(digest, source.standing)])

    def open_ranges(self, source: ShardSource) -> RangeReader:
        """A reader of some extents of this shard, in any order; close it."""
        return RangeReader(source, self.tools, fills=self._fills, loads=self._loads)

    def prefetch(self, source: ShardSource) -> asyncio.Task[None] | None:
        """Begin to fill a shard into the store. None: it is there, under way, or has no room."""
        access = self.tools.access
        if access is not None and self._fills.has_elsewhere(source.spec.digest):
            access.ahead(source)
        return self._fills.prefetch(source)

    @property
    def fills_count(self) -> int:
        """Fills under way."""
        return len(self._fills)

    async def idle(self) -> None:
        """Wait until no fill is under way."""
        await self._fills.idle()

    async def close(self) -> None:
        """Cancel all fills and loads and wait until they let go of everything."""
        if self.tools.access is not None:
            await self.tools.access.close()
        await self._loads.close()
        await self._fills.close()
        self.tools.decoders.shutdown()
