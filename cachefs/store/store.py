"""The store: shards on NVMe, one file each, reserved before they are written, verified when read.

Reserve → write extents → commit, or abort: no other path makes bytes visible, and an abort leaves
nothing. A commit writes trailer and header, syncs, renames, syncs the directory, then the index: a
crash at any point leaves either a shard that the next start serves, or a ``.tmp`` that it removes.

Invariants:
    - resident + reserved + queued-for-unlink bytes never exceed the capacity (`cachefs.budget`);
    - leased shards are never victims;
    - every extent read is checked against its CRC-64 before anybody sees it; a wrong one takes its
      shard out (**quarantine**), and the caller fills it anew;
    - a disk that fails turns reservations off for a while (`store.health`), and reads into refills.

All methods are called on the daemon's loop. Disk calls run in the store's own threads, index writes
in one thread of their own.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from gpufeed.cachefs import checksum, layout
from gpufeed.cachefs.budget import ByteBudget
from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.config import StoreConfig
from gpufeed.cachefs.errors import IntegrityError, StorageError
from gpufeed.cachefs.layout import Record
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.policy import Admit, NeverEvict
from gpufeed.cachefs.sampleindex import SampleIndex
from gpufeed.cachefs.store.directory import CacheDirectory, reconcile
from gpufeed.cachefs.store.files import AlignedBuffer, DiskFiles, Files
from gpufeed.cachefs.store.health import DiskHealth
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.tasks import finished
from gpufeed.cachefs.units import BLOCK_BYTES, round_up

_LOG = logging.getLogger("gpufeed.store")
_Result = TypeVar("_Result")

# Room reserved for a trailer before the sample index is known: a hundred bytes a 100 kB sample.
TRAILER_RESERVE_RATIO = 1 / 512
TRAILER_RESERVE_BYTES_MIN = 16 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A committed shard."""

    digest: str
    size_bytes: int
    file_bytes: int
    sample_count: int | None


@dataclass(slots=True)
class Reservation:
    """Room for one shard on its way in. Ended by exactly one `commit` or `abort`."""

    spec: ShardSpec
    size_bytes: int
    number: int
    granted: asyncio.Future[None]
    opened: asyncio.Future[int] | None = None
    writes: set[asyncio.Future[None]] = field(default_factory=set)


@dataclass(slots=True)
class _Open:
    descriptor: asyncio.Future[int]
    record: Record
    reads: int = 0


