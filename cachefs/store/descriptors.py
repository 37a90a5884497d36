"""Open descriptors of stored shards: shared by the readers of a shard, kept while it is leased.

At most `DESCRIPTORS_MAX` are kept; beyond, the least recently used idle one is closed, and if none
is idle the newcomer is closed after its read. A **condemned** shard's descriptor is forgotten at
once and closed by its last reader; only then may its file be unlinked and its bytes given back.

Used on the loop's thread; files are opened in the disk threads.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from gpufeed.cachefs.store.files import Files
from gpufeed.cachefs.store.shardfile import Opened, open_shard
from gpufeed.cachefs.store.threads import DiskThreads

DESCRIPTORS_MAX = 512


@dataclass(slots=True, eq=False)
class OpenShard:
    """A descriptor on its way or there, and how many reads are using it."""

    digest: str
    opening: asyncio.Future[Opened]
    reads_count: int = 0
    closed: asyncio.Future[None] | None = None

    @property
    def is_condemned(self) -> bool:
        """Whether the shard was taken out while this read was going on."""
        return self.closed is not None


class Descriptors:
    """See the top of the file."""

    def __init__(self, files: Files, threads: DiskThreads, *, limit: int = DESCRIPTORS_MAX) -> None:
        self._files = files
        self._threads = threads
        self._limit = limit
        self._kept: OrderedDict[str, OpenShard] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def borrow(self, digest: str, path: str) -> OpenShard:
        """The shard's descriptor for one read. Await its `opening`; then `give_back`."""
        shard = self._kept.get(digest)
        if shard is None:
            shard = OpenShard(digest, self._threads.submit(open_shard, self._files, path, digest))
            self._kept[digest] = shard
        shard.reads_count += 1
        self._kept.move_to_end(digest)
        return shard

    def give_back(self, shard: OpenShard, *, keep: bool) -> None:
        """A read is over. `keep`: more are to be expected (the shard is leased)."""
        shard.reads_count -= 1
        if shard.reads_count:
            return
        if self._kept.get(shard.digest) is not shard:
            self._close(shard)
        elif not keep or not _is_open(shard.opening):
            self.condemn(shard.digest)
        else:
            self._shrink()

    def _shrink(self) -> None:
        if len(self._kept) <= self._limit:
            return
        idle = [digest for digest, shard in self._kept.items() if not shard.reads_count]
        for digest in idle[: len(self._kept) - self._limit]:
            self.condemn(digest)

    def release(self, digest: str) -> None:
        """The last lease went: an idle descriptor is closed."""
        shard = self._kept.get(digest)
        if shard is not None and not shard.reads_count:
            self.condemn(digest)

    def condemn(self, digest: str) -> asyncio.Future[None] | None:
        """Forget the shard. Returns what resolves when the last reader is gone; None: at once."""
        shard = self._kept.pop(digest, None)
        if shard is None:
            return None
        if not shard.reads_count:
            self._close(shard)
            return None
        shard.closed = asyncio.get_running_loop().create_future()
        return shard.closed

    def _close(self, shard: OpenShard) -> None:
        if shard.opening.done():
            self._close_descriptor(shard.opening)
        else:
            shard.opening.add_done_callback(self._close_descriptor)
        if shard.closed is not None and not shard.closed.done():
            shard.closed.set_result(None)

    def _close_descriptor(self, opening: asyncio.Future[Opened]) -> None:
        if _is_open(opening):
            self._files.close(opening.result().descriptor)

    async def close(self) -> None:
        """Wait for the reads under way and close all."""
        for digest in list(self._kept):
            closed = self.condemn(digest)
            if closed is not None:
                await closed


def _is_open(opening: asyncio.Future[Opened]) -> bool:
    return opening.done() and not opening.cancelled() and opening.exception() is None
