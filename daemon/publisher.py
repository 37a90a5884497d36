"""The publisher: walks one session's plan and publishes its shards' extents and samples, in order.

It stays within the session's ring (`gpufeed.cachefs.ring`): a place is taken before an extent is
sought and comes free with the client's release. What is there is published many extents to a
message. Where all that the session waits for is room, the release that makes it publishes what is
in the arena, in the same call: no task is switched to (`_advance`).

Ahead of the cursor it lets the cache fill the next shards of the plan into the store, so that
demand finds them there; but only while the session itself is not waiting for the origin, and only
`PREFETCH_FILLS_MAX` at a time: a burst of downloads would take the CPU from the decoders, and the
bandwidth from demand.

Invariants:
    - a sample is announced after the last extent that holds a byte of it;
    - a sample that cannot fit the window is an error with both numbers, never a silent wait.

Two tasks a session (`run` and `prefetch`), on the daemon's loop. `send` never blocks; `drained`
waits for the socket.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Iterable, Sequence
from typing import Protocol, TypeVar

from gpufeed.cachefs import wire
from gpufeed.cachefs.cache import ShardCache, ShardReader, ShardSource
from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.demand import DemandRate
from gpufeed.cachefs.errors import CapacityError, GpufeedError, ProtocolError
from gpufeed.cachefs.plan import PlanBook
from gpufeed.cachefs.ring import Lease, Ring
from gpufeed.cachefs.units import MIB, format_bytes
from gpufeed.cachefs.wire import ExtentEvent, Kind, SamplesEvent
from gpufeed.daemon.seeker import Seeker

# How far ahead of the cursor shards are filled: whichever comes first.
PREFETCH_SHARDS_MAX = 64
PREFETCH_BYTES_MAX = 1024 * MIB
PREFETCH_FILLS_MAX = 3
PLAN_POSITIONS_MAX = 1 << 24


_Result = TypeVar("_Result")


class Outlet(Protocol):
    """Where messages go."""

    def send(self, data: bytes) -> None:
        """Queue one message."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether the queue is short."""
        ...

    async def drained(self) -> None:
        """Wait until the queue is short."""
        ...


