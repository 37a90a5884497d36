"""Streams and events of the accelerator, as the gate before a slot's reuse needs them.

A stream is named by a `StreamKey`, three numbers, because it has to be named where nothing else
may be done: in the callback that runs when a batch's last tensor is gone. That may be inside the
garbage collector, in any thread, in the middle of another CUDA call or of a graph's capture.
Reading which streams are current there is a look at a variable of the thread; recording an event is
a call into the driver, and is done later, by the thread that takes batches.

`CudaStreams` has not yet been verified on hardware.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from gpufeed.cachefs.errors import DeviceError


class StreamKey(NamedTuple):
    """A stream of a device, as torch numbers them."""

    stream_id: int
    device_index: int
    device_type: int


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """True when everything before it has ended. Never waits.

        Raises:
            DeviceError: the device failed; it will never be known.
        """


class Streams(Protocol):
    """The streams of a process."""

    def usable(self) -> bool:
        """True when this thread may make calls now: the runtime runs, no graph is captured."""

    def current(self) -> tuple[StreamKey, ...]:
        """The calling thread's current stream of each device. For any thread, at any time.

        Empty where nobody has initialised the runtime: then no copy can be under way.
        """

    def record(self, stream: StreamKey) -> Event | None:
        """An event after all that was submitted to `stream` so far; None: not now, ask later.

        Raises:
            DeviceError: the device failed.
        """


class Passed:
    """The event of a stream on which nothing can have run."""

    def query(self) -> bool:
        """Nothing is before it."""
        return True


class CudaStreams:
    """`Streams` of ``torch.cuda``. Never initialises CUDA, and does nothing in a forked child."""

    def __init__(self) -> None:
        self._stream_of: Callable[[int], tuple[int, int, int]] | None = None
        self._device_count = 0

    def usable(self) -> bool:
        """As `Streams.usable`."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return False
        return not torch.cuda.is_current_stream_capturing()

    def current(self) -> tuple[StreamKey, ...]:
        """As `Streams.current`.

        Of all devices, because a batch may have gone to another than the current one.
        """
        if self._stream_of is None and not self._look():
            return ()
        stream_of = self._stream_of
        assert stream_of is not None
        return tuple(StreamKey(*stream_of(index)) for index in range(self._device_count))

    def record(self, stream: StreamKey) -> Event | None:
        """As `Streams.record`."""
        torch: Any = sys.modules["torch"]  # who has a stream has it
        # An event makes a context on a device that has none, and a context takes hundreds of MB.
        if not torch._C._cuda_hasPrimaryContext(stream.device_index):  # torch offers no other way
            return Passed()
        try:
            target = torch.cuda.Stream(**stream._asdict())
            with torch.cuda.stream(target):
                if torch.cuda.is_current_stream_capturing():
                    return None  # an event of a capture cannot be queried
            event = torch.cuda.Event()
            event.record(target)
        except RuntimeError as error:
            raise _failed("recorded", error) from error
        return _CudaEvent(event)

    def _look(self) -> bool:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return False
        self._device_count = torch.cuda.device_count()
        self._stream_of = torch._C._cuda_getCurrentStream  # the plain look; the rest initialises
        return True


def key_of(stream: Any) -> StreamKey:
    """The key of a ``torch.cuda.Stream``."""
    return StreamKey(stream.stream_id, stream.device_index, stream.device_type)


class _CudaEvent:
    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def query(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise _failed("asked for", error) from error


def _failed(what: str, error: RuntimeError) -> DeviceError:
    return DeviceError(
        f"CUDA failed when an event after the copies of a batch was {what}; an earlier call of "
        f"this process is the likely cause, CUDA_LAUNCH_BLOCKING=1 finds it: {error}"
    )
