"""The publisher: walks one session's plan and publishes its shards' extents and samples, in order.

It stays within the session's window: a credit is taken before an extent is sought and comes back
with the client's release. Ahead of the cursor it lets the cache fill the next shards of the plan
into the store, so that demand finds them there; but only while the session itself is not waiting
for the origin, and only `PREFETCH_FILLS_MAX` at a time: a burst of downloads would take the CPU
from the decoders, and the bandwidth from demand.

Invariants:
    - sequence numbers only grow; each published extent is held until released or the session ends;
    - a sample is announced after the last extent that holds a byte of it;
    - a sample that cannot fit the window is an error with both numbers, never a silent wait.

Two tasks a session (`run` and `prefetch`), on the daemon's loop. `send` never blocks; `drained`
waits for the socket.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Sequence
from typing import Protocol

from gpufeed.cachefs import wire
from gpufeed.cachefs.cache import ShardCache, ShardReader, ShardSource
from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.demand import DemandRate
from gpufeed.cachefs.errors import CapacityError, GpufeedError, ProtocolError
from gpufeed.cachefs.plan import PlanBook
from gpufeed.cachefs.units import MIB, format_bytes
from gpufeed.cachefs.wire import ExtentEvent, Kind, SamplesEvent
from gpufeed.daemon.seeker import Seeker

# How far ahead of the cursor shards are filled: whichever comes first.
PREFETCH_SHARDS_MAX = 64
PREFETCH_BYTES_MAX = 1024 * MIB
PREFETCH_FILLS_MAX = 3
PLAN_POSITIONS_MAX = 1 << 24


class Outlet(Protocol):
    """Where messages go."""

    def send(self, data: bytes) -> None:
        """Queue one message."""
        ...

    async def drained(self) -> None:
        """Wait until the queue is short."""
        ...


class Publisher:
    """One session's plan, credits and held extents."""

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
        self._window = window_extents
        self._credits = window_extents
        self._credit_came = asyncio.Event()
        self._plan: collections.deque[tuple[int, ShardSource]] = collections.deque()
        self._plan_grew = asyncio.Event()
        # Set while everything that demand wants is sought: prefetch may go on.
        self._calm = False
        self._prefetch_turn = asyncio.Event()
        # Of the plan's positions ever: published whole; asked to be fetched ahead.
        self._ended_count = 0
        self._asked_count = 0
        self._prefetching: set[asyncio.Task[None]] = set()
        self._held: dict[int, tuple[int, str]] = {}
        self._seq = 0
        self._demand = DemandRate()

    # --- extents outside of the plan ----------------------------------------------------------

    async def take_credit(self) -> None:
        """See `Lender`."""
        while not self._take_credit():
            await self._wait_credit()

    def return_credit(self) -> None:
        """See `Lender`."""
        self._credits += 1
        self._credit_came.set()

    def lend(self, slot: int, digest: str) -> int:
        """See `Lender`."""
        self._seq += 1
        self._held[self._seq] = (slot, digest)
        self._demand.published(self._clock.monotonic_s())
        return self._seq

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
        for seq in seqs:
            if seq not in self._held:
                raise ProtocolError(f"extent {seq} was released, but is not published")
            slot, digest = self._held.pop(seq)
            self._pool.drop(slot, wanted=self._book.pending(digest))
        self._demand.released(len(seqs), self._clock.monotonic_s())
        self._credits += len(seqs)
        self._credit_came.set()

    def close(self) -> None:
        """Take every extent back. The task has ended."""
        for slot, digest in self._held.values():
            self._pool.drop(slot, wanted=self._book.pending(digest))
        self._held.clear()

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
        reader = self._cache.open(source)
        seeker = Seeker(reader)
        # Of a compressed shard that was never read, as many as there are at its origin.
        self._tell_rate(-(-source.spec.size_bytes // self._cache.tools.extent_bytes))
        shard = _Progress(position)
        try:
            self._set_calm(reader.is_stored)
            while (extent := shard.extents_sent) != reader.extent_count:
                while seeker.wants_more(extent) and self._take_credit():
                    seeker.seek_next()
                if seeker.has_sought_all:
                    self._set_calm(True)
                while not seeker.has_pending:
                    self._check_window(shard, extent, source, reader)
                    await self._wait_credit()
                    if self._take_credit():
                        seeker.seek_next()
                found = await self._timed(seeker.next())
                if found is None:
                    break
                slot, tier = found
                self._publish_extent(shard, extent, reader.length(extent), slot, source)
                shard.extents_sent += 1
                shard.bytes_by_tier[tier] += reader.length(extent)
                self._publish_samples(shard, reader, extent + 1)
                await self._outlet.drained()
            await reader.finish()
            self._publish_samples(shard, reader, shard.extents_sent + 1)
            value = {
                "position": position,
                "sample_count": shard.samples_sent,
                "bytes_by_tier": dict(shard.bytes_by_tier),
            }
            self._outlet.send(wire.pack(Kind.SHARD_END, wire.pack_json(value)))
        finally:
            unused = await seeker.close()
            for slot in unused:
                self._pool.drop(slot, wanted=self._book.pending(source.spec.digest))
            self._credits += seeker.pending_at_close
            reader.close()

    def _publish_extent(
        self, shard: _Progress, extent: int, length: int, slot: int, source: ShardSource
    ) -> None:
        seq = self.lend(slot, source.spec.digest)
        event = ExtentEvent(seq, shard.position, extent, slot, length)
        self._outlet.send(wire.pack(Kind.EXTENTS, wire.pack_extents([event])))
        self._metrics.add("published_bytes_total", length)

    def _publish_samples(self, shard: _Progress, reader: ShardReader, extents_done: int) -> None:
        for index in reader.samples(shard.samples_sent, extents_done):
            whole = SamplesEvent(shard.position, shard.samples_sent, index)
            for event in wire.split_samples(whole):
                self._outlet.send(wire.pack(Kind.SAMPLES, wire.pack_samples(event)))
            shard.samples_sent += len(index)
            shard.last_end_bytes = int(index.ends()[-1])

    async def _timed(self, found: Awaitable[tuple[int, str] | None]) -> tuple[int, str] | None:
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

    # --- credits ------------------------------------------------------------------------------

    def _take_credit(self) -> bool:
        if self._credits <= 0:
            return False
        self._credits -= 1
        return True

    async def _wait_credit(self) -> None:
        while self._credits <= 0:
            self._set_calm(True)
            self._credit_came.clear()
            await self._credit_came.wait()

    def _check_window(
        self, shard: _Progress, extent: int, source: ShardSource, reader: ShardReader
    ) -> None:
        """Out of credit: make sure that the client is able to give some back."""
        extent_bytes = self._cache.tools.extent_bytes
        unfinished = extent - shard.last_end_bytes // extent_bytes
        if self._credits <= 0 and unfinished >= self._window:
            reader.raise_if_failed()
            raise CapacityError(
                f"a sample of {source.spec.name} that begins near byte {shard.last_end_bytes} is "
                f"longer than the session's window of {format_bytes(self._window * extent_bytes)}:"
                " raise arena.size_bytes, or ask for a larger window_bytes"
            )


class _Progress:
    """How far one shard has been published."""

    __slots__ = ("bytes_by_tier", "extents_sent", "last_end_bytes", "position", "samples_sent")

    def __init__(self, position: int) -> None:
        self.position = position
        self.extents_sent = 0
        self.samples_sent = 0
        self.last_end_bytes = 0
        self.bytes_by_tier: collections.Counter[str] = collections.Counter()
