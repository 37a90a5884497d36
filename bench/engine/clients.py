"""How an engine is driven: objects are received lap by lap, and what arrived is checked.

A **lap** is the objects that are received together, with nothing but the engine's own work between
the clocks. Their memory is there and touched before the first lap, is used again in each, and its
checksum is compared between laps. A **part** is one request: up to `part_bytes` of one object.

`ThreadClient` gives each connection a thread, as blocking libraries are used; `LoopClient` gives
each a coroutine. Both keep `connections` parts under way until a lap's parts run out.
"""

from __future__ import annotations

import abc
import asyncio
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, Protocol

from gpufeed.bench.engine.objects import Source, StoredObject
from gpufeed.cachefs.checksum import crc64
from gpufeed.cachefs.errors import IntegrityError
from gpufeed.cachefs.units import BLOCK_BYTES, MIB, round_up

LAP_OBJECTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an engine is told.

    Attributes:
        source: where the objects are.
        part_bytes: length of one request.
        connections: requests under way at once.
        origin_threads: of gpufeed's own engine; 0 = as it chooses.
        directory: scratch of this engine alone, on the disk that is measured.
        socket_path: where a daemon may listen; disks may be mounted too deep for that.
    """

    source: Source
    part_bytes: int
    connections: int
    origin_threads: int
    directory: str
    socket_path: str


@dataclass(frozen=True, slots=True)
class Part:
    """One request: the object's bytes from `begin_bytes` on, and where they go."""

    item: StoredObject
    begin_bytes: int
    target: memoryview

    @property
    def end_bytes(self) -> int:
        """Where it ends, half-open."""
        return self.begin_bytes + len(self.target)


class Client(Protocol):
    """An engine under measurement. `open` to `close`, all on one thread."""

    def open(self) -> None:
        """Make everything that lasts, and receive the first object."""
        ...

    def laps(self) -> Iterator[Sequence[StoredObject]]:
        """The measured objects, in the groups that are received together."""
        ...

    def receive(self, lap: Sequence[StoredObject]) -> None:
        """Receive these objects. This is what is measured."""
        ...

    def check(self, lap: Sequence[StoredObject]) -> None:
        """Compare what arrived with what was sent.

        Raises:
            IntegrityError: it differs.
        """
        ...

    def notes(self) -> dict[str, float]:
        """What the engine has found beside its cost."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Memory:
    """Anonymous memory for the objects of a lap, touched once, used again."""

    def __init__(self, count: int, each_bytes: int) -> None:
        self._each_bytes = round_up(each_bytes, BLOCK_BYTES)
        self._map = mmap.mmap(-1, count * self._each_bytes)
        self._view = memoryview(self._map)
        touch(self._view)

    def of(self, number: int, size_bytes: int) -> memoryview:
        """The place of the lap's object `number`."""
        begin = number * self._each_bytes
        return self._view[begin : begin + size_bytes]

    def close(self) -> None:
        """Give the memory back."""
        self._view.release()
        self._map.close()


def touch(view: memoryview) -> None:
    """Have all pages there: a page fault is no part of receiving."""
    zeros = bytes(MIB)
    for begin in range(0, len(view), MIB):
        piece = view[begin : begin + MIB]
        piece[:] = zeros[: len(piece)]


def laps_of(source: Source) -> Iterator[Sequence[StoredObject]]:
    """The measured objects in groups of `LAP_OBJECTS`."""
    for begin in range(0, len(source.measured), LAP_OBJECTS):
        yield source.measured[begin : begin + LAP_OBJECTS]


def parts_of(item: StoredObject, place: memoryview, part_bytes: int) -> Iterator[Part]:
    """The requests for one object."""
    for begin in range(0, item.size_bytes, part_bytes):
        yield Part(item, begin, place[begin : begin + part_bytes])


def require_crc(item: StoredObject, found: int) -> None:
    """Compare a checksum.

    Raises:
        IntegrityError: it is another one.
    """
    if found != item.crc64:
        raise IntegrityError(
            f"{item.key}: the {item.size_bytes} bytes that arrived have CRC-64 {found}, the object "
            f"has {item.crc64}; this engine is not to be trusted"
        )


