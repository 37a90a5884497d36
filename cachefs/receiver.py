"""Asks the origin for all of a shard's bytes, as the shard's layout wants them (`placement`).

Parts are asked in ascending order, a bounded number at a time. Readers get extents as they arrive,
before the shard is complete: status, version, range and length of each answer were checked on the
way. A small object of a virtual shard is shown only once its own checksum is right. Owned by the
daemon's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from gpufeed.cachefs import checksum
from gpufeed.cachefs.errors import GpufeedError, IntegrityError
from gpufeed.cachefs.fillextents import FillExtents
from gpufeed.cachefs.filltools import Engine, FillTools
from gpufeed.cachefs.inflight import Urgency
from gpufeed.cachefs.model import ObjectInfo, ShardSpec
from gpufeed.cachefs.pace import Pace
from gpufeed.cachefs.placement import Work, works, zero_ranges
from gpufeed.cachefs.sources import ShardSource
from gpufeed.cachefs.units import MIB

# Requests of one fill under way at once. Parts are megabytes; small objects are latency.
PARTS_IN_FLIGHT_DEMAND = 8
PARTS_IN_FLIGHT_PREFETCH = 4
OBJECTS_IN_FLIGHT_DEMAND = 64
OBJECTS_IN_FLIGHT_PREFETCH = 32
SMALL_OBJECT_BYTES = MIB


class Receiver:
    """One shard's requests. See the top of the file."""

    def __init__(
        self, source: ShardSource, tools: FillTools, extents: FillExtents, pace: Pace
    ) -> None:
        self._spec = spec = source.spec
        self._tools = tools
        self._extents = extents
        self._options = source.options
        self._pace = pace
        self._crc_told: int | None = None
        self._zeros = zero_ranges(spec, tools.extent_bytes)
        self._missing = _requests_by_extent(spec, tools)
        self._urgency = Urgency(demanded=False)
        self._under_way = 0
        self._ended = asyncio.Event()

    def demand(self) -> None:
        """A reader came: what is not asked yet goes before prefetch, and more of it at once."""
        self._tools.in_flight.promote(self._urgency)
        self._ended.set()

    async def run(self) -> None:
        """Receive everything.

        Raises:
            GpufeedError: the origin failed, or an object is wrong.
        """
        tools = self._tools
        try:
            async with asyncio.TaskGroup() as group:
                for work in works(self._spec, tools.extent_bytes, tools.part_bytes):
                    await self._wait_turn()
                    await self._pace.wait(work.targets[0].extent)
                    await self._open([target.extent for target in work.targets])
                    self._under_way += 1
                    group.create_task(self._receive(work)).add_done_callback(self._over)
                await self._open_gaps()
        except* GpufeedError as errors:
            raise first_of(errors) from None

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

    async def _open(self, extents: Sequence[int]) -> None:
        for extent in await self._extents.open(extents, self._urgency):
            view = self._extents.view(extent)
            for begin, end in self._zeros.get(extent, ()):
                view[begin:end] = bytes(end - begin)

    async def _open_gaps(self) -> None:
        """The extents that no source touches: they arrive as they are opened."""
        for extent, missing in self._missing.items():
            if missing == 0 and not self._extents.has_passed(extent):
                await self._open([extent])
                self._extents.arrive(extent)

    def _part_arrived(self, extent: int) -> None:
        """One of the requests that fill the extent is done with it."""
        self._missing[extent] -= 1
        if self._missing[extent] == 0:
            self._extents.arrive(extent)

    async def _receive(self, work: Work) -> None:
        extents = self._extents
        views = [extents.view(t.extent)[t.begin_bytes : t.end_bytes] for t in work.targets]
        # A part's extents are shown as they come; a small object's only once it is verified.
        streams = not (work.whole and len(self._spec.sources) > 1)

        def on_target(i: int) -> None:
            if streams:
                self._part_arrived(work.targets[i].extent)

        told = await self._tools.engine.read_into(
            work.info, work.begin_bytes, views, on_target, self._options,
            demand=self._urgency.demanded,
        )  # fmt: skip
        if len(self._spec.sources) == 1:
            self._crc_told = told if told is not None else self._crc_told
        if not streams:
            _check_object(work.info, told, views)
            for target in work.targets:
                self._part_arrived(target.extent)

    def close(self) -> None:
        """Nothing to give back: the extents hold their own room."""

    async def verify(self) -> None:
        """Compare the whole shard with what the origin says of it, where it is one object.

        Raises:
            IntegrityError: they differ.
        """
        if len(self._spec.sources) != 1 or self._extents.count == 0:
            return
        info = self._spec.sources[0].info
        found = self._extents.crc64()
        await check_whole(info, found, self._crc_told, self._tools.engine, self._options)


def _requests_by_extent(spec: ShardSpec, tools: FillTools) -> dict[int, int]:
    counts = dict.fromkeys(range(spec.extent_count(tools.extent_bytes)), 0)
    for work in works(spec, tools.extent_bytes, tools.part_bytes):
        for target in work.targets:
            counts[target.extent] += 1
    return counts


async def check_whole(
    info: ObjectInfo, found: int, told: int | None, engine: Engine,
    options: Mapping[str, str] | None,
) -> None:  # fmt: skip
    """Compare an object's checksum with what its origin says: `told`, listed, or asked for now.

    Raises:
        IntegrityError: they differ.
    """
    want = told if told is not None else info.crc64
    if want is None:
        want = (await engine.head(info.url, options)).crc64
    if want is not None:
        _check_crc(info, found, want)


def _check_object(info: ObjectInfo, told: int | None, views: Sequence[memoryview]) -> None:
    want = told if told is not None else info.crc64
    if want is None:
        return
    found = checksum.CRC64_EMPTY
    for view in views:
        found = checksum.crc64(view, found)
    _check_crc(info, found, want)


def _check_crc(info: ObjectInfo, found: int, want: int) -> None:
    if found != want:
        raise IntegrityError(
            f"{info.url}: the {info.size_bytes} bytes received have CRC-64 {found}, the origin "
            f"says {want}; nothing was kept, and reading again fetches it again"
        )


def first_of(group: BaseExceptionGroup[GpufeedError]) -> GpufeedError:
    """The first error of a group, however deep it lies."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GpufeedError), error
    return error
