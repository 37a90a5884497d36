"""A range of a file as one view: in place while its extents lie in neighbouring slots, else a copy.

The extents come in order, each lent; from then on the lease is this object's. A range whose
extents are not neighbours, or that comes while views hold as many extents as they may, is copied to
the heap as it comes, each extent given back at once. One thread.
"""

from __future__ import annotations

from gpufeed.cachefs.leases import Leases, Owner
from gpufeed.cachefs.samples import ReadStats


class RangeView:
    """Bytes ``[begin_bytes, end_bytes)`` of a file; not empty."""

    def __init__(self, leases: Leases, begin_bytes: int, end_bytes: int, stats: ReadStats) -> None:
        self._leases = leases
        self._begin = begin_bytes % leases.extent_bytes
        self._left = self._size = end_bytes - begin_bytes
        self._stats = stats
        self._owners: list[Owner] = []
        self._slot = -1
        self._heap: bytearray | None = None

    def take(self, seq: int, slot: int, length_bytes: int) -> None:
        """The next extent was lent: `length_bytes` of `slot`."""
        leases = self._leases
        leases.take(seq)
        if self._heap is None:
            owner = leases.own(seq, slot, length_bytes)
            if owner is not None:
                if not self._owners:
                    self._slot = slot
                if slot == self._slot + len(self._owners):
                    self._owners.append(owner)
                    return
                self._stats.straddled_count += 1
                self._stats.straddled_bytes += self._size
                self._copy_so_far()
                # The owner gives the extent back.
                self._append(slot, length_bytes)
                return
            self._stats.copied_count += 1
            self._stats.copied_bytes += self._size
            self._copy_so_far()
        self._append(slot, length_bytes)
        leases.give_back(seq)

    def _copy_so_far(self) -> None:
        self._heap = bytearray()
        for i, owner in enumerate(self._owners):
            self._append(self._slot + i, len(owner))
        self._owners.clear()

    def _append(self, slot: int, length_bytes: int) -> None:
        assert self._heap is not None
        end = min(length_bytes, self._begin + self._left)
        self._heap += self._leases.copy(slot, self._begin, end)
        self._left -= end - self._begin
        self._begin = 0

    def view(self) -> memoryview:
        """The range, once every extent was taken."""
        self._stats.ranges_count += 1
        if self._heap is not None:
            assert len(self._heap) == self._size
            return memoryview(self._heap).toreadonly()
        if len(self._owners) == 1:
            return self._owners[0].data[self._begin : self._begin + self._size]
        return self._leases.join(self._owners, self._slot, self._begin, self._size).data
