"""From a stored shard into a slot: every extent is checked against its CRC-64 before it is seen.

Whatever is wrong with a shard's bytes, file or record condemns the shard: the store takes it out,
and a fill brings it back. A machine that is short of descriptors or memory condemns nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gpufeed.cachefs import checksum, layout
from gpufeed.cachefs.errors import GpufeedError, IntegrityError, StorageError
from gpufeed.cachefs.layout import Record
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.store.descriptors import Descriptors
from gpufeed.cachefs.store.directory import CacheDirectory
from gpufeed.cachefs.store.files import Files, is_shortage
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.store.threads import DiskThreads
from gpufeed.cachefs.store.writer import padded


class ExtentReader:
    """Reads for the store. `on_wrong` is called once for each shard that has to go."""

    def __init__(
        self, directory: CacheDirectory, files: Files, index: Index, threads: DiskThreads,
        metrics: Metrics, on_wrong: Callable[[str, GpufeedError], None],
    ) -> None:  # fmt: skip
        self._directory = directory
        self._files = files
        self._index = index
        self._threads = threads
        self._metrics = metrics
        self._on_wrong = on_wrong
        self.descriptors = Descriptors(files, threads)

    async def read(
        self, digest: str, extent: int, target: memoryview, is_leased: Callable[[str], bool]
    ) -> int:
        """See `ShardStore.read_extent`."""
        shard = self.descriptors.borrow(digest, self._directory.shard_path(digest))
        wrong: GpufeedError | None = None
        try:
            if shard.record is None:
                shard.record = self._record(digest)
            descriptor = await asyncio.shield(shard.opening)
            return await self._threads.run(self._verified, descriptor, shard.record, extent, target)
        except StorageError as error:
            self._metrics.add("store_errors_total")
            if is_shortage(error):
                raise
            wrong = error
            raise IntegrityError(f"the shard {digest} cannot be read: {error}") from error
        except IntegrityError as error:
            wrong = error
            raise
        finally:
            # If another reader condemned it, there may be a good one under the name by now.
            if wrong is not None and not shard.is_condemned:
                self._on_wrong(digest, wrong)
            self.descriptors.give_back(shard, keep=is_leased(digest))

    def _record(self, digest: str) -> Record:
        packed = self._index.get(digest)
        if packed is None:
            raise IntegrityError(f"the shard {digest} has no index record; it is fetched again")
        return layout.unpack_record(packed)

    def _verified(self, descriptor: int, record: Record, extent: int, target: memoryview) -> int:
        """In a disk thread."""
        length = record.extent_length(extent)
        blocks = padded(target, length)
        offset = layout.extent_offset(extent, record.extent_bytes)
        found = self._files.read(descriptor, blocks, offset)
        if found != len(blocks) or checksum.crc64(target[:length]) != record.extent_crcs[extent]:
            raise IntegrityError(
                f"extent {extent} of a stored shard is wrong on disk ({found} of {len(blocks)} "
                "bytes read): it is never served; the shard is fetched again"
            )
        self._metrics.add("nvme_read_bytes_total", length)
        return length
