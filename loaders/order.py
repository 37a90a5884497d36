"""The order of samples of one epoch, as a pure function of (manifest, seed, epoch).

Shards are permuted by a hash of their number that is our own, so no upgrade of a library changes a
running order; `ORDER_VERSION` names it. The epoch's sequence is the samples of the shards in that
order. Global batch k is positions ``[k*B, (k+1)*B)`` of it; rank r takes its r-th run of them
(`RankRows`). So the composition of a global batch does not depend on ranks, workers, prefetch or
timing, and every rank makes the same number of steps: the incomplete last global batch is dropped
when there is more than one rank. A job that goes on at position `start` cuts its batches from
there.

The seed of a sample's randomness comes from (seed, epoch, shard number, number in the shard): the
same sample in the same epoch is the same to the pixel, wherever it lies in the order.

Pure: no I/O. Memory is 8 bytes a shard and a few ranges of the shard under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ORDER_VERSION = 1

Shuffle = str  # "shards", "none", or "window(n)" (`gpufeed.loaders.segments`)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The samples of one shard that a rank reads. `ranges` None: all, however many there are."""

    shard: int
    ranges: tuple[tuple[int, int], ...] | None = None


def _step(state: int, word: int) -> int:
    state = (state + (word & _MASK) + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * _FIRST) & _MASK
    state = ((state ^ (state >> 27)) * _SECOND) & _MASK
    return state ^ (state >> 31)


def mix(*words: int) -> int:
    """64 well-mixed bits of whole numbers (a chain of splitmix64 finalisers)."""
    state = 0
    for word in words:
        state = _step(state, word)
    return state


def epoch_shards(
    shard_count: int, *, seed: int, epoch: int, shuffle: Shuffle
) -> npt.NDArray[np.int64]:
    """The shard numbers in the order of `epoch`."""
    if shuffle == "none":
        return np.arange(shard_count, dtype=np.int64)
    return permutation(mix(ORDER_VERSION, seed, epoch), shard_count)


def permutation(key: int, count: int) -> npt.NDArray[np.int64]:
    """The numbers ``[0, count)`` in the order of a hash of them that `key` chooses."""
    base = np.uint64(key)
    hashed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + base
    hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(_FIRST)
    hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(_SECOND)
    hashed ^= hashed >> np.uint64(31)
    return np.argsort(hashed, kind="stable").astype(np.int64)


def sample_seeds(seed: int, epoch: int) -> Callable[[int, int], int]:
    """A function from (shard number, number in the shard) to 64 bits for a sample's transforms."""
    base = mix(ORDER_VERSION, seed, epoch)

    def sample_seed(shard: int, index: int) -> int:
        return _step(_step(base, shard), index)

    return sample_seed


@dataclass(frozen=True, slots=True)
class RankRows:
    """Rows ``[begin, end)`` of each global batch of `size` samples are one rank's."""

    begin: int
    end: int
    size: int

    @property
    def count(self) -> int:
        """Samples of the rank's batches."""
        return self.end - self.begin


def rank_rows(size: int, *, rank: int, world_size: int) -> RankRows:
    """A rank's rows; where the world does not divide `size`, ranks differ by at most one row."""
    return RankRows(rank * size // world_size, (rank + 1) * size // world_size, size)


def step_count(sample_count: int, *, size: int, world_size: int, drop_last: bool) -> int:
    """Global batches of `size` that are made of `sample_count` samples, on each rank alike."""
    if world_size > 1 or drop_last:
        return sample_count // size
    return -(-sample_count // size)


def whole_parts(
    order: npt.NDArray[np.int64], counts: Sequence[int | None] = (), *, start: int = 0
) -> Iterator[ShardPart]:
    """All samples from position `start` on: what the only rank of a job reads.

    Args:
        order: shard numbers, as `epoch_shards` gives them.
        counts: samples of each shard; looked at only up to the one that `start` lies in.
        start: samples to leave out.
    """
    for shard in order:
        if not start:
            yield ShardPart(int(shard))
            continue
        count = counts[shard]
        assert count is not None, "shards before the start are counted"
        if start < count:
            yield ShardPart(int(shard), ((start, count),))
        start = max(0, start - count)


def rank_parts(
    order: npt.NDArray[np.int64],
    counts: Sequence[int],
    *,
    rows: RankRows,
    start: int = 0,
) -> Iterator[ShardPart]:
    """What a rank reads, in order; shards that none of its slices touches are left out.

    Args:
        order: shard numbers, as `epoch_shards` gives them.
        counts: samples of each shard, by shard number.
        rows: the rank's rows of each global batch.
        start: position at which the first global batch begins.
    """
    steps = max(0, sum(counts) - start) // rows.size
    begin = -start  # of the shard, from where the first batch begins
    for shard in order:
        if not counts[shard]:
            continue
        end = begin + counts[shard]
        ranges = []
        step = max(0, (begin - rows.end) // rows.size + 1)
        while step < steps:
            low = step * rows.size + rows.begin
            if low >= end:
                break
            ranges.append((max(low, begin) - begin, min(low + rows.count, end) - begin))
            step += 1
        if ranges:
            yield ShardPart(int(shard), tuple(ranges))
        begin = end
