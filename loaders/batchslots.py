"""The ring of batch slots: preallocated shared memory that workers write and the trainer reads.

One memfd. Its size is fixed once, from the first sample's layout; pages appear only when a slot is
first written, and free slots are handed out last-in-first-out, so only as many are ever touched as
are needed at a time. A slot is in exactly one state: *free*, *filling* (the feeder's, named in
units under way), or *held* by a batch of the trainer. A held slot comes back when the last tensor
or array over it is gone; batches beyond `held_max` are copied to the heap instead and give their
slot back at once, so holding batches is always safe and memory is bounded.

With a `SlotPinning` slots are registered with the accelerator when they are lent. Then a slot that
came back is *waiting* until the copies from it have ended; it counts as held, so the feeder's share
is never short of it. A ring that is closed while slots are held or waiting stays registered and
mapped (*retired*), and is taken apart by whatever ring is used next, or by the process's end.

Threads: a lock guards the states. The weak-reference callback that ends a hold may run anywhere,
even inside the lock, so it only appends to a deque. `lend`, `settle` and `close` are the trainer's
thread's, and the only ones that call the driver. Workers map the same memory through `SlotWriter`;
a slot has one writer a row, and nobody reads it before the row's result came back.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpufeed.cachefs.errors import DeviceError
from gpufeed.cachefs.units import BLOCK_BYTES, GIB, round_up
from gpufeed.loaders.layout import Layout
from gpufeed.loaders.pinning import PinningStats, SlotPinning
from gpufeed.loaders.streams import Event, StreamKey

RING_BYTES_MAX = 2 * GIB
HELD_SLOTS_MAX = 8
HELD_SLOTS_MIN = 2
LOOKAHEAD_MIN = 2


@dataclass(frozen=True, slots=True)
class RingShape:
    """What a worker needs to find a slot's rows."""

    layout: Layout
    slot_bytes: int
    slot_count: int


