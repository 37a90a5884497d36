"""Single extents into the arena: one load an extent at a time, whatever way it comes.

From the store, from the origin, or copied from another tenant's arena while its fill is under way.

Whoever asks for an extent that is being loaded the same way gets its slot, or its error. Ranges of
the origin that are asked for in one turn of the loop and lie side by side travel in one request, of
at most a part. A load whose last waiter has left is given up.

What a range brings is checked as each answer is (status, version, range, length); the object's
checksum cannot be, so it never enters the store. Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.errors import (
    DiskLateError,
    GpufeedError,
    IntegrityError,
    OriginUnavailableError,
    PastEndError,
    RetryableError,
    again,
)
from gpufeed.cachefs.fill import Fill
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.inflight import Urgency
from gpufeed.cachefs.placement import extent_length, works_of_extents, zero_ranges
from gpufeed.cachefs.sources import ShardSource
from gpufeed.cachefs.tasks import finished

_LOG = logging.getLogger("gpufeed.loads")


class LentElsewhereError(RetryableError):
    """The extent cannot be copied from another's fill any more. No client is told of it."""


class _Way(enum.Enum):
    STORE = "store"
    ORIGIN = "origin"
    LENT = "lent"


@dataclass(slots=True, eq=False)
class _Flight:
    """One extent under way."""

    extent: int
    way: _Way
    waiters: list[asyncio.Future[int]] = field(default_factory=list)
    companions: list[_Flight] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    is_given_up: bool = False

    @property
    def is_wanted(self) -> bool:
        return any(not waiter.done() for waiter in self.waiters)


