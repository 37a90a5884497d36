"""Shuffling through a window of shards: which samples are mixed with which. Pure.

The shards of an epoch, in its order, are cut into **blocks** of 1, 2, 4 … n shards, then n each;
the samples of a block are permuted as a whole. So a sample is mixed with those of n shards, and at
most the shards of two blocks are live at a time. The first block ramps within its one shard, by
pieces of 16, 32, 64 … samples, so that the first batch needs no more of it than its beginning.

Permutations sort by a hash of our own (`gpufeed.loaders.order`), keyed by seed, epoch and block:
the order is one function of (manifest, seed, epoch, window), as every order here. A block takes
some 20 bytes a sample while it is read; nothing grows with the dataset.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpufeed.cachefs.errors import UsageError
from gpufeed.loaders.order import RankRows, mix, permutation

FIRST_SAMPLES = 16
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


@dataclass(frozen=True, slots=True)
class Block:
    """Shards whose samples are permuted together.

    Attributes:
        shards: their numbers, in the order of the epoch.
        key: of its permutations.
        offset: position of its first sample; known where `share` needs it.
        share: what of it is wanted.
        is_first: it ramps.
    """

    shards: tuple[int, ...]
    key: int
    offset: int
    share: Share
    is_first: bool

    def permuted(self, counts: Sequence[int]) -> tuple[Numbers, Numbers]:
        """The wanted samples in order: which of the block's shards, and number in that shard."""
        order = permutation(self.key, sum(counts))
        order = order[self.share.mask(self.offset, len(order))]
        ends = np.cumsum(counts)
        which = np.searchsorted(ends, order, side="right")
        starts = ends - np.asarray(counts)
        return which.astype(np.int32), (order - starts[which]).astype(np.int32)

    def piece(self, begin: int, end: int) -> Numbers:
        """The wanted samples among ``[begin, end)`` of the first block's shard, in order."""
        order = permutation(mix(self.key, begin), end - begin)
        order = order[self.share.mask(self.offset + begin, len(order))]
        return (order + begin).astype(np.int32)


def piece_end(begin: int) -> int:
    """Where a piece of the first block's ramp ends that begins here: at 16, 48, 112, 240, …."""
    return 2 * begin + FIRST_SAMPLES


@dataclass(frozen=True, slots=True)
class WindowPart:
    """One shard of a block, for whoever plans shard by shard."""

    shard: int
    block: Block


def window_parts(
    order: npt.NDArray[np.int64], counts: Sequence[int | None], shards: int, *, key: int,
    share: Share,
) -> Iterator[WindowPart]:  # fmt: skip
    """The shards of an epoch from `share.start` on, each with its block.

    Args:
        order: shard numbers, as `epoch_shards` gives them.
        counts: samples of each shard; None may stand where `share` is everything from 0 on.
        shards: of the window.
        key: of (seed, epoch).
        share: what is wanted.
    """
    at = offset = number = 0
    needs_counts = share.rows is not None or share.start > 0
    end = share.start + (share.steps * share.rows.size if share.rows is not None else 0)
    while at < len(order):
        size = min(1 << number, shards)
        members = tuple(int(shard) for shard in order[at : at + size])
        block = Block(members, mix(key, number), offset, share, is_first=number == 0)
        at, number = at + size, number + 1
        if needs_counts:
            offset += sum(counts[shard] or 0 for shard in members)
            if offset <= share.start:
                continue
            if share.rows is not None and block.offset >= end:
                return
        for shard in members:
            yield WindowPart(shard, block)
