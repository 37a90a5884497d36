"""From a reservation to a committed file: create, write extents, finish; or clean up.

Knows files, not accounts: budget, policy and health are the store's. Used on the loop's thread;
disk work runs in the disk threads, and what writes from a caller's memory is waited for to the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gpufeed.cachefs import checksum, layout
from gpufeed.cachefs.errors import DiskLateError, StorageError
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.store.directory import CacheDirectory
from gpufeed.cachefs.store.files import AlignedBuffer, Files
from gpufeed.cachefs.store.heads import Head
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.store.reservation import DiskRoom, Reservation
from gpufeed.cachefs.store.threads import DiskThreads
from gpufeed.cachefs.store.unlinker import Unlinker
from gpufeed.cachefs.tasks import finished
from gpufeed.cachefs.units import BLOCK_BYTES, format_bytes, round_up

# A write of one extent, or a new file, that takes longer than this, not counting its queue, is a
# sick disk's: what was received for it holds slots meanwhile, and readers wait for those.
WRITE_LATE_S = 1.0
# So is a sync with its rename; that waits for what else the disk has queued.
SYNC_LATE_S = 5.0

_Result = TypeVar("_Result")
Write = Callable[[int, memoryview, int], None]


class NoRoomError(StorageError):
    """The store is full, but the disk is well."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a file is to say of its bytes. `sample_index` is encoded, not packed."""

    extent_bytes: int
    extent_crcs: tuple[int, ...]
    sample_index: bytes | None
    sample_count: int | None
    last_use: int

    def pack(self, spec: ShardSpec) -> Ending:
        """The end of the file. Megabytes are compressed here: not on the loop."""
        packed = None if self.sample_index is None else layout.pack_samples(self.sample_index)
        trailer = layout.pack_trailer(spec, self.extent_crcs, packed)
        header = layout.pack_header(spec, self.extent_bytes, trailer, self.sample_count)
        head = Head(
            self.extent_bytes, spec.size_bytes,
            layout.trailer_offset(spec.size_bytes) + len(trailer), self.sample_count,
            self.last_use,
        )  # fmt: skip
        return Ending(head, header, trailer)


@dataclass(frozen=True, slots=True)
class Ending:
    """What completes a file."""

    head: Head
    header: bytes
    trailer: bytes


class Sums:
    """Takes the checksum of the first `length_bytes` of what is about to be written.

    `on_sum` is called with it on the loop, before the write is over: readers need not wait for a
    disk.
    """

    __slots__ = ("_length_bytes", "_loop", "_on_sum")

    def __init__(self, length_bytes: int, on_sum: Callable[[int], None]) -> None:
        self._length_bytes = length_bytes
        self._on_sum = on_sum
        self._loop = asyncio.get_running_loop()

    def before(self, write: Write) -> Write:
        """`write`, with that done first. Both run in a disk thread."""

        def sum_and_write(descriptor: int, data: memoryview, offset: int) -> None:
            crc = checksum.crc64(data[: self._length_bytes])
            self._loop.call_soon_threadsafe(self._on_sum, crc)
            write(descriptor, data, offset)

        return sum_and_write


