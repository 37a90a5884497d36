"""Asks the origin for all of a shard's bytes, as the shard's layout wants them (`placement`).

Parts are asked in ascending order, a bounded number at a time. Readers get extents as they arrive,
before the shard is complete: status, version, range and length of each answer were checked on the
way. A small object of a virtual shard is shown only once its own checksum is right.

A fill that bypasses the store stays at most `BYPASS_AHEAD_EXTENTS` ahead of its fastest reader,
since what a reader missed must be fetched again. Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from gpufeed.cachefs import checksum
from gpufeed.cachefs.errors import GpufeedError, IntegrityError
from gpufeed.cachefs.fillextents import FillExtents
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.inflight import Urgency
from gpufeed.cachefs.model import ObjectInfo, ShardSpec
from gpufeed.cachefs.placement import Work, works
from gpufeed.cachefs.units import MIB

# Requests of one fill under way at once. Parts are megabytes; small objects are latency.
PARTS_IN_FLIGHT_DEMAND = 8
PARTS_IN_FLIGHT_PREFETCH = 4
OBJECTS_IN_FLIGHT_DEMAND = 64
OBJECTS_IN_FLIGHT_PREFETCH = 32
SMALL_OBJECT_BYTES = MIB
BYPASS_AHEAD_EXTENTS = 16


class Receiver:
    """One shard's requests. See the top of the file."""

    def __init__(
        self, spec: ShardSpec, tools: FillTools, extents: FillExtents, *,
        options: Mapping[str, str] | None, is_cached: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._spec = spec
        self._tools = tools
        self._extents = extents
        self._options = options
        self._is_cached = is_cached
        self._crc_told: int | None = None
        self._fastest = 0
        self._moved = asyncio.Event()
        self._urgency = Urgency(demanded=False)
        self._under_way = 0
        self._ended = asyncio.Event()

    def demand(self) -> None:
        """A reader came: what is not asked yet goes before prefetch, and more of it at once."""
        self._tools.in_flight.promote(self._urgency)
        self._ended.set()

    def advance(self, extent: int) -> None:
        """A reader wants `extent` next."""
        if extent > self._fastest:
            self._fastest = extent
            self._moved.set()

    async def run(self) -> None:
        """Receive everything.

        Raises:
            GpufeedError: the origin failed, or an object is wrong.
        """
        tools, extents = self._tools, self._extents
        try:
            async with asyncio.TaskGroup() as group:
                for work in works(self._spec, tools.extent_bytes, tools.part_bytes):
                    await self._wait_turn()
                    await self._pace(work.targets[0].extent)
                    await extents.open([t.extent for t in work.targets], self._urgency)
                    self._under_way += 1
                    group.create_task(self._receive(work)).add_done_callback(self._over)
                await extents.open_gaps(self._urgency)
        except* GpufeedError as errors:
            raise _first(errors) from None

    async def _wait_turn(self) -> None:
        while self._under_way >= self._in_flight_max():
            self._ended.clear()
            await self._ended.wait()

    def _over(self, _: asyncio.Task[None]) -> None:
        self._under_way -= 1
        self._ended.set()

    def _in_flight_max(self) -> int:
        demanded = self._urgency.demanded
        small = self._spec.sources[0].info.size_bytes <= SMALL_OBJECT_BYTES
        if small and len(self._spec.sources) > 1:
            return OBJECTS_IN_FLIGHT_DEMAND if demanded else OBJECTS_IN_FLIGHT_PREFETCH
        return PARTS_IN_FLIGHT_DEMAND if demanded else PARTS_IN_FLIGHT_PREFETCH

    async def _pace(self, extent: int) -> None:
        while not self._is_cached() and extent > self._fastest + BYPASS_AHEAD_EXTENTS:
            self._moved.clear()
            await self._moved.wait()

    async def _receive(self, work: Work) -> None:
        extents = self._extents
        views = [extents.view(t.extent)[t.begin_bytes : t.end_bytes] for t in work.targets]
        # A part's extents are shown as they come; a small object's only once it is verified.
        streams = not (work.whole and len(self._spec.sources) > 1)

        def on_target(i: int) -> None:
            if streams:
                extents.part_arrived(work.targets[i].extent)

        told = await self._tools.engine.read_into(
            work.info, work.begin_bytes, views, on_target, self._options,
            demand=self._urgency.demanded,
        )  # fmt: skip
        if len(self._spec.sources) == 1:
            self._crc_told = told if told is not None else self._crc_told
        if not streams:
            _check_object(work.info, told, views)
            for target in work.targets:
                extents.part_arrived(target.extent)

    async def verify(self) -> None:
        """Compare the whole shard with what the origin says of it, where it is one object.

        Raises:
            IntegrityError: they differ.
        """
        if len(self._spec.sources) != 1 or self._extents.count == 0:
            return
        info = self._spec.sources[0].info
        want = self._crc_told if self._crc_told is not None else info.crc64
        if want is None:
            want = (await self._tools.engine.head(info.url, self._options)).crc64
        if want is not None:
            _check_crc(self._spec.name, self._spec.size_bytes, self._extents.crc64(), want)


def _check_object(info: ObjectInfo, told: int | None, views: Sequence[memoryview]) -> None:
    want = told if told is not None else info.crc64
    if want is None:
        return
    found = checksum.CRC64_EMPTY
    for view in views:
        found = checksum.crc64(view, found)
    _check_crc(info.url, info.size_bytes, found, want)


def _check_crc(name: str, size_bytes: int, found: int, want: int) -> None:
    if found != want:
        raise IntegrityError(
            f"{name}: the {size_bytes} bytes received have CRC-64 {found}, the origin says {want}; "
            "nothing was kept, and reading again fetches it again"
        )


def _first(group: BaseExceptionGroup[GpufeedError]) -> GpufeedError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GpufeedError), error
    return error
