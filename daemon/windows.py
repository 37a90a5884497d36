"""What sessions may hold of the arena together. Pure."""

from __future__ import annotations

from gpufeed.cachefs.arena.pool import WINDOWS_RATIO
from gpufeed.cachefs.errors import CapacityError
from gpufeed.cachefs.units import format_bytes

WINDOW_EXTENTS_MIN = 4
WINDOW_DEFAULT_RATIO = 0.25


class Windows:
    """Extents granted to sessions, and what is left of them."""

    def __init__(self, slot_count: int, extent_bytes: int) -> None:
        self._limit = 0
        self.limit(slot_count)
        self._default = max(WINDOW_EXTENTS_MIN, int(slot_count * WINDOW_DEFAULT_RATIO))
        self._extent_bytes = extent_bytes
        self._granted = 0

    def limit(self, slot_count: int) -> None:
        """So many slots may be used from now on; what is granted stays granted."""
        self._limit = int(slot_count * WINDOWS_RATIO)

    def grant(self, window_bytes: int, *, whole: bool = False) -> int:
        """Extents granted for a wish of `window_bytes` (0: the default); maybe fewer than wished.

        No session gets more than an eighth of the whole, nor more than a quarter of what is left,
        so that the first do not starve those that follow: eight ranks a node are common. One that
        needs its window `whole` gets it, or nothing.

        Raises:
            CapacityError: not even `WINDOW_EXTENTS_MIN` are left, or not the whole window.
        """
        wish = -(-window_bytes // self._extent_bytes) if window_bytes > 0 else self._default
        left = self._limit - self._granted
        if whole and max(wish, WINDOW_EXTENTS_MIN) > left:
            raise CapacityError(
                f"a window of {format_bytes(wish * self._extent_bytes)} is needed whole; of the "
                f"arena's {format_bytes(self._limit * self._extent_bytes)} for sessions "
                f"{format_bytes(left * self._extent_bytes)} are free: raise arena.size_bytes, or "
                "read with a smaller window"
            )
        if left < WINDOW_EXTENTS_MIN:
            raise CapacityError(
                f"the arena's {format_bytes(self._limit * self._extent_bytes)} for sessions are "
                f"taken, and one needs at least "
                f"{format_bytes(WINDOW_EXTENTS_MIN * self._extent_bytes)}: raise arena.size_bytes"
            )
        granted = wish if whole else min(wish, self._limit // 8, left // 4)
        granted = max(WINDOW_EXTENTS_MIN, granted)
        self._granted += granted
        return granted

    def give_back(self, extents: int) -> None:
        """A session ended."""
        self._granted -= extents