class BufferClient(abc.ABC):
    """An engine whose bytes end in memory that the caller gives."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._memory: Memory | None = None

    def open(self) -> None:
        """See `Client`."""
        source = self.setting.source
        longest = max(item.size_bytes for item in source.objects)
        self._memory = self.make_memory(min(LAP_OBJECTS, len(source.objects)), longest)
        self.connect()
        self.receive(source.objects[:1])
        self.check(source.objects[:1])

    def laps(self) -> Iterator[Sequence[StoredObject]]:
        """See `Client`."""
        return laps_of(self.setting.source)

    def receive(self, lap: Sequence[StoredObject]) -> None:
        """See `Client`."""
        self.run(
            [
                part
                for number, item in enumerate(lap)
                for part in parts_of(item, self.place(number, item), self.request_bytes())
            ]
        )

    def request_bytes(self) -> int:
        """Length of one request."""
        return self.setting.part_bytes

    def check(self, lap: Sequence[StoredObject]) -> None:
        """See `Client`. Clears the memory, so that the next lap cannot pass on old bytes."""
        for number, item in enumerate(lap):
            place = self.place(number, item)
            require_crc(item, crc64(place))
            touch(place)

    def place(self, number: int, item: StoredObject) -> memoryview:
        """Where the lap's object `number` goes."""
        assert self._memory is not None, "not open"
        return self._memory.of(number, item.size_bytes)

    def notes(self) -> dict[str, float]:
        """See `Client`."""
        return {}

    def close(self) -> None:
        """See `Client`."""
        self.disconnect()
        if self._memory is not None:
            self._memory.close()

    def make_memory(self, count: int, each_bytes: int) -> Memory:
        """The memory for a lap."""
        return Memory(count, each_bytes)

    @abc.abstractmethod
    def connect(self) -> None:
        """Make the client."""

    @abc.abstractmethod
    def run(self, parts: Sequence[Part]) -> None:
        """Receive all parts."""

    @abc.abstractmethod
    def disconnect(self) -> None:
        """End the client."""


class ThreadClient(BufferClient):
    """A blocking engine: one thread a connection. Subclasses give `get`."""

    def connect(self) -> None:
        """See `BufferClient`."""
        self.local = threading.local()
        self._threads = ThreadPoolExecutor(self.setting.connections, "engine")

    def run(self, parts: Sequence[Part]) -> None:
        """See `BufferClient`."""
        for _ in self._threads.map(self.get, parts):
            pass

    def disconnect(self) -> None:
        """See `BufferClient`."""
        self._threads.shutdown()

    @abc.abstractmethod
    def get(self, part: Part) -> None:
        """Receive one part, in one of the threads."""


class LoopClient(BufferClient):
    """An asynchronous engine: one coroutine a connection. Subclasses give `get`."""

    new_loop: ClassVar[Callable[[], asyncio.AbstractEventLoop] | None] = None

    def connect(self) -> None:
        """See `BufferClient`."""
        self._runner = asyncio.Runner(loop_factory=type(self).new_loop)
        self._runner.run(self.start())

    def run(self, parts: Sequence[Part]) -> None:
        """See `BufferClient`."""
        self._runner.run(self.run_lap(iter(parts)))

    async def run_lap(self, parts: Iterator[Part]) -> None:
        """Keep `connections` coroutines at work until no part is left."""

        async def one_connection() -> None:
            for part in parts:
                await self.get(part)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.setting.connections):
                group.create_task(one_connection())

    def disconnect(self) -> None:
        """See `BufferClient`."""
        self._runner.run(self.stop())
        self._runner.close()

    async def start(self) -> None:
        """Make what needs the loop."""

    async def stop(self) -> None:
        """End it."""

    @abc.abstractmethod
    async def get(self, part: Part) -> None:
        """Receive one part."""
