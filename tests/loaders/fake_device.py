"""An accelerator without hardware: streams that run when told to, memory that knows who locked it.

Work on a stream runs in order, and only in `run`; so a copy "under way" is a closure that has not
run yet, and reads the host's memory at the moment when it does, as DMA would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from gpufeed.cachefs.errors import AlreadyRegisteredError, DeviceError
from gpufeed.loaders.streams import StreamKey

MAIN = StreamKey(0, 0, 1)
SIDE = StreamKey(32, 0, 1)
OTHER_DEVICE = StreamKey(0, 1, 1)


class FakeEvent:
    def __init__(self, streams: FakeStreams, stream: StreamKey) -> None:
        self._streams, self._stream = streams, stream
        self._position = streams.submitted[stream]

    def query(self) -> bool:
        self._streams.check()
        return self._streams.done[self._stream] >= self._position


class FakeStreams:
    """`Streams`, and what a program does with streams."""

    def __init__(self, devices: tuple[StreamKey, ...] = (MAIN,)) -> None:
        self.initialised = True
        self.capturing: set[StreamKey] = set()
        self.broken = False
        self.submitted: dict[StreamKey, int] = defaultdict(int)
        self.done: dict[StreamKey, int] = defaultdict(int)
        self.recorded_count = 0
        self._current = devices
        self._work: dict[StreamKey, list[Callable[[], None]]] = defaultdict(list)

    # As `Streams`.

    def usable(self) -> bool:
        return self.initialised and not self.capturing & set(self._current)

    def current(self) -> tuple[StreamKey, ...]:
        return self._current if self.initialised else ()

    def record(self, stream: StreamKey) -> FakeEvent | None:
        self.check()
        if stream in self.capturing:
            return None
        self.recorded_count += 1
        return FakeEvent(self, stream)

    # What a program does.

    def submit(self, stream: StreamKey, work: Callable[[], None]) -> None:
        self.submitted[stream] += 1
        self._work[stream].append(work)

    def run(self, stream: StreamKey, count: int | None = None) -> None:
        """The device gets on with the oldest `count` pieces of work, or all."""
        work = self._work[stream]
        for _ in range(len(work) if count is None else min(count, len(work))):
            work.pop(0)()
            self.done[stream] += 1

    def check(self) -> None:
        if self.broken:
            raise DeviceError("the fake device failed")


class FakeHostMemory:
    """`HostMemory`. Call number `fail_at`, counted from 0, is refused with `error`."""

    def __init__(self, fail_at: int | None = None, error: type[DeviceError] = DeviceError) -> None:
        self.ranges: dict[int, int] = {}
        self.calls_count = 0
        self.unregistered_count = 0
        self.registered_count = 0
        self._fail_at, self._error = fail_at, error

    def register(self, address: int, size_bytes: int) -> None:
        self._call()
        assert address % 4096 == 0
        assert size_bytes % 4096 == 0
        for begin, size in self.ranges.items():
            if begin < address + size_bytes and address < begin + size:
                raise AlreadyRegisteredError(f"{address:#x} overlaps {begin:#x}")
        self.ranges[address] = size_bytes
        self.registered_count += 1

    def unregister(self, address: int) -> None:
        self._call()
        if self.ranges.pop(address, None) is None:
            raise DeviceError(f"{address:#x} is not registered")
        self.unregistered_count += 1

    def _call(self) -> None:
        number, self.calls_count = self.calls_count, self.calls_count + 1
        if number == self._fail_at:
            raise self._error("the fake driver refused")
