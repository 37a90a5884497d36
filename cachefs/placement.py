"""Which bytes of which source object belong into which extents. Pure.

A fill is a list of **pieces of work** in order of the shard: one request each. A large object is
cut into parts of whole extents; a small object of a virtual shard is one request, and may touch
one extent or straddle two. `zero_ranges` are the gaps that no source covers: slots are reused, so
they must be cleared, or an earlier tenant's bytes would be cached as padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpufeed.cachefs.model import ObjectInfo, ShardSpec
from gpufeed.cachefs.units import BLOCK_BYTES, round_up


@dataclass(frozen=True, slots=True)
class Target:
    """Bytes ``[begin, end)`` of one extent."""

    extent: int
    begin_bytes: int
    end_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """One request: the object's bytes from `begin_bytes` on go to `targets`, in order.

    `whole` tells that it fetches the whole object, whose checksum can then be compared at once.
    """

    info: ObjectInfo
    begin_bytes: int
    targets: tuple[Target, ...]
    whole: bool

    @property
    def size_bytes(self) -> int:
        """Bytes to receive."""
        return sum(t.end_bytes - t.begin_bytes for t in self.targets)


def extent_length(spec: ShardSpec, extent: int, extent_bytes: int) -> int:
    """Bytes of the shard in this extent; below `extent_bytes` in the last one only."""
    return min(extent_bytes, spec.size_bytes - extent * extent_bytes)


def _targets(begin: int, end: int, extent_bytes: int) -> tuple[Target, ...]:
    targets = []
    while begin < end:
        extent, inside = divmod(begin, extent_bytes)
        stop = min(end, (extent + 1) * extent_bytes)
        targets.append(Target(extent, inside, inside + stop - begin))
        begin = stop
    return tuple(targets)


def works(spec: ShardSpec, extent_bytes: int, part_bytes: int) -> Iterator[Work]:
    """All requests that fill the shard, in ascending order of place."""
    step = max(extent_bytes, part_bytes // extent_bytes * extent_bytes)
    for source in spec.sources:
        size = source.info.size_bytes
        begin = 0
        while begin < size:
            # Cut where extents end, so that a part's bytes complete whole extents.
            place = source.offset_bytes + begin
            stop = min(size, (place // step + 1) * step - source.offset_bytes)
            if size <= part_bytes:
                stop = size
            targets = _targets(place, source.offset_bytes + stop, extent_bytes)
            yield Work(source.info, begin, targets, whole=stop - begin == size)
            begin = stop


def works_of_extents(spec: ShardSpec, first: int, count: int, extent_bytes: int) -> Iterator[Work]:
    """The requests that fill extents ``[first, first + count)`` and nothing else."""
    low = first * extent_bytes
    high = min(spec.size_bytes, (first + count) * extent_bytes)
    for source in spec.sources:
        begin = max(low, source.offset_bytes)
        end = min(high, source.offset_bytes + source.info.size_bytes)
        if begin < end:
            yield Work(
                source.info,
                begin - source.offset_bytes,
                _targets(begin, end, extent_bytes),
                whole=end - begin == source.info.size_bytes,
            )


def zero_ranges(spec: ShardSpec, extent_bytes: int) -> dict[int, list[tuple[int, int]]]:
    """For each extent, the half-open ranges to clear: gaps, and the tail up to a disk block."""
    gaps: dict[int, list[tuple[int, int]]] = {}
    at = 0
    ends = [(s.offset_bytes, s.offset_bytes + s.info.size_bytes) for s in spec.sources]
    padded = round_up(spec.size_bytes, BLOCK_BYTES)
    for begin, end in [*ends, (padded, padded)]:
        for target in _targets(at, begin, extent_bytes):
            gaps.setdefault(target.extent, []).append((target.begin_bytes, target.end_bytes))
        at = max(at, end)
    return gaps