class SlotRing:
    """Owner of the memfd, in the trainer's process.

    Args:
        ring_bytes_max: bound of all slots together.
        pinning: registers slots and waits for the copies from them; None: neither.
    """

    def __init__(
        self, ring_bytes_max: int = RING_BYTES_MAX, pinning: SlotPinning | None = None
    ) -> None:
        self.fd = os.memfd_create("gpufeed-batches", os.MFD_CLOEXEC)
        self.shape: RingShape | None = None
        self.held_max = 0
        self._ring_bytes_max = ring_bytes_max
        self._pinning = pinning
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._mapping: mmap.mmap | None = None
        self._memory: npt.NDArray[np.uint8] | None = None
        self._holds: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}
        self._returned: deque[tuple[int, tuple[StreamKey, ...]]] = deque()

    def configure(self, layout: Layout, lookahead: int) -> bool:
        """Size the ring for `lookahead` filling batches and the held ones. False: too large."""
        assert self.shape is None
        slot_bytes = round_up(layout.slot_bytes, BLOCK_BYTES)
        wanted = lookahead + HELD_SLOTS_MAX
        count = min(wanted, self._ring_bytes_max // slot_bytes)
        if count < lookahead + HELD_SLOTS_MIN:
            return False
        os.ftruncate(self.fd, count * slot_bytes)
        self._mapping = mmap.mmap(self.fd, count * slot_bytes)
        self._memory = np.frombuffer(self._mapping, dtype=np.uint8)
        self.held_max = count - lookahead
        self._free = list(range(count - 1, -1, -1))
        self.shape = RingShape(layout, slot_bytes, count)
        if self._pinning is not None:
            _pinned_rings.add(self)
        return True

    def take(self) -> int | None:
        """A free slot, which becomes *filling*; None when there is none or no ring."""
        with self._lock:
            self._reclaim()
            return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """A filling slot becomes free. No worker may still write it."""
        with self._lock:
            self._free.append(slot)

    @property
    def held_count(self) -> int:
        """Slots that batches of the trainer hold."""
        with self._lock:
            self._reclaim()
            return len(self._holds)

    @property
    def waiting_count(self) -> int:
        """Slots that came back, and that the accelerator may still read."""
        with self._lock:
            self._reclaim()
            return self._waiting_count()

    @property
    def free_count(self) -> int:
        """Slots that nobody has."""
        with self._lock:
            self._reclaim()
            return len(self._free)

    @property
    def pinning_stats(self) -> PinningStats:
        """Counters of registration; zeros without."""
        return PinningStats() if self._pinning is None else self._pinning.stats

    def read(self, slot: int) -> npt.NDArray[np.uint8]:
        """A filling slot's bytes, to be read before it is lent or given back."""
        return self._slice(slot)

    def lend(self, slot: int) -> npt.NDArray[np.uint8] | None:
        """A filling slot's bytes as an array of their own; held until its last view is gone.

        None when `held_max` slots are held or waiting: the caller copies and gives the slot back.
        """
        if self._pinning is not None:
            self._register(slot, self._pinning)
        with self._lock:
            self._reclaim()
            waiting = self._waiting_count()
            if len(self._holds) + waiting >= self.held_max:
                if self._pinning is not None and waiting:
                    self._pinning.stats.gated_count += 1
                return None
            # Over a memoryview, so that numpy's views keep this array itself as their base.
            owner = np.frombuffer(self._slice(slot).data, dtype=np.uint8)
            returned = self._returned
            current = _no_streams if self._pinning is None else self._pinning.streams.current
            self._holds[slot] = weakref.ref(owner, lambda _: returned.append((slot, current())))
            return owner

    def settle(self) -> None:
        """Free the slots from which all copies have ended. Never waits.

        Raises:
            DeviceError: the accelerator failed.
        """
        if self._pinning is not None:
            self._settle(self._pinning)
            take_apart_retired()

    def slot_of(self, address: int) -> int | None:
        """The slot in which a held batch's byte lies; None where it is not of this ring."""
        if self._memory is None or self.shape is None:
            return None
        offset_bytes = address - self._memory.ctypes.data
        inside = 0 <= offset_bytes < self._memory.nbytes
        return offset_bytes // self.shape.slot_bytes if inside else None

    def declare(self, slot: int, stream: StreamKey) -> None:
        """A held slot is read on `stream`: what that has at the release is waited for."""
        assert self._pinning is not None
        with self._lock:
            assert slot in self._holds, slot
            self._pinning.gate.declare(slot, stream)

    def attach(self, slot: int, event: Event) -> None:
        """A copy from a held slot ends with `event`."""
        assert self._pinning is not None
        with self._lock:
            assert slot in self._holds, slot
            self._pinning.gate.attach(slot, event)

    def record(self, stream: StreamKey) -> Event | None:
        """As `Streams.record`, of this ring's accelerator."""
        assert self._pinning is not None
        return self._pinning.streams.record(stream)

    def close(self) -> None:
        """Close the descriptor. Batches that are still held keep their memory."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        if not self._take_apart():
            _retired.append(self)

    def _take_apart(self) -> bool:
        """Let the memory go. False: it is registered, and must stay for now."""
        pinning = self._pinning
        if pinning is not None and (pinning.stats.registered_count or self.waiting_count):
            try:
                self._settle(pinning)
            except DeviceError:  # whoever uses the device hears of it; the memory stays
                return False
            if self.held_count or self.waiting_count or not pinning.unregister_all():
                return False
        self._memory = self._mapping = None
        return True

    def _settle(self, pinning: SlotPinning) -> None:
        if not pinning.usable():
            return
        with self._lock:
            self._reclaim()
            self._free.extend(pinning.gate.settle(pinning.streams.record))

    def _register(self, slot: int, pinning: SlotPinning) -> None:
        assert self.shape is not None
        assert self._mapping is not None
        pinning.register(slot, self._slice(slot).ctypes.data, self._mapping, self.shape.slot_bytes)

    def _slice(self, slot: int) -> npt.NDArray[np.uint8]:
        assert self._memory is not None
        assert self.shape is not None
        size = self.shape.slot_bytes
        return self._memory[slot * size : (slot + 1) * size]

    def _waiting_count(self) -> int:
        return 0 if self._pinning is None else self._pinning.gate.waiting_count

    def _reclaim(self) -> None:
        while self._returned:
            slot, streams = self._returned.popleft()
            del self._holds[slot]
            if self._pinning is None or self._pinning.gate.release(slot, streams):
                self._free.append(slot)


def find_slot(address: int) -> tuple[SlotRing, int] | None:
    """The ring with a pinning, and its slot, in which an address of a held batch lies."""
    for ring in (*_pinned_rings, *_retired):
        slot = ring.slot_of(address)
        if slot is not None:
            return ring, slot
    return None


def take_apart_retired() -> None:
    """Let the memory of closed rings go, where nobody holds or reads it any more.

    For the thread that takes batches, as `SlotRing.settle` is.
    """
    if not _retired or not _taking_apart.acquire(blocking=False):
        return  # another loader's thread is at it
    try:
        for ring in tuple(_retired):  # a collector may close another ring meanwhile
            if ring._take_apart():
                _retired.remove(ring)
    finally:
        _taking_apart.release()


_pinned_rings: weakref.WeakSet[SlotRing] = weakref.WeakSet()
_retired: list[SlotRing] = []
_taking_apart = threading.Lock()


def _no_streams() -> tuple[StreamKey, ...]:
    return ()


class SlotWriter:
    """The ring as a writer of rows sees it."""

    def __init__(self, fd: int, shape: RingShape) -> None:
        mapping = mmap.mmap(fd, shape.slot_bytes * shape.slot_count)
        memory = np.frombuffer(mapping, dtype=np.uint8)
        self._layout = shape.layout
        self._columns: list[list[npt.NDArray[Any]]] = [
            shape.layout.views(memory[slot * shape.slot_bytes : (slot + 1) * shape.slot_bytes])
            for slot in range(shape.slot_count)
        ]

    def write(self, slot: int, row: int, sample: Any) -> list[Any] | None:
        """Write one row. Returns the sample's objects, or None when it does not fit."""
        return self._layout.write_row(sample, self._columns[slot], row)