class Publisher:
    """One session's plan and ring."""

    def __init__(
        self,
        session: int,
        cache: ShardCache,
        book: PlanBook,
        outlet: Outlet,
        *,
        window_extents: int,
        clock: Clock,
    ) -> None:
        self._session = session
        self._cache = cache
        self._pool = cache.tools.pool
        self._metrics = cache.tools.metrics
        self._book = book
        self._outlet = outlet
        self._clock = clock
        self._ring = Ring(window_extents)
        self._room_came = asyncio.Event()
        # The shard whose publishing waits for nothing but room in the ring.
        self._waiting: _Shard | None = None
        self._lenders_waiting = 0
        self._plan: collections.deque[tuple[int, ShardSource]] = collections.deque()
        self._plan_grew = asyncio.Event()
        # Set while everything that demand wants is sought: prefetch may go on.
        self._calm = False
        self._prefetch_turn = asyncio.Event()
        # Of the plan's positions ever: published whole; asked to be fetched ahead.
        self._ended_count = 0
        self._asked_count = 0
        self._prefetching: set[asyncio.Task[None]] = set()
        self._demand = DemandRate()

    # --- extents outside of the plan ----------------------------------------------------------

    async def take_credit(self) -> None:
        """See `Lender`."""
        self._lenders_waiting += 1
        try:
            while not self._ring.take():
                await self._wait_room()
        finally:
            self._lenders_waiting -= 1

    def return_credit(self) -> None:
        """See `Lender`."""
        self._ring.untake()
        self._room_came.set()

    def lend(self, slot: int, digest: str) -> int:
        """See `Lender`."""
        self._demand.published(self._clock.monotonic_s())
        return self._ring.publish(slot, digest)

    # --- from the client ----------------------------------------------------------------------

    def extend(self, first_position: int, sources: Sequence[ShardSource]) -> None:
        """Append to the plan.

        Raises:
            ProtocolError: the plan would exceed `PLAN_POSITIONS_MAX`.
        """
        if len(self._plan) + len(sources) > PLAN_POSITIONS_MAX:
            raise ProtocolError(f"a plan of more than {PLAN_POSITIONS_MAX} positions")
        self._book.extend(self._session, (source.spec.digest for source in sources))
        self._plan.extend(enumerate(sources, first_position))
        self._plan_grew.set()
        self._prefetch_turn.set()

    def release(self, seqs: Sequence[int]) -> None:
        """The client gives extents back.

        Raises:
            ProtocolError: it never had one of them.
        """
        leases = self._ring.release(seqs)
        shard = self._waiting
        if shard is not None and not self._lenders_waiting and self._outlet.has_room:
            # Before the accounts: the client waits for this.
            self._try_advance(shard)
        self._give_back(leases)
        self._demand.released(len(leases), self._clock.monotonic_s())
        if self._ring.free_count or shard is None or self._is_due(shard):
            self._room_came.set()

    @property
    def held_count(self) -> int:
        """Extents that the client may look at."""
        return self._ring.held_count

    def _give_back(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._pool.drop(lease.slot)

    def close(self) -> None:
        """Take every extent back. The tasks have ended."""
        self._give_back(self._ring.end())

    # --- the task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Publish the plan as it grows, until cancelled or until a shard fails."""
        while True:
            while not self._plan:
                self._plan_grew.clear()
                await self._plan_grew.wait()
            position, source = self._plan[0]
            # Before the shard is looked for: this use of it does not count for keeping it.
            self._book.begin(self._session, source.spec.digest)
            try:
                await self._publish(position, source)
            except GpufeedError as error:
                value = {"position": position, **wire.pack_error(error)}
                self._outlet.send(wire.pack(Kind.FAIL, wire.pack_json(value)))
                return
            self._plan.popleft()
            self._ended_count += 1
            self._book.advance(self._session)

    async def prefetch(self) -> None:
        """Fill the next shards of the plan while demand is content, until cancelled."""
        while True:
            self._prefetch_turn.clear()
            if self._calm:
                self._prefetch_more()
            await self._prefetch_turn.wait()

    def _prefetch_more(self) -> None:
        ahead_bytes = 0
        for i in range(1, min(len(self._plan), PREFETCH_SHARDS_MAX + 1)):
            source = self._plan[i][1]
            ahead_bytes += source.spec.size_bytes
            if ahead_bytes > PREFETCH_BYTES_MAX or len(self._prefetching) >= PREFETCH_FILLS_MAX:
                return
            if self._ended_count + i < self._asked_count:
                # It is there or on its way, or was refused: once is enough for a decision.
                continue
            self._asked_count = self._ended_count + i + 1
            task = self._cache.prefetch(source)
            if task is not None:
                self._prefetching.add(task)
                task.add_done_callback(self._prefetched)

    def _prefetched(self, task: asyncio.Task[None]) -> None:
        self._prefetching.discard(task)
        self._prefetch_turn.set()

    def _set_calm(self, calm: bool) -> None:
        self._calm = calm
        if calm:
            self._prefetch_turn.set()

    async def _publish(self, position: int, source: ShardSource) -> None:
        await self._timed(self._cache.permit(source))
        reader = self._cache.open(source)
        # Of a compressed shard that was never read, as many as there are at its origin.
        self._tell_rate(-(-source.spec.size_bytes // self._cache.tools.extent_bytes))
        shard = _Shard(position, source, reader)
        try:
            self._set_calm(reader.is_stored)
            while not shard.is_whole or shard.error is not None:
                if not await self._publish_some(shard):
                    break
                await self._outlet.drained()
            await reader.finish()
            self._announce(shard, [], shard.extents_sent + 1)
            value = {
                "position": position,
                "sample_count": shard.samples_sent,
                "bytes_by_tier": dict(shard.bytes_by_tier),
            }
            self._outlet.send(wire.pack(Kind.SHARD_END, wire.pack_json(value)))
        finally:
            unused = await shard.seeker.close()
            for slot in unused:
                self._pool.drop(slot)
            self._ring.untake(shard.seeker.pending_at_close)
            reader.close()

    async def _publish_some(self, shard: _Shard) -> bool:
        """Publish what is there, or wait for the next extent; False past the shard's end."""
        if shard.error is not None:
            raise shard.error
        if self._advance(shard):
            return True
        if not shard.seeker.has_pending:
            self._check_window(shard)
            self._waiting = shard
            try:
                await self._wait_room()
            finally:
                self._waiting = None
            return True
        return await self._timed(shard.seeker.wait())

    def _try_advance(self, shard: _Shard) -> None:
        """Outside of the task, which tells the client of what goes wrong: the shard is to blame."""
        try:
            if shard.error is None:
                self._advance(shard)
        except GpufeedError as error:
            shard.error = error

    def _advance(self, shard: _Shard) -> bool:
        """Seek as far as there is room, and publish what is there; whether anything was."""
        seeker = shard.seeker
        while seeker.wants_more and self._ring.take():
            seeker.seek_next()
        if seeker.has_sought_all:
            self._set_calm(True)
        found = seeker.take_found(wire.EXTENTS_PER_MESSAGE_MAX)
        if found:
            events = [self._published(shard, slot, tier) for slot, tier in found]
            self._announce(shard, events, shard.extents_sent)
        return bool(found)

    def _is_due(self, shard: _Shard) -> bool:
        """Whether the task that waits for room has something else to do."""
        is_over = shard.is_whole or shard.error is not None
        return is_over or shard.seeker.has_pending or self._is_too_long(shard)

    def _published(self, shard: _Shard, slot: int, tier: str) -> ExtentEvent:
        """The next extent of the shard is in this slot, in a place that was taken for it."""
        extent = shard.extents_sent
        length_bytes = shard.reader.length(extent)
        seq = self.lend(slot, shard.source.spec.digest)
        shard.extents_sent += 1
        shard.bytes_by_tier[tier] += length_bytes
        return ExtentEvent(seq, shard.position, extent, slot, length_bytes)

    def _announce(self, shard: _Shard, events: list[ExtentEvent], extents_done: int) -> None:
        """Send extents, and the samples that end in the first `extents_done` of the shard."""
        if events:
            self._outlet.send(wire.pack(Kind.EXTENTS, wire.pack_extents(events)))
            self._metrics.add("published_bytes_total", sum(e.length_bytes for e in events))
        for index in shard.reader.samples(shard.samples_sent, extents_done):
            whole = SamplesEvent(shard.position, shard.samples_sent, index)
            for event in wire.split_samples(whole):
                self._outlet.send(wire.pack(Kind.SAMPLES, wire.pack_samples(event)))
            shard.samples_sent += len(index)
            shard.last_end_bytes = int(index.ends()[-1])

    async def _timed(self, found: Awaitable[_Result]) -> _Result:
        begin_s = self._clock.monotonic_s()
        self._demand.seeking(True, begin_s)
        try:
            return await found
        finally:
            end_s = self._clock.monotonic_s()
            self._demand.seeking(False, end_s)
            self._metrics.add("stall_seconds_total", end_s - begin_s)

    def _tell_rate(self, extent_count: int) -> None:
        extents_per_s = self._demand.extents_per_s
        if extents_per_s is not None:
            self._book.measured(self._session, extents_per_s / max(1, extent_count))

    # --- room ---------------------------------------------------------------------------------

    async def _wait_room(self) -> None:
        """Wait for a release that leaves room, or that published what had to wait."""
        if self._ring.free_count == 0:
            self._set_calm(True)
            self._room_came.clear()
            await self._room_came.wait()

    def _is_too_long(self, shard: _Shard) -> bool:
        """Whether the client cannot give anything back, having no sample that is whole."""
        unfinished = shard.extents_sent - shard.last_end_bytes // self._cache.tools.extent_bytes
        return self._ring.free_count == 0 and unfinished >= self._ring.window

    def _check_window(self, shard: _Shard) -> None:
        if self._is_too_long(shard):
            shard.reader.raise_if_failed()
            window_bytes = self._ring.window * self._cache.tools.extent_bytes
            raise CapacityError(
                f"a sample of {shard.source.spec.name} that begins near byte "
                f"{shard.last_end_bytes} is longer than the session's window of "
                f"{format_bytes(window_bytes)}: raise arena.size_bytes, or ask for a larger "
                "window_bytes"
            )


class _Shard:
    """The shard at one position of the plan, and how far it has been published."""

    __slots__ = (
        "bytes_by_tier",
        "error",
        "extents_sent",
        "last_end_bytes",
        "position",
        "reader",
        "samples_sent",
        "seeker",
        "source",
    )

    def __init__(self, position: int, source: ShardSource, reader: ShardReader) -> None:
        self.position = position
        self.source = source
        self.reader = reader
        self.seeker = Seeker(reader)
        # What publishing met outside of the task.
        self.error: GpufeedError | None = None
        self.extents_sent = 0
        self.samples_sent = 0
        self.last_end_bytes = 0
        self.bytes_by_tier: collections.Counter[str] = collections.Counter()

    @property
    def is_whole(self) -> bool:
        """Whether every extent has been published."""
        return self.extents_sent == self.reader.extent_count
