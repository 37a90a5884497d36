"""Reservations on their way in: extents are written, then the shard is committed or aborted.

No other path makes bytes visible, and an abort leaves nothing. Both, once begun, are the store's
own tasks and run to their end whoever is cancelled. A second reservation of a shard waits while the
first commits, and ends as its equal. When the disk fails, writes that it has not begun are turned
away: their slots are somebody's who waits.

What a reservation may do is decided elsewhere (policy, budget, health); what the disk does is the
`writer`'s. Used on the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gpufeed.cachefs import layout
from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.errors import StorageError, UsageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.sampleindex import SampleIndex
from gpufeed.cachefs.store.accounts import Accounts
from gpufeed.cachefs.store.catalog import StoredShard
from gpufeed.cachefs.store.heads import Head
from gpufeed.cachefs.store.health import DiskHealth
from gpufeed.cachefs.store.parts import DiskParts
from gpufeed.cachefs.store.reservation import Reservation
from gpufeed.cachefs.store.writer import Description, Ending, NoRoomError, Sums, padded
from gpufeed.cachefs.tasks import finished, until_done

_LOG = logging.getLogger("gpufeed.store")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEvents:
    """What the store is asked and told."""

    lookup: Callable[[str], StoredShard | None]
    on_committed: Callable[[Reservation, Head], StoredShard]
    on_aborted: Callable[[Reservation], None]
    on_failed: Callable[[object], None]
    next_use: Callable[[], int]


class Intake:
    """See the top of the file."""

    def __init__(
        self, disk: DiskParts, accounts: Accounts, health: DiskHealth, events: StoreEvents, *,
        extent_bytes: int, metrics: Metrics, clock: Clock,
    ) -> None:  # fmt: skip
        self._disk = disk
        self._accounts = accounts
        self._health = health
        self._events = events
        self._extent_bytes = extent_bytes
        self._metrics = metrics
        self._clock = clock
        self._committing: dict[str, asyncio.Future[None]] = {}
        self._writes_count = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure = asyncio.Event()  # of the disk; a new one after each
        self.reserved: set[Reservation] = set()

    def is_committing(self, digest: str) -> bool:
        """Whether a reservation of this shard is being committed."""
        return digest in self._committing

    @property
    def writes_at_once(self) -> bool:
        """Whether a write would begin at once, and not wait for others."""
        return self._writes_count < self._disk.threads.count

    def admit(self, reservation: Reservation) -> None:
        """A new reservation: take its bytes, or let it wait for them."""
        self.reserved.add(reservation)
        _LOG.debug("reserved %s for %s", reservation.spec.digest, reservation.spec.name)
        self._disk.room.reserved(reservation.size_bytes)
        if not self._accounts.reserve(reservation):
            self._disk.unlinker.retry()

    async def write(
        self, reservation: Reservation, extent: int, data: memoryview, length_bytes: int,
        on_sum: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        """See `ShardStore.write_extent`."""
        blocks = padded(data, length_bytes)
        offset = layout.extent_offset(extent, self._extent_bytes)
        if self._health.state == "degraded":
            raise _turned_away(reservation)
        sums = None if on_sum is None else Sums(length_bytes, on_sum)
        self._writes_count += 1
        try:
            await self._write(reservation, offset, blocks, sums)
        except StorageError as error:
            if reservation.granted.exception() is None:
                # Or else the room never came, and why was noted where it was found out.
                self._events.on_failed(error)
            raise
        finally:
            self._writes_count -= 1
        reservation.written.add(extent)
        self._metrics.add("nvme_written_bytes_total", len(blocks))

    async def _write(
        self, reservation: Reservation, offset: int, blocks: memoryview, sums: Sums | None
    ) -> None:
        pace, writer = self._disk.pace, self._disk.writer
        # To watch over what need not be waited for would cost the loop more than the write does.
        if pace.cap.is_set:
            await self._while_well(pace.take_turn(len(blocks)), reservation, pace.end_turn)
        else:
            await pace.take_turn(len(blocks))
        try:
            if reservation.opening is None or not reservation.opening.done():
                await self._while_well(writer.opened(reservation), reservation)
            await writer.write(reservation, offset, blocks, sums)
        finally:
            pace.end_turn()

    async def _while_well(
        self, waiting: Coroutine[Any, Any, object], reservation: Reservation,
        undo: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Wait, but not for a disk that has failed meanwhile; `undo` what came too late.

        Raises:
            StorageError: it failed.
        """
        failure = asyncio.ensure_future(self._failure.wait())
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait([task, failure], return_when=asyncio.FIRST_COMPLETED)
        finally:
            failure.cancel()
            is_late = not task.done()
            task.cancel()
            await until_done(task)
        if is_late:
            if not task.cancelled() and task.exception() is None:
                undo()
            raise _turned_away(reservation)
        task.result()

    def turn_away(self) -> None:
        """The disk failed: writes that it has not begun end now."""
        failure, self._failure = self._failure, asyncio.Event()
        failure.set()
        self._disk.pace.turn_away(
            StorageError("the cache disk failed while a shard was on its way in; it streams on")
        )

    async def commit(
        self, reservation: Reservation, extent_crcs: Sequence[int], sample_index: bytes | None
    ) -> StoredShard:
        """See `ShardStore.commit`."""
        spec = reservation.spec
        count = spec.extent_count(self._extent_bytes)
        if reservation.state != "open":
            raise UsageError(f"a reservation for {spec.name} that is {reservation.state} already")
        if len(reservation.written) != count or len(extent_crcs) != count:
            raise UsageError(
                f"{spec.name} has {count} extents; {len(reservation.written)} were written and "
                f"{len(extent_crcs)} checksums given"
            )
        description = Description(
            self._extent_bytes, tuple(extent_crcs), sample_index,
            None if sample_index is None else len(SampleIndex.decode(sample_index)),
            self._events.next_use(),
        )  # fmt: skip
        while (other := self._committing.get(spec.digest)) is not None:
            await asyncio.wait([other])
        first = self._events.lookup(spec.digest)
        if first is not None:
            # Another reservation of the same shard came first.
            await self.abort(reservation)
            return first
        reservation.state = "committing"
        _LOG.debug("committing %s", spec.digest)
        over = asyncio.get_running_loop().create_future()
        self._committing[spec.digest] = over
        try:
            return await self._own(self._commit(reservation, description))
        finally:
            del self._committing[spec.digest]
            over.set_result(None)

    async def _commit(self, reservation: Reservation, description: Description) -> StoredShard:
        writer = self._disk.writer
        try:
            # Everything below writes within the room that this grants.
            await writer.opened(reservation)
            ending = await writer.ending(reservation, description, self._accounts.resize)
            await writer.finish(reservation, ending)
        except StorageError as error:
            if not isinstance(error, NoRoomError):
                self._events.on_failed(error)
            await self._abort(reservation)
            raise
        await writer.close(reservation)
        stored = self._enter(reservation, ending)
        self._accounts.grant()
        self._disk.measure()
        return stored

    def _enter(self, reservation: Reservation, ending: Ending) -> StoredShard:
        """The file is durable under its name, and indexed: show it."""
        reservation.state = "committed"
        self.reserved.remove(reservation)
        self._accounts.budget.commit(reservation.size_bytes)
        if reservation.is_probe:
            self._health.probe_succeeded()
        self._metrics.add("nvme_written_bytes_total", len(ending.header) + len(ending.trailer))
        stored = self._events.on_committed(reservation, ending.head)
        _LOG.debug("committed %s", stored.digest)
        return stored

    async def abort(self, reservation: Reservation) -> None:
        """See `ShardStore.abort`."""
        if reservation.state == "open":
            await self._own(self._abort(reservation))

    async def _abort(self, reservation: Reservation) -> None:
        disk, budget = self._disk, self._accounts.budget
        reservation.state = "aborted"
        if not reservation.granted.done():
            aborted = StorageError(f"{reservation.spec.name}: aborted")
            self._accounts.break_promise(reservation, aborted)
        held = reservation.granted.exception() is None
        attempted = reservation.opening is not None
        made = await disk.writer.close(reservation)
        if not made:
            disk.room.settled(reservation.size_bytes, made=False)
        if held and attempted:
            budget.discard(reservation.size_bytes)
            # What the disk refuses to remove stays counted, and is tried again.
            await asyncio.wait([disk.writer.clean_up(reservation)])
        elif held:
            budget.abort(reservation.size_bytes)
        if reservation.is_probe:
            self._health.probe_ended(self._clock.monotonic_s())
        self.reserved.remove(reservation)
        self._events.on_aborted(reservation)
        _LOG.debug("aborted %s", reservation.spec.digest)
        self._accounts.grant()

    async def _own(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run `work` to the end as the store's own task, out of reach of a cancellation."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await finished(task)

    async def close(self) -> None:
        """Abort what is reserved; wait for everything under way."""
        for reservation in list(self.reserved):
            await self.abort(reservation)
        while self._tasks:
            await asyncio.wait(set(self._tasks))


def _turned_away(reservation: Reservation) -> StorageError:
    return StorageError(
        f"the cache disk failed while {reservation.spec.name} was on its way in; it streams past "
        "the cache"
    )
