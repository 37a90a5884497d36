"""Single extents into the arena, from the store or from the origin, one load an extent at a time.

Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio

from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.placement import extent_length, works_of_extent
from gpufeed.cachefs.sources import ShardSource


class Loads:
    """See the top of the file."""

    def __init__(self, tools: FillTools) -> None:
        self._tools = tools
        self._under_way: dict[tuple[str, int], asyncio.Future[None]] = {}

    async def load(self, source: ShardSource, extent: int, *, from_store: bool) -> int | None:
        """An extent from the store, or from the origin by a range request; held for the caller.

        One load an extent at a time: others wait and find it in the arena. None: a fill that began
        meanwhile has the extent under way.
        """
        digest = source.spec.digest
        pool = self._tools.pool
        while True:
            slot = pool.table.find(digest, extent)
            if slot is not None:
                pool.hold(slot)
                return slot
            under_way = self._under_way.get((digest, extent))
            if under_way is not None:
                await asyncio.wait([under_way])
                continue
            slot = await pool.allocate(digest, extent)
            if slot is not None:
                break
            if (digest, extent) not in self._under_way:
                return None
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way[(digest, extent)] = loaded
        try:
            if from_store:
                await self._tools.store.read_extent(digest, extent, pool.view(slot))
            else:
                await self._range(source, extent, pool.view(slot))
            pool.table.mark_ready(slot)
        except BaseException:
            pool.drop(slot)
            raise
        finally:
            del self._under_way[(digest, extent)]
            loaded.set_result(None)
        return slot

    async def _range(self, source: ShardSource, extent: int, view: memoryview) -> None:
        tools = self._tools
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