class ShardWriter:
    """See the top of the file."""

    def __init__(
        self, directory: CacheDirectory, files: Files, index: Index, threads: DiskThreads,
        unlinker: Unlinker, *, room: DiskRoom, on_late: Callable[[DiskLateError], None],
    ) -> None:  # fmt: skip
        self._directory = directory
        self._files = files
        self._index = index
        self._threads = threads
        self._unlinker = unlinker
        self._room = room
        self._on_late = on_late
        # Commits queue for the index and for syncs; half of the threads stay for reads and writes.
        self._publishing = asyncio.Semaphore(max(1, threads.count // 2))

    async def write(
        self, reservation: Reservation, offset: int, data: memoryview, sums: Sums | None = None
    ) -> None:
        """Write whole blocks. `sums` is told the checksum first, in the same trip to a thread.

        Raises:
            DiskLateError: the disk still reads `data`; `close` waits for it.
            StorageError: the disk refused.
        """
        descriptor = await self.opened(reservation)
        function = self._files.write if sums is None else sums.before(self._files.write)
        writing = self._threads.submit(function, descriptor, data, offset)
        reservation.writes.add(writing)
        writing.add_done_callback(reservation.writes.discard)
        await self._threads.in_time(writing, WRITE_LATE_S)

    async def opened(self, reservation: Reservation) -> int:
        """The descriptor of the reservation's file, which the first call makes.

        Raises:
            StorageError: the disk refused, or the room will never be there.
        """
        if reservation.opening is None:
            reservation.opening = asyncio.ensure_future(self._create(reservation))
            reservation.opening.add_done_callback(_seen)
        opening = reservation.opening
        return opening.result() if opening.done() else await asyncio.shield(opening)

    async def _create(self, reservation: Reservation) -> int:
        spec = reservation.spec
        await asyncio.shield(reservation.granted)
        path = self._directory.temporary_path(spec.digest, reservation.number)
        # What turns out longer or shorter than guessed grows as it is written.
        size_bytes = layout.trailer_offset(spec.size_bytes if spec.is_sized else 0)
        descriptor = await self._watched(WRITE_LATE_S, self._make, path, size_bytes)
        self._room.settled(reservation.size_bytes, made=True)
        return descriptor

    def _make(self, path: str, size_bytes: int) -> int:
        """In a disk thread."""
        self._directory.verify()
        return self._files.create(path, size_bytes)

    async def _watched(
        self, late_s: float, function: Callable[..., _Result], *args: object
    ) -> _Result:
        """Run `function` to its end, and say so at once if it is late."""
        try:
            return await self._threads.run_in_time(late_s, function, *args)
        except DiskLateError as late:
            self._on_late(late)
            if late.over.cancelled():
                raise
            return await finished(late.over)

    async def ending(
        self, reservation: Reservation, description: Description,
        resize: Callable[[Reservation, int], bool],
    ) -> Ending:  # fmt: skip
        """Pack the end of the file. A shard is kept with its sample index, or not at all.

        `resize` fits the reservation to so many bytes, or says that it cannot.

        Raises:
            NoRoomError: it cannot.
        """
        spec = reservation.spec
        ending = await self._threads.run(description.pack, spec)
        if resize(reservation, ending.head.file_bytes):
            return ending
        raise NoRoomError(
            f"the cache has no room for the description of {spec.name} beside its "
            f"{format_bytes(spec.size_bytes)}; it is not kept: raise store.capacity"
        )

    async def finish(self, reservation: Reservation, ending: Ending) -> None:
        """Complete, sync, rename and index the file.

        Raises:
            StorageError: the disk or the index refused; `clean_up` leaves nothing.
        """
        descriptor = await self.opened(reservation)
        # The same shard may have been set aside just now; its removal must not hit the new file.
        await self._unlinker.gone(reservation.spec.digest)
        reservation.has_published = True
        await self._watched(WRITE_LATE_S, self._complete, descriptor, ending)
        async with self._publishing:
            await self._watched(SYNC_LATE_S, self._publish, reservation, descriptor, ending)

    def _complete(self, descriptor: int, ending: Ending) -> None:
        """In a disk thread."""
        trailer_at = ending.head.file_bytes - len(ending.trailer)
        for data, offset in ((ending.trailer, trailer_at), (ending.header, 0)):
            buffer = AlignedBuffer(data)
            try:
                self._files.write(descriptor, buffer.view, offset)
            finally:
                buffer.close()

    def _publish(self, reservation: Reservation, descriptor: int, ending: Ending) -> None:
        """In a disk thread."""
        digest = reservation.spec.digest
        self._files.sync(descriptor)
        self._directory.verify()
        self._files.publish(
            self._directory.temporary_path(digest, reservation.number),
            self._directory.shard_path(digest),
        )
        self._index.put([(digest, ending.head)])

    async def close(self, reservation: Reservation) -> bool:
        """Wait for all writes and close the file; whether there was one."""
        while reservation.writes:
            await asyncio.wait(set(reservation.writes))
        opening, reservation.opening = reservation.opening, None
        if opening is None:
            return False
        await asyncio.wait([opening])
        if opening.cancelled() or opening.exception() is not None:
            return False
        await self._threads.run(self._files.close, opening.result())
        return True

    def clean_up(self, reservation: Reservation) -> asyncio.Future[None]:
        """Queue the removal of whatever the reservation left, under either name, and its record."""
        digest = reservation.spec.digest
        paths = [self._directory.temporary_path(digest, reservation.number)]
        if reservation.has_published:
            paths.append(self._directory.shard_path(digest))
        return self._unlinker.remove(
            digest, tuple(paths), reservation.size_bytes, indexed=reservation.has_published
        )


def padded(data: memoryview, length_bytes: int) -> memoryview:
    """The whole blocks of `data` that hold its first `length_bytes`."""
    end = round_up(length_bytes, BLOCK_BYTES)
    assert end <= len(data), f"a slot of {len(data)} bytes cannot be padded to {end}"
    return data[:end]


def _seen(future: asyncio.Future[int]) -> None:
    """Everybody who waited may be gone: the outcome was looked at."""
    _ = future.cancelled() or future.exception()
