"""When single ranges of a shard become a fill of the whole. Pure; one reader's memory.

A reader that goes through a shard from its start, or has touched more than half of it, will
probably want the rest: fetched whole, the shard is verified as a whole, kept, and shared. A reader
of a footer and some columns stays with ranges.
"""

from __future__ import annotations

# A header is sniffed in the first extents; who reads on after so many of them means it.
SEQUENTIAL_EXTENTS_MIN = 4
WHOLE_RATIO = 0.5


class Touched:
    """The extents of one shard that one reader has asked for."""

    def __init__(self, extent_count: int) -> None:
        self._count = extent_count
        self._seen: set[int] = set()
        self._run = 0

    def note(self, extent: int) -> bool:
        """`extent` is asked for; returns whether the whole shard should be filled."""
        self._seen.add(extent)
        if extent == self._run:
            self._run += 1
        is_sequential = self._run >= SEQUENTIAL_EXTENTS_MIN
        return is_sequential or len(self._seen) > WHOLE_RATIO * self._count