class ShardStore:
    """See the top of the file. Made by `open`."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        extent_bytes: int,
        metrics: Metrics,
        clock: Clock,
        files: Files,
    ) -> None:
        self._config = config
        self._extent_bytes = extent_bytes
        self._metrics = metrics
        self._clock = clock
        self._files = files
        self.memory_only = not config.path
        self.capacity_bytes = 0 if self.memory_only else config.capacity_bytes
        self._budget = ByteBudget(self.capacity_bytes // BLOCK_BYTES * BLOCK_BYTES)
        self._policy = NeverEvict()
        self._health = DiskHealth()
        self._shards: dict[str, StoredShard] = {}
        self._leases: collections.Counter[str] = collections.Counter()
        self._open: dict[str, _Open] = {}
        self._promised: collections.deque[Reservation] = collections.deque()
        self._numbers = itertools.count(1)
        self._unlinking: set[asyncio.Future[None]] = set()
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._directory: CacheDirectory | None = None
        self._index: Index | None = None
        self._disk = ThreadPoolExecutor(config.io_threads, "gpufeed-disk")
        self._indexer = ThreadPoolExecutor(1, "gpufeed-index")

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        *,
        extent_bytes: int,
        metrics: Metrics,
        clock: Clock,
        files: Files | None = None,
    ) -> ShardStore:
        """Lock the directory, recover what is in it.

        Raises:
            OperatorError: the directory is in use, foreign, or of another format.
            StorageError: the disk refused.
        """
        store = cls(
            config, extent_bytes=extent_bytes, metrics=metrics, clock=clock,
            files=files or DiskFiles(),
        )  # fmt: skip
        metrics.set("store_capacity_bytes", store.capacity_bytes)
        if not store.memory_only:
            store._recover()
        return store

    def _recover(self) -> None:
        directory = CacheDirectory(self._config.path)
        directory.open()
        try:
            index = Index(directory.index_path)
        except BaseException:
            directory.close()
            raise
        self._directory, self._index = directory, index
        unusable = []
        for digest, record in reconcile(directory, index, self._files).items():
            # A smaller capacity than before, or another extent size: such shards are of no use.
            fits = record.extent_bytes == self._extent_bytes
            if fits and self._budget.adopt(record.file_bytes):
                self._add(digest, record)
            else:
                unusable.append(digest)
        if unusable:
            index.delete(unusable)
            for digest in unusable:
                self._files.remove(directory.shard_path(digest))
        self._count()

    def _add(self, digest: str, record: Record) -> None:
        stored = StoredShard(digest, record.size_bytes, record.file_bytes, record.sample_count)
        self._shards[digest] = stored
        self._policy.add(digest, record.file_bytes)

    # --- looking up ---------------------------------------------------------------------------

    def lookup(self, digest: str) -> StoredShard | None:
        """The shard, if it is committed."""
        return self._shards.get(digest)

    def touch(self, digest: str) -> None:
        """The shard was used."""
        self._policy.use(digest)

    def lease(self, digest: str) -> None:
        """Keep the shard until `release`; counted."""
        self._leases[digest] += 1

    def release(self, digest: str) -> None:
        """One lease less."""
        self._leases[digest] -= 1
        if not self._leases[digest]:
            del self._leases[digest]
            self._close_idle(digest)

    def sample_index(self, digest: str) -> bytes | None:
        """The encoded `SampleIndex` of a committed shard, or None where it has none."""
        if self._index is None or digest not in self._shards:
            return None
        value = self._index.get(digest)
        return None if value is None else layout.unpack_record(value).sample_index

    # --- coming in ----------------------------------------------------------------------------

    def reserve(self, spec: ShardSpec, *, wanted: Callable[[str], bool]) -> Reservation | None:
        """Room for a shard, evicting others if the policy says so. None: stream it without caching.

        The reservation may have to wait for evicted files to be gone; `write_extent` does.
        """
        if self.memory_only or spec.digest in self._shards:
            return None
        if not self._health.may_reserve(self._clock.monotonic_s()):
            return None
        data_bytes = layout.data_bytes_on_disk(spec.size_bytes)
        trailer_bytes = max(TRAILER_RESERVE_BYTES_MIN, int(data_bytes * TRAILER_RESERVE_RATIO))
        size = layout.HEADER_BYTES + data_bytes + round_up(trailer_bytes, BLOCK_BYTES)
        if not self._above_floor(size):
            return None
        decision = self._policy.decide(
            size, self._budget.available_bytes, wanted=wanted,
            leased=lambda digest: digest in self._leases,
        )  # fmt: skip
        if not isinstance(decision, Admit):
            return None
        for victim in decision.victims:
            self._evict(victim)
            self._metrics.add("evictions_total")
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reservation = Reservation(spec, size, next(self._numbers), granted)
        if self._budget.reserve(size):
            reservation.granted.set_result(None)
        else:
            self._promised.append(reservation)
        self._count()
        return reservation

    def _above_floor(self, size_bytes: int) -> bool:
        found = os.statvfs(self._config.path)
        free = found.f_bavail * found.f_frsize
        return free - size_bytes >= self._config.free_floor_ratio * found.f_blocks * found.f_frsize

    async def write_extent(
        self, reservation: Reservation, extent: int, data: memoryview, length_bytes: int
    ) -> None:
        """Write one extent.

        Args:
            reservation: from `reserve`.
            extent: its number.
            data: the whole slot, page-aligned; what lies beyond `length_bytes` is padding.
            length_bytes: bytes of the shard in it.

        Raises:
            StorageError: the disk refused; abort, and go on without the cache.
        """
        await asyncio.shield(reservation.granted)
        descriptor = await self._opened(reservation)
        padded = data[: round_up(length_bytes, BLOCK_BYTES)]
        offset = layout.extent_offset(extent, self._extent_bytes)
        await self._tracked(reservation, self._files.write, descriptor, padded, offset)
        self._metrics.add("nvme_written_bytes_total", len(padded))

    async def _opened(self, reservation: Reservation) -> int:
        if reservation.opened is None:
            reservation.opened = asyncio.ensure_future(self._create(reservation))
        return await asyncio.shield(reservation.opened)

    async def _create(self, reservation: Reservation) -> int:
        spec = reservation.spec
        assert self._directory is not None
        leaving = self._leaving.get(spec.digest)
        if leaving is not None:
            # The same shard was set aside just now; its removal must not hit the new file.
            await asyncio.shield(leaving)
        path = self._directory.temporary_path(spec.digest, reservation.number)
        size = layout.DATA_OFFSET + layout.data_bytes_on_disk(spec.size_bytes)
        return await self._submit(self._files.create, path, size)

    async def commit(
        self, reservation: Reservation, extent_crcs: Sequence[int], sample_index: bytes | None
    ) -> StoredShard:
        """Make the shard visible, durably.

        Raises:
            StorageError: the disk refused; the reservation is aborted and nothing is left.
        """
        assert self._directory is not None
        spec = reservation.spec
        try:
            descriptor = await self._opened(reservation)
            await asyncio.gather(*reservation.writes)
            trailer = layout.pack_trailer(spec, extent_crcs, sample_index)
            trailer_at = layout.DATA_OFFSET + layout.data_bytes_on_disk(spec.size_bytes)
            file_bytes = trailer_at + len(trailer)
            if not self._budget.resize(reservation.size_bytes, file_bytes):
                raise StorageError(
                    f"no room for the {len(trailer)} bytes that describe {spec.name}"
                )
            reservation.size_bytes = file_bytes
            count = None if sample_index is None else len(SampleIndex.decode(sample_index))
            record = Record(
                self._extent_bytes, spec.size_bytes, file_bytes, count, tuple(extent_crcs),
                sample_index,
            )  # fmt: skip
            header = layout.pack_header(spec, self._extent_bytes, trailer, count)
            await self._tracked(
                reservation, self._finish_file, descriptor, reservation, (header, trailer),
                trailer_at,
            )  # fmt: skip
        except StorageError:
            await self.abort(reservation)
            raise
        return await self._enter(reservation, record)

    def _finish_file(
        self, descriptor: int, reservation: Reservation, ends: tuple[bytes, bytes], trailer_at: int
    ) -> None:
        """In a disk thread: trailer, header, sync, rename."""
        assert self._directory is not None
        header, trailer = ends
        for data, offset in ((trailer, trailer_at), (header, 0)):
            buffer = AlignedBuffer(data)
            try:
                self._files.write(descriptor, buffer.view, offset)
            finally:
                buffer.close()
        self._files.sync(descriptor)
        digest = reservation.spec.digest
        self._files.publish(
            self._directory.temporary_path(digest, reservation.number),
            self._directory.shard_path(digest),
        )

    async def _enter(self, reservation: Reservation, record: Record) -> StoredShard:
        """The file is durable under its name: index it, and show it."""
        assert self._index is not None
        digest = reservation.spec.digest
        self._close_reservation(reservation)
        try:
            await self._call(self._indexer, self._index.put, digest, layout.pack_record(record))
        except StorageError as error:
            # The file describes itself: the next start indexes it.
            _LOG.warning("%s", error)
            self._failed()
        else:
            self._health.succeeded()
        self._budget.commit(reservation.size_bytes)
        self._add(digest, record)
        self._count()
        return self._shards[digest]

    async def abort(self, reservation: Reservation) -> None:
        """Give the room back and leave nothing on the disk."""
        assert self._directory is not None
        if not reservation.granted.done():
            self._promised.remove(reservation)
            reservation.granted.cancel()
            self._budget.withdraw(reservation.size_bytes)
            self._count()
            return
        await asyncio.gather(*reservation.writes, return_exceptions=True)
        if reservation.opened is None:
            self._budget.abort(reservation.size_bytes)
            self._grant()
            return
        await asyncio.gather(reservation.opened, return_exceptions=True)
        self._close_reservation(reservation)
        self._budget.discard(reservation.size_bytes)
        path = self._directory.temporary_path(reservation.spec.digest, reservation.number)
        await asyncio.shield(self._unlink(path, reservation.size_bytes))

    def _close_reservation(self, reservation: Reservation) -> None:
        opened = reservation.opened
        if opened is not None and opened.done() and opened.exception() is None:
            self._files.close(opened.result())

    # --- going out ----------------------------------------------------------------------------

    def _evict(self, digest: str) -> None:
        """Take a shard out of the index now; its file goes behind the loop's back."""
        assert self._directory is not None
        stored = self._shards.pop(digest)
        self._policy.remove(digest)
        self._budget.evict(stored.file_bytes)
        self._close_idle(digest)
        path = self._directory.shard_path(digest)
        leaving = self._unlink(path, stored.file_bytes, digest)
        self._leaving[digest] = leaving
        leaving.add_done_callback(lambda _: self._leaving.pop(digest, None))
        self._count()

    def _unlink(self, path: str, size_bytes: int, digest: str = "") -> asyncio.Future[None]:
        task = asyncio.ensure_future(self._unlink_task(path, size_bytes, digest))
        self._unlinking.add(task)
        task.add_done_callback(self._unlinking.discard)
        return task

    async def _unlink_task(self, path: str, size_bytes: int, digest: str) -> None:
        assert self._index is not None
        try:
            if digest:
                await self._call(self._indexer, self._index.delete, [digest])
            await self._submit(self._files.remove, path)
        except StorageError as error:
            _LOG.warning("%s", error)
        self._budget.unlinked(size_bytes)
        self._grant()

    def _grant(self) -> None:
        while self._promised and self._budget.grant(self._promised[0].size_bytes):
            self._promised.popleft().granted.set_result(None)
        self._count()

    # --- reading ------------------------------------------------------------------------------

    async def read_extent(self, digest: str, extent: int, target: memoryview) -> int:
        """Read and verify one extent into a slot; returns its length. The caller holds a lease.

        Raises:
            IntegrityError: the shard is not here (any more), or its bytes are wrong, or the disk
                would not read them; it was set aside, and a fill brings it back.
        """
        if digest not in self._shards:
            raise IntegrityError(f"the shard {digest} left the store; it is fetched again")
        opened = await self._opened_shard(digest)
        opened.reads += 1
        try:
            descriptor = await asyncio.shield(opened.descriptor)
            reading = self._submit(self._read_verified, descriptor, opened.record, extent, target)
            length = await finished(reading)
        except (IntegrityError, StorageError) as error:
            self._quarantine(digest, error)
            raise IntegrityError(str(error)) from None
        finally:
            opened.reads -= 1
            if digest not in self._leases:
                self._close_idle(digest)
        self._metrics.add("nvme_read_bytes_total", length)
        return length

    async def _opened_shard(self, digest: str) -> _Open:
        opened = self._open.get(digest)
        if opened is None:
            assert self._index is not None
            assert self._directory is not None
            value = self._index.get(digest)
            if value is None:
                self._quarantine(digest, "it has no index record")
                raise IntegrityError(f"the shard {digest} has no index record; it is fetched again")
            record = layout.unpack_record(value, with_index=False)
            path = self._directory.shard_path(digest)
            opened = _Open(self._submit(self._files.open, path), record)
            self._open[digest] = opened
        return opened

    def _read_verified(
        self, descriptor: int, record: Record, extent: int, target: memoryview
    ) -> int:
        """In a disk thread."""
        begin = extent * record.extent_bytes
        length = min(record.extent_bytes, record.size_bytes - begin)
        padded = target[: round_up(length, BLOCK_BYTES)]
        offset = layout.extent_offset(extent, record.extent_bytes)
        found = self._files.read(descriptor, padded, offset)
        if found != len(padded) or checksum.crc64(target[:length]) != record.extent_crcs[extent]:
            raise IntegrityError(
                f"extent {extent} of a stored shard is wrong on disk ({found} of {len(padded)} "
                "bytes read): it is never served; the shard is fetched again"
            )
        return length

    def _quarantine(self, digest: str, why: object) -> None:
        self._metrics.add("quarantined_total")
        _LOG.error("shard %s is set aside: %s", digest, why)
        if isinstance(why, StorageError):
            self._failed()
        if digest in self._shards:
            self._evict(digest)

    def _close_idle(self, digest: str) -> None:
        opened = self._open.get(digest)
        if opened is None or opened.reads:
            return
        if digest in self._leases and digest in self._shards:
            return
        del self._open[digest]

        def close(done: asyncio.Future[int]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._files.close(done.result())

        opened.descriptor.add_done_callback(close)

    # --- threads and counts -------------------------------------------------------------------

    def _submit(self, function: Callable[..., _Result], *args: object) -> asyncio.Future[_Result]:
        """Run in a disk thread; errors of the disk are counted and noted."""
        future = asyncio.get_running_loop().run_in_executor(self._disk, function, *args)
        future.add_done_callback(self._note)
        return future

    def _note(self, future: asyncio.Future[_Result]) -> None:
        if not future.cancelled() and isinstance(future.exception(), StorageError):
            self._failed()

    async def _tracked(
        self, reservation: Reservation, function: Callable[..., None], *args: object
    ) -> None:
        """As `_submit`, known to `abort`: the thread is done with the memory when it is over."""
        future = self._submit(function, *args)
        reservation.writes.add(future)
        future.add_done_callback(reservation.writes.discard)
        await finished(future)

    async def _call(
        self, executor: ThreadPoolExecutor, function: Callable[..., _Result], *args: object
    ) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)

    def _failed(self) -> None:
        self._metrics.add("store_errors_total")
        self._health.failed(self._clock.monotonic_s())
        self._count()

    def _count(self) -> None:
        self._metrics.set("store_resident_bytes", self._budget.resident_bytes)
        self._metrics.set("store_resident_shards", len(self._shards))
        self._metrics.set("store_reserved_bytes", self._budget.reserved_bytes)
        self._metrics.set("store_degraded", float(self._health.state != "healthy"))

    async def close(self) -> None:
        """Wait for the disk, close everything, let the directory go."""
        while self._unlinking:
            await asyncio.wait(set(self._unlinking))
        for digest in list(self._open):
            self._leases.pop(digest, None)
            self._close_idle(digest)
        # Callbacks that close descriptors run before the threads are joined.
        await asyncio.sleep(0)
        self._disk.shutdown()
        self._indexer.shutdown()
        if self._index is not None:
            self._index.close()
        if self._directory is not None:
            self._directory.close()
