"""Shuffling through a window of shards: which samples are mixed with which. Pure.

Each shard is cut into n **slices**, runs of samples as equal as can be. **Segment** k of an epoch
is the first slice of its k-th shard, the second slice of the shard before it, and so on to the last
slice of the shard n - 1 before it; the samples of a segment are permuted as a whole. So n shards
are live at a time, each sample is mixed with those of n shards, and with each segment one shard
comes in at its beginning and one goes out at its end. What lies behind a shard's current slice is
not needed any more: together n shards take the room of (n + 1) / 2.

The first segments, and the last, have fewer shards: the first one is the first slice of one shard,
so that the first batch does not wait for more.

Permutations sort by a hash of our own (`gpufeed.loaders.order`), keyed by seed, epoch and segment:
the order is one function of (manifest, seed, epoch, window), as every order here. A segment takes
some 20 bytes a sample while it is read, an epoch 8 bytes a shard; nothing grows with the samples.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpufeed.cachefs.errors import UsageError
from gpufeed.loaders.order import RankRows, mix, permutation

SHARDS_MAX = 64
_NAME = re.compile(r"window\(([0-9]+)\)")

Numbers = npt.NDArray[np.int32]


def window(shards: int) -> str:
    """The `shuffle` of a `ShardDataset` that mixes the samples of so many shards.

    Raises:
        UsageError: not from 1 to `SHARDS_MAX`.
    """
    name = f"window({shards})"
    window_of(name)
    return name


def window_of(shuffle: str) -> int:
    """The window of a shuffle; 0: it has none.

    Raises:
        UsageError: out of range.
    """
    found = _NAME.fullmatch(shuffle)
    if found is None:
        return 0
    shards = int(found[1])
    if not 1 <= shards <= SHARDS_MAX:
        raise UsageError(f"a window of {shards} shards; it must be 1 to {SHARDS_MAX}")
    return shards


@dataclass(frozen=True, slots=True)
class Share:
    """Which positions of an epoch are a rank's.

    Attributes:
        rows: of each global batch; None: all that follow `start`.
        start: where the first global batch begins.
        steps: global batches that are made.
    """

    rows: RankRows | None = None
    start: int = 0
    steps: int = 0

    def mask(self, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Of the positions ``[first, first + count)``."""
        at = np.arange(first - self.start, first - self.start + count)
        if self.rows is None:
            return at >= 0
        row = at % self.rows.size
        inside = (row >= self.rows.begin) & (row < self.rows.end)
        return (at >= 0) & (at < self.steps * self.rows.size) & inside


def slice_of(count: int, number: int, shards: int) -> tuple[int, int]:
    """The samples ``[begin, end)`` of a shard's slice."""
    return number * count // shards, (number + 1) * count // shards


@dataclass(frozen=True, slots=True, eq=False)
class WindowEpoch:
    """One epoch's order.

    Attributes:
        shards: of the window, n.
        key: of (seed, epoch).
        shard_count: of the epoch.
        share: what is wanted.
        first: the first segment with something that is wanted.
        last: the last one.
        offset: position of the first sample of `first`.
    """

    shards: int
    key: int
    shard_count: int
    share: Share
    first: int
    last: int
    offset: int

    def members(self, segment: int) -> range:
        """The shards of a segment, by their places in the order."""
        return range(max(0, segment - self.shards + 1), min(segment, self.shard_count - 1) + 1)

    def slices(self, segment: int, counts: Sequence[int]) -> list[tuple[int, int]]:
        """What of each member is in it, of so many samples."""
        members = self.members(segment)
        return [
            slice_of(count, segment - place, self.shards)
            for place, count in zip(members, counts, strict=True)
        ]

    def permuted(
        self, segment: int, offset: int, slices: Sequence[tuple[int, int]]
    ) -> tuple[Numbers, Numbers]:
        """The wanted samples in order: which member, and number in that shard."""
        begins = np.array([begin for begin, _ in slices], np.int64)
        ends = np.cumsum([end - begin for begin, end in slices])
        order = permutation(mix(self.key, segment), int(ends[-1]))
        order = order[self.share.mask(offset, len(order))]
        which = np.searchsorted(ends, order, side="right")
        starts = np.concatenate(([0], ends[:-1]))
        number = order - starts[which] + begins[which]
        return which.astype(np.int32), number.astype(np.int32)


@dataclass(frozen=True, slots=True)
class WindowPart:
    """One shard, at its place in the order of an epoch."""

    shard: int
    place: int
    epoch: WindowEpoch


def window_parts(
    order: npt.NDArray[np.int64], counts: Sequence[int | None], shards: int, *, key: int,
    share: Share,
) -> Iterator[WindowPart]:  # fmt: skip
    """The shards of an epoch of which something is wanted.

    Args:
        order: shard numbers, as `epoch_shards` gives them.
        counts: samples of each shard; None may stand where `share` is everything from 0 on.
        shards: of the window.
        key: of (seed, epoch).
        share: what is wanted.
    """
    first, last, offset = 0, len(order) + shards - 2, 0
    if share.rows is not None or share.start:
        known = np.array([counts[shard] or 0 for shard in order], np.int64)
        ends = np.cumsum(_segment_sizes(known, shards))
        first = int(np.searchsorted(ends, share.start, side="right"))
        offset = int(ends[first - 1]) if first else 0
        if share.rows is not None:
            end = share.start + share.steps * share.rows.size
            last = min(last, int(np.searchsorted(ends, end, side="left")))
            if not share.steps:
                return
    epoch = WindowEpoch(shards, key, len(order), share, first, last, offset)
    for place in range(max(0, first - shards + 1), min(last, len(order) - 1) + 1):
        yield WindowPart(int(order[place]), place, epoch)


def _segment_sizes(counts: npt.NDArray[np.int64], shards: int) -> npt.NDArray[np.int64]:
    sizes = np.zeros(len(counts) + shards - 1, np.int64)
    for number in range(shards):
        length = (number + 1) * counts // shards - number * counts // shards
        sizes[number : number + len(counts)] += length
    return sizes
