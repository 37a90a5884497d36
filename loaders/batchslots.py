"""The ring of batch slots: preallocated shared memory that workers write and the trainer reads.

One memfd. Its size is fixed once, from the first sample's layout; pages appear only when a slot is
first written, and free slots are handed out last-in-first-out, so only as many are ever touched as
are needed at a time. A slot is in exactly one state: *free*, *filling* (the feeder's, named in
units under way), or *held* by a batch of the trainer. A held slot comes back when the last tensor
or array over it is gone; batches beyond `held_max` are copied to the heap instead and give their
slot back at once, so holding batches is always safe and memory is bounded.

Threads: a lock guards the states. The weak-reference callback that ends a hold may run anywhere,
even inside the lock, so it only appends to a deque. Workers map the same memory through
`SlotWriter`; a slot has one writer a row, and nobody reads it before the row's result came back.
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

from gpufeed.cachefs.units import BLOCK_BYTES, GIB, round_up
from gpufeed.loaders.layout import Layout

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
    """Owner of the memfd, in the trainer's process."""

    def __init__(self, ring_bytes_max: int = RING_BYTES_MAX) -> None:
        self.fd = os.memfd_create("gpufeed-batches", os.MFD_CLOEXEC)
        self.shape: RingShape | None = None
        self.held_max = 0
        self._ring_bytes_max = ring_bytes_max
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._memory: npt.NDArray[np.uint8] | None = None
        self._holds: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}
        self._returned: deque[int] = deque()

    def configure(self, layout: Layout, lookahead: int) -> bool:
        """Size the ring for `lookahead` filling batches and the held ones. False: too large."""
        assert self.shape is None
        slot_bytes = round_up(layout.slot_bytes, BLOCK_BYTES)
        wanted = lookahead + HELD_SLOTS_MAX
        count = min(wanted, self._ring_bytes_max // slot_bytes)
        if count < lookahead + HELD_SLOTS_MIN:
            return False
        os.ftruncate(self.fd, count * slot_bytes)
        mapping = mmap.mmap(self.fd, count * slot_bytes)
        self._memory = np.frombuffer(mapping, dtype=np.uint8)
        self.held_max = count - lookahead
        self._free = list(range(count - 1, -1, -1))
        self.shape = RingShape(layout, slot_bytes, count)
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
    def free_count(self) -> int:
        """Slots that nobody has."""
        with self._lock:
            self._reclaim()
            return len(self._free)

    def read(self, slot: int) -> npt.NDArray[np.uint8]:
        """A filling slot's bytes, to be read before it is lent or given back."""
        return self._slice(slot)

    def lend(self, slot: int) -> npt.NDArray[np.uint8] | None:
        """A filling slot's bytes as an array of their own; held until its last view is gone.

        None when `held_max` slots are held already: the caller copies and gives the slot back.
        """
        with self._lock:
            self._reclaim()
            if len(self._holds) >= self.held_max:
                return None
            # Over a memoryview, so that numpy's views keep this array itself as their base.
            owner = np.frombuffer(self._slice(slot).data, dtype=np.uint8)
            returned = self._returned
            self._holds[slot] = weakref.ref(owner, lambda _: returned.append(slot))
            return owner

    def close(self) -> None:
        """Close the descriptor. Batches that are still held keep their memory."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._memory = None

    def _slice(self, slot: int) -> npt.NDArray[np.uint8]:
        assert self._memory is not None
        assert self.shape is not None
        size = self.shape.slot_bytes
        return self._memory[slot * size : (slot + 1) * size]

    def _reclaim(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            del self._holds[slot]
            self._free.append(slot)


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