class Loads:
    """See the top of the file."""

    def __init__(self, tools: FillTools) -> None:
        self._tools = tools
        self._flights: dict[tuple[str, int], _Flight] = {}
        self._unsent: dict[str, tuple[ShardSource, list[_Flight]]] = {}

    async def load(self, source: ShardSource, extent: int, *, from_store: bool) -> int:
        """The extent's slot, held for the caller.

        Raises:
            IntegrityError, StorageError: the store would not give it; see `ShardStore.read_extent`.
            GpufeedError: the origin would not.
        """
        if not from_store:
            return await self._load(source, _Flight(extent, _Way.ORIGIN), self._ask_origin)

        def launch(source: ShardSource, flight: _Flight) -> None:
            self._start([flight], self._from_store(source, flight), source.spec.digest)

        return await self._load(source, _Flight(extent, _Way.STORE), launch)

    async def load_lent(self, source: ShardSource, extent: int, fill: Fill, pool: SlotPool) -> int:
        """The slot of a copy of an extent that another's fill brings into `pool`, held.

        Raises:
            LentElsewhereError: it has gone from there, or will not come.
            PastEndError: the shard has no such extent.
            IntegrityError: its bytes are wrong.
        """

        def launch(source: ShardSource, flight: _Flight) -> None:
            copying = self._from_lender(source, flight, fill, pool)
            self._start([flight], copying, source.spec.digest)

        return await self._load(source, _Flight(extent, _Way.LENT), launch)

    async def _load(
        self, source: ShardSource, mine: _Flight, launch: Callable[[ShardSource, _Flight], None]
    ) -> int:
        digest, extent = source.spec.digest, mine.extent
        pool = self._tools.pool
        while True:
            slot = pool.find(digest, extent)
            if slot is not None:
                return slot
            flight = self._flights.get((digest, extent))
            if flight is None:
                flight = self._flights[(digest, extent)] = mine
                launch(source, flight)
            elif flight.is_given_up:
                assert flight.task is not None, "given up before it began"
                await asyncio.wait([flight.task])
                continue
            elif flight.way is not mine.way:
                # It comes another way: its error would not be ours, its bytes are.
                with contextlib.suppress(GpufeedError):
                    return await self._wait(flight)
                continue
            return await self._wait(flight)

    async def _wait(self, flight: _Flight) -> int:
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        flight.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._tools.pool.drop(waiter.result())
            elif flight.task is not None and not any(f.is_wanted for f in flight.companions):
                for companion in flight.companions:
                    companion.is_given_up = True
                flight.task.cancel()
            raise

    # --- sending ------------------------------------------------------------------------------

    def _ask_origin(self, source: ShardSource, flight: _Flight) -> None:
        digest = source.spec.digest
        if digest not in self._unsent:
            self._unsent[digest] = (source, [])
            asyncio.get_running_loop().call_soon(self._send, digest)
        self._unsent[digest][1].append(flight)

    def _send(self, digest: str) -> None:
        """What was asked for in this turn, neighbours together."""
        source, flights = self._unsent.pop(digest)
        for flight in flights:
            if not flight.is_wanted:
                del self._flights[(digest, flight.extent)]
        wanted = sorted((f for f in flights if f.is_wanted), key=lambda flight: flight.extent)
        length_max = max(1, self._tools.part_bytes // self._tools.extent_bytes)
        run: list[_Flight] = []
        for flight in wanted:
            if run and (flight.extent != run[-1].extent + 1 or len(run) == length_max):
                self._start(run, self._from_origin(source, run), digest)
                run = []
            run.append(flight)
        if run:
            self._start(run, self._from_origin(source, run), digest)

    def _start(self, flights: list[_Flight], work: Coroutine[Any, Any, None], digest: str) -> None:
        task = asyncio.get_running_loop().create_task(work)
        for flight in flights:
            flight.companions = flights
            flight.task = task

        def over(_: asyncio.Task[None]) -> None:
            error = _error_of(task)
            for flight in flights:
                del self._flights[(digest, flight.extent)]
                for waiter in flight.waiters:
                    if not waiter.done():
                        waiter.set_exception(again(error))

        task.add_done_callback(over)

    # --- the ways -----------------------------------------------------------------------------

    async def _from_store(self, source: ShardSource, flight: _Flight) -> None:
        digest = source.spec.digest
        pool = self._tools.pool
        slot = await self._allocate(digest, flight.extent)
        try:
            await self._tools.store.read_extent(digest, flight.extent, pool.view(slot))
            self._arrived(flight, slot)
        except DiskLateError as late:
            # The disk may still write into the slot: nobody gets it before that is over.
            pool.disown(digest, flight.extent)
            late.over.add_done_callback(lambda _: pool.drop(slot))
            raise
        except BaseException:
            pool.drop(slot)
            raise
        pool.drop(slot)

    async def _from_lender(
        self, source: ShardSource, flight: _Flight, fill: Fill, lender: SlotPool
    ) -> None:
        digest, extent, pool = source.spec.digest, flight.extent, self._tools.pool
        # Our own slot first: the lender's is held for no longer than it takes to copy it.
        slot = await self._allocate(digest, extent)
        try:
            theirs = await _lent(fill, lender, extent)
            try:
                # No more than the extent: what lies behind it is of other shards of the lender's.
                length = self._tools.extent_bytes
                if fill.spec.is_sized:
                    length = extent_length(fill.spec, extent, length)
                pool.view(slot)[:length] = lender.view(theirs)[:length]
            finally:
                lender.drop(theirs)
            self._tools.metrics.add("tenant_copied_bytes_total", length)
            self._arrived(flight, slot)
        finally:
            pool.drop(slot)

    async def _from_origin(self, source: ShardSource, flights: Sequence[_Flight]) -> None:
        tools, spec = self._tools, source.spec
        size_bytes = len(flights) * tools.extent_bytes
        await tools.in_flight.take(size_bytes, Urgency(demanded=True))
        slots: list[int] = []
        try:
            for flight in flights:  # what was allocated before an error is dropped
                slots.append(await self._allocate(spec.digest, flight.extent))  # noqa: PERF401
            await self._receive(source, flights, slots)
        finally:
            for slot in slots:
                tools.pool.drop(slot)
            tools.in_flight.give_back(size_bytes)

    async def _receive(
        self, source: ShardSource, flights: Sequence[_Flight], slots: Sequence[int]
    ) -> None:
        tools, spec, first = self._tools, source.spec, flights[0].extent
        works = list(works_of_extents(spec, first, len(flights), tools.extent_bytes))
        missing = [0] * len(flights)
        for work in works:
            for target in work.targets:
                missing[target.extent - first] += 1
        zeros = zero_ranges(spec, tools.extent_bytes)
        for i, slot in enumerate(slots):
            for begin, end in zeros.get(first + i, ()):
                tools.pool.view(slot)[begin:end] = bytes(end - begin)
            if not missing[i]:
                self._arrived(flights[i], slot)

        def received(targets: Sequence[int]) -> Callable[[int], None]:
            def on_target(i: int) -> None:
                at = targets[i]
                missing[at] -= 1
                if not missing[at]:
                    self._arrived(flights[at], slots[at])

            return on_target

        for work in works:
            places = [target.extent - first for target in work.targets]
            views = [
                tools.pool.view(slots[at])[target.begin_bytes : target.end_bytes]
                for at, target in zip(places, work.targets, strict=True)
            ]
            await tools.engine.read_into(
                work.info, work.begin_bytes, views, received(places), source.options, demand=True
            )
            tools.metrics.add("range_bytes_total", work.size_bytes)

    async def _allocate(self, digest: str, extent: int) -> int:
        pool = self._tools.pool
        while True:
            slot = await pool.allocate(digest, extent)
            if slot is not None:
                return slot
            # A fill has it under way, for others than us; it keeps its slot, we need our own.
            pool.disown(digest, extent)

    def _arrived(self, flight: _Flight, slot: int) -> None:
        pool = self._tools.pool
        pool.table.mark_ready(slot)
        for waiter in flight.waiters:
            if not waiter.done():
                pool.hold(slot)
                waiter.set_result(slot)

    async def close(self) -> None:
        """Give up what is under way, and wait until it has let go of everything."""
        tasks = {flight.task for flight in self._flights.values() if flight.task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await finished(asyncio.gather(*tasks, return_exceptions=True))


async def _lent(fill: Fill, lender: SlotPool, extent: int) -> int:
    """The lender's slot with the extent, held."""
    slot = lender.table.find(fill.spec.digest, extent)
    if slot is not None:
        lender.hold(slot)
        return slot
    if fill.has_passed(extent) or fill.has_failed:
        raise LentElsewhereError(f"extent {extent} of {fill.spec.name} is not lent any more")
    try:
        return await fill.take(extent)
    except (IntegrityError, PastEndError):
        raise
    except GpufeedError as error:
        # Why is the lender's business.
        raise LentElsewhereError(f"{fill.spec.name} is not lent any more") from error


def _error_of(task: asyncio.Task[None]) -> GpufeedError:
    """What those who got nothing of a load that is over are told."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, GpufeedError):
        return error
    if error is not None:
        _LOG.error("a load met an internal error", exc_info=error)
        return GpufeedError("internal error; the daemon's log has it")
    return OriginUnavailableError("the load was given up; reading again loads it again")
