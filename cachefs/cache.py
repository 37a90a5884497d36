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
    """All shards of a daemon."""

    def __init__(self, tools: FillTools) -> None:
        self.tools = tools
        self._fills = Fills(tools)
        self._loads = Loads(tools)

    def open(self, source: ShardSource) -> ShardReader:
        """A reader of this shard; close it."""
        return ShardReader(source, self.tools, fills=self._fills, loads=self._loads)

    def open_ranges(self, source: ShardSource) -> RangeReader:
        """A reader of some extents of this shard, in any order; close it."""
        return RangeReader(source, self.tools, fills=self._fills, loads=self._loads)

    def prefetch(self, source: ShardSource) -> asyncio.Task[None] | None:
        """Begin to fill a shard into the store. None: it is there, under way, or has no room."""
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
        await self._loads.close()
        await self._fills.close()
        self.tools.decoders.shutdown()
