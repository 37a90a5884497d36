"""Fills a shard from an object that holds it compressed: decompressed once, as it streams in.

The decoder runs in a thread and writes straight into arena slots, an extent at a time; it pulls its
input through `packedinput`. What one such fill has under way is bounded and taken from the budget
of bytes in flight as a whole: the pieces of input and `EXTENTS_OPEN_MAX` extents of output. So it
never waits for room with some in hand.

The length is known at the end. Until then the store's room grows with what came; where it cannot,
the shard is streamed past the store. An object that expands beyond `expansion_ratio_max` is
refused. The object's own CRC-64 is compared as for every other. Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio

from gpufeed.cachefs import checksum
from gpufeed.cachefs.decoders import Decoder, decoder_of
from gpufeed.cachefs.errors import CapacityError, IntegrityError
from gpufeed.cachefs.fillextents import FillExtents
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.inflight import Urgency
from gpufeed.cachefs.keeper import Keeper
from gpufeed.cachefs.pace import Pace
from gpufeed.cachefs.packedinput import PIECES_MAX, PackedInput, piece_bytes
from gpufeed.cachefs.receiver import check_whole
from gpufeed.cachefs.sources import ShardSource
from gpufeed.cachefs.tasks import until_done
from gpufeed.cachefs.units import BLOCK_BYTES, MIB, format_bytes, round_up

EXTENTS_OPEN_MAX = 2
# A small object may expand to so much whatever the ratio is.
EXPANSION_FLOOR_BYTES = 64 * MIB


class Unpacker:
    """Satisfies what `Fill` wants of a receiver. See the top of the file."""

    def __init__(
        self, source: ShardSource, tools: FillTools, extents: FillExtents, pace: Pace, *,
        keeper: Keeper,
    ) -> None:  # fmt: skip
        self._spec = source.spec
        self._info = source.spec.sources[0].info
        self._options = source.options
        self._tools = tools
        self._extents = extents
        self._pace = pace
        self._keeper = keeper
        self._urgency = Urgency(demanded=False)
        self._room_bytes = 0
        self._input = PackedInput(self._info, tools, self._urgency, source.options)
        self._decoder: Decoder = decoder_of(self._spec.codec, self._input)
        self._limit_bytes = max(
            EXPANSION_FLOOR_BYTES, int(self._info.size_bytes * tools.expansion_ratio_max)
        )

    def demand(self) -> None:
        """A reader came: what is not asked yet goes before prefetch."""
        self._tools.in_flight.promote(self._urgency)

    async def run(self) -> None:
        """Receive and decompress everything.

        Raises:
            GpufeedError: the origin failed, the stream is wrong, or too long.
        """
        await self._take_room()
        try:
            await self._unpack()
        finally:
            self._tools.in_flight.withdraw_offer(self)
            await self._input.close()

    def close(self) -> None:
        """No extent is on its way any more."""
        self._give_room()

    async def _take_room(self) -> None:
        tools = self._tools
        room_bytes = PIECES_MAX * piece_bytes(tools) + EXTENTS_OPEN_MAX * tools.extent_bytes
        await tools.in_flight.take(room_bytes, self._urgency)
        self._room_bytes = room_bytes

    def _give_room(self) -> None:
        room_bytes, self._room_bytes = self._room_bytes, 0
        self._tools.in_flight.give_back(room_bytes)

    async def _wait_turn(self, extent: int) -> None:
        """Readers may be slow. Meanwhile others may have the room, and what was asked ahead goes.

        (A stream is slower than its origin all its life where the trainer is the slower one, so
        nothing is dropped as long as nobody needs the room.)
        """
        if self._pace.allows(extent):
            return
        await self._extents.until_fewer_than(1)
        self._tools.in_flight.offer(self, self._shed)
        await self._pace.wait(extent)
        self._tools.in_flight.withdraw_offer(self)
        if not self._room_bytes:
            await self._take_room()

    def _shed(self) -> None:
        self._input.shed()
        self._give_room()

    async def _unpack(self) -> None:
        size_bytes, extent = 0, 0
        while True:
            await self._wait_turn(extent)
            await self._extents.until_fewer_than(EXTENTS_OPEN_MAX)
            slot = await self._extents.allocate(extent)
            try:
                length, crc = await self._decode(slot)
                size_bytes += length
                self._tools.metrics.add("decompressed_bytes_total", length)
                self._check_size(size_bytes)
            except BaseException:
                self._tools.pool.drop(slot)
                raise
            if length < self._tools.extent_bytes:
                break
            self._keeper.grow(size_bytes)
            self._extents.arrive_in(extent, slot, crc)
            extent += 1
        self._extents.end(size_bytes)
        self._keeper.grow(size_bytes)
        if length:
            self._extents.arrive_in(extent, slot, crc)
        else:
            self._tools.pool.drop(slot)

    async def _decode(self, slot: int) -> tuple[int, int]:
        """Fill a slot from the stream; returns how far, and the checksum of that."""
        view = self._tools.pool.view(slot)
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self._tools.decoders, self._fill_view, view)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            # The thread may be waiting for input, or writing to the slot: not to be cut short.
            try:
                await self._input.close()
            finally:
                await until_done(job)
                _ = job.cancelled() or job.exception()  # nobody else sees it
            raise

    def _fill_view(self, view: memoryview) -> tuple[int, int]:
        """In a thread."""
        try:
            length = self._decoder.readinto(view)
            if length < len(view):
                self._check_exhausted()
        except IntegrityError as error:
            if error is self._input.failure:
                raise
            raise IntegrityError(
                f"{self._info.url}: byte {self._input.position_bytes} of "
                f"{self._info.size_bytes}: {error}; nothing was kept"
            ) from None
        padded = round_up(length, BLOCK_BYTES)
        view[length:padded] = bytes(padded - length)
        return length, checksum.crc64(view[:length])

    def _check_exhausted(self) -> None:
        if not self._input.is_exhausted:
            raise IntegrityError(f"the {self._spec.codec} stream ends before the object does")

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._limit_bytes:
            raise CapacityError(
                f"{self._info.url}: its {format_bytes(self._info.size_bytes)} expand to over "
                f"{format_bytes(self._limit_bytes)}: raise store.expansion_ratio_max (now "
                f"{self._tools.expansion_ratio_max:g}) if that is right"
            )

    async def verify(self) -> None:
        """Compare the compressed object with what the origin says of it.

        Raises:
            IntegrityError: they differ.
        """
        await check_whole(
            self._info, self._input.crc64, self._input.crc_told, self._tools.engine, self._options
        )
