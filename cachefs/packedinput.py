"""The compressed bytes of one object, from the origin to a decoder's thread.

The loop asks for `PIECES_IN_FLIGHT` pieces at a time, in order, each into a buffer of its own that
later pieces use again; one more is in the decoder's hands. The decoder, in a thread, takes them as
it needs them and waits where none is there. On the way all go into the object's CRC-64.

`read` is called by one thread at a time, everything else on the loop.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Mapping

from gpufeed.cachefs import checksum
from gpufeed.cachefs.errors import GpufeedError, OriginUnavailableError
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.inflight import Urgency
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.tasks import finished
from gpufeed.cachefs.units import MIB

PIECES_IN_FLIGHT = 3
PIECES_MAX = PIECES_IN_FLIGHT + 1
PIECE_BYTES_MAX = MIB
_NOTHING = memoryview(b"")


class PackedInput:
    """Satisfies `Input`.

    Attributes:
        crc64: of what was read so far.
        crc_told: the whole object's, as the origin's answers say.
        position_bytes: how much was read.
        failure: what `read` raised; not the stream's fault.
    """

    def __init__(
        self, info: ObjectInfo, tools: FillTools, urgency: Urgency,
        options: Mapping[str, str] | None,
    ) -> None:  # fmt: skip
        self._info = info
        self._tools = tools
        self._urgency = urgency
        self._options = options
        self._piece_bytes = piece_bytes(tools)
        self._loop = asyncio.get_running_loop()
        self._asked_bytes = 0
        self._spare: list[bytearray] = []
        self._coming: collections.deque[tuple[asyncio.Task[memoryview], bytearray]] = (
            collections.deque()
        )
        self._dropped: set[asyncio.Task[memoryview]] = set()
        self._closed = False
        self._waiting: asyncio.Task[memoryview] | None = None
        self._piece = _NOTHING
        self._buffer = bytearray()
        self._rest = _NOTHING
        self.crc64 = checksum.CRC64_EMPTY
        self.crc_told: int | None = None
        self.position_bytes = 0
        self.failure: GpufeedError | None = None

    @property
    def is_exhausted(self) -> bool:
        """Every byte of the object was read."""
        return self.position_bytes == self._info.size_bytes

    # --- the decoder's thread -----------------------------------------------------------------

    def read(self, size: int) -> memoryview:
        """See `Input`.

        Raises:
            GpufeedError: the origin failed, or the input was closed.
        """
        if not self._rest and not self.is_exhausted:
            coming = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
            try:
                self._rest = coming.result()
            except GpufeedError as error:
                self.failure = error
                raise
            self.crc64 = checksum.crc64(self._rest, self.crc64)
        taken, self._rest = self._rest[:size], self._rest[size:]
        self.position_bytes += len(taken)
        return taken

    # --- the loop -----------------------------------------------------------------------------

    async def _next(self) -> memoryview:
        if self._closed:
            raise OriginUnavailableError(f"{self._info.url}: decompression was given up")
        if self._piece:
            self._spare.append(self._buffer)
            self._piece = _NOTHING
        self._ask()
        self._waiting, buffer = self._coming.popleft()
        try:
            self._piece = await self._waiting
            self._buffer = buffer
        except asyncio.CancelledError:
            raise OriginUnavailableError(f"{self._info.url}: decompression was given up") from None
        return self._piece

    def _ask(self) -> None:
        while len(self._coming) < PIECES_IN_FLIGHT and self._asked_bytes < self._info.size_bytes:
            begin = self._asked_bytes
            length = min(self._piece_bytes, self._info.size_bytes - begin)
            self._asked_bytes += length
            buffer = self._spare.pop() if self._spare else bytearray(self._piece_bytes)
            task = self._loop.create_task(self._receive(begin, memoryview(buffer)[:length]))
            self._coming.append((task, buffer))

    async def _receive(self, begin: int, view: memoryview) -> memoryview:
        told = await self._tools.engine.read_into(
            self._info, begin, [view], _nobody_waits, self._options,
            demand=self._urgency.demanded,
        )  # fmt: skip
        self.crc_told = self.crc_told if told is None else told
        return view

    async def close(self) -> None:
        """Give up what is under way; a `read` in a thread ends with an error."""
        self._closed = True
        self.shed()
        if self._waiting is not None:
            self._waiting.cancel()
            self._dropped.add(self._waiting)
        if self._dropped:
            await finished(asyncio.gather(*self._dropped, return_exceptions=True))

    def shed(self) -> None:
        """Drop what was asked ahead; it is asked again. No thread is reading."""
        for task, _ in self._coming:
            task.cancel()
            self._dropped.add(task)
            task.add_done_callback(self._dropped.discard)
        self._coming.clear()
        self._spare.clear()
        self._asked_bytes = self.position_bytes + len(self._rest)


def piece_bytes(tools: FillTools) -> int:
    """How long a piece is: all together are at most as much as one request of a plain fill."""
    return min(PIECE_BYTES_MAX, tools.part_bytes // PIECES_MAX)


def _nobody_waits(_: int) -> None:
    """A piece is used when it is whole."""
