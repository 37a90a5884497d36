"""From a stored shard into a slot: every extent is checked against its CRC-64 before it is seen.

A shard's file is opened once for as long as it is read; its header and trailer are verified then,
by direct reads, and give the checksums. Nothing here looks into the index.

What goes wrong is judged:

- wrong bytes, a missing file, a sector that cannot be read: the shard is condemned. The store takes
  it out, and a fill brings it back (`IntegrityError`);
- a machine short of descriptors or memory; a disk that is late, gone or refuses one shard after the
  other: the shard is kept, and the caller goes to the origin meanwhile (`StorageError`).

A late disk still writes into the caller's slot: `DiskLateError.over` says when it has stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gpufeed.cachefs import checksum, layout
from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.errors import DiskLateError, GpufeedError, IntegrityError, StorageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.store.catalog import StoredShard
from gpufeed.cachefs.store.descriptors import Descriptors, OpenShard
from gpufeed.cachefs.store.directory import CacheDirectory
from gpufeed.cachefs.store.files import Files, is_missing, is_shortage
from gpufeed.cachefs.store.health import DiskHealth
from gpufeed.cachefs.store.shardfile import Opened, read_samples
from gpufeed.cachefs.store.threads import DiskThreads
from gpufeed.cachefs.store.writer import padded

# A read that takes longer than this, not counting its queue, is a sick disk's.
READ_LATE_S = 1.0

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEvents:
    """What the store is told. `on_wrong`: once for each shard that has to go."""

    on_wrong: Callable[[str, GpufeedError], None]
    on_sick: Callable[[GpufeedError], None]
    is_leased: Callable[[str], bool]


class ExtentReader:
    """Reads for the store. See the top of the file."""

    def __init__(
        self, directory: CacheDirectory, files: Files, threads: DiskThreads, *,
        metrics: Metrics, clock: Clock, health: DiskHealth, events: ReadEvents,
    ) -> None:  # fmt: skip
        self._directory = directory
        self._files = files
        self._threads = threads
        self._metrics = metrics
        self._clock = clock
        self._health = health
        self._events = events
        self.descriptors = Descriptors(files, threads)

    async def read(self, stored: StoredShard, extent: int, target: memoryview) -> int:
        """See `ShardStore.read_extent`."""
        return await self._do(stored, self._verified, extent, target)

    async def samples(self, stored: StoredShard) -> bytes | None:
        """See `ShardStore.sample_index`."""
        return await self._do(stored, self._samples)

    async def _do(
        self, stored: StoredShard, function: Callable[..., _Result], *args: object
    ) -> _Result:
        """Run one call on a shard's open file, and judge how it ends."""
        if not self._health.admits(self._clock.monotonic_s()):
            raise StorageError(
                f"the cache disk is left alone for a while: {stored.digest} is read from its origin"
            )
        is_probe = self._health.reserved()
        shard = self.descriptors.borrow(stored.digest, self._directory.shard_path(stored.digest))
        over: asyncio.Future[object] | None = None
        try:
            opened = await self._threads.in_time(shard.opening, READ_LATE_S)
            opened.check(stored.size_bytes, stored.file_bytes)
            result = await self._threads.run_in_time(READ_LATE_S, function, opened, *args)
        except DiskLateError as late:
            over = late.over
            self._sick(late)
            raise
        except StorageError as error:
            raise await self._judged(shard, error) from error
        except IntegrityError as error:
            self._condemn(shard, error)
            raise
        else:
            self._health.answered()
            if is_probe:
                self._health.probe_succeeded()
            return result
        finally:
            if is_probe:
                self._health.probe_ended(self._clock.monotonic_s())
            if over is None or over.done():
                self._give_back(shard)
            else:
                over.add_done_callback(lambda _: self._give_back(shard))

    def _give_back(self, shard: OpenShard) -> None:
        self.descriptors.give_back(shard, keep=self._events.is_leased(shard.digest))

    def _sick(self, error: StorageError) -> None:
        self._health.failed(self._clock.monotonic_s())
        self._events.on_sick(error)

    async def _judged(self, shard: OpenShard, error: StorageError) -> GpufeedError:
        """What the caller gets for a refusal of the disk."""
        self._metrics.add("store_errors_total")
        if is_shortage(error):
            return StorageError(str(error))
        if is_missing(error):
            try:
                await self._threads.run(self._directory.verify)
            except StorageError as gone:
                self._sick(gone)
                return gone
        else:
            self._health.struck(self._clock.monotonic_s())
            if self._health.state != "healthy":
                self._events.on_sick(error)
                return StorageError(str(error))
        wrong = IntegrityError(f"the shard {shard.digest} cannot be read: {error}")
        self._condemn(shard, wrong)
        return wrong

    def _condemn(self, shard: OpenShard, why: GpufeedError) -> None:
        # If another reader condemned it, there may be a good one under the name by now.
        if not shard.is_condemned:
            self._events.on_wrong(shard.digest, why)

    def _verified(self, opened: Opened, extent: int, target: memoryview) -> int:
        """In a disk thread."""
        record = opened.record
        length = record.extent_length(extent)
        blocks = padded(target, length)
        offset = layout.extent_offset(extent, record.extent_bytes)
        found = self._files.read(opened.descriptor, blocks, offset)
        if found != len(blocks) or checksum.crc64(target[:length]) != record.extent_crcs[extent]:
            raise IntegrityError(
                f"extent {extent} of a stored shard is wrong on disk ({found} of {len(blocks)} "
                "bytes read): it is never served; the shard is fetched again"
            )
        self._metrics.add("nvme_read_bytes_total", length)
        return length

    def _samples(self, opened: Opened) -> bytes | None:
        """In a disk thread."""
        return read_samples(self._files, opened)
