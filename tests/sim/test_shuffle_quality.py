"""How well samples are mixed: window(n), a full permutation, and webdataset's shuffle buffer.

512 shards of 50 samples, each of one class of eight: the worst that a writer of shards can
do. Measures, over 20 epochs:

- **entropy**: of the classes within a batch of 100 samples, averaged, over that of a full
  permutation. It says how much a batch tells of the whole data set, which is what shuffling is for;
- **chi-squared** of positions: how often each sample comes in each tenth of the epoch, against
  equally often, over its degrees of freedom (1 where every place is as likely as any);
- **neighbours**: how often two samples that follow each other are of one shard.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from webdataset import filters

from gpufeed.loaders.order import epoch_shards, mix, permutation
from gpufeed.loaders.segments import Share, window_parts

SHARDS, SAMPLES, CLASSES, BATCH, EPOCHS = 512, 50, 8, 100, 20
TOTAL = SHARDS * SAMPLES
Order = Callable[[int], np.ndarray]


def full(epoch: int) -> np.ndarray:
    return permutation(mix(9, epoch), TOTAL)


def windowed(shards: int) -> Order:
    counts = [SAMPLES] * SHARDS

    def order(epoch: int) -> np.ndarray:
        listed = epoch_shards(SHARDS, seed=9, epoch=epoch, shuffle="shards")
        parts = window_parts(listed, counts, shards, key=mix(9, epoch), share=Share())
        parts = list(parts)
        whole = parts[0].epoch
        found: list[np.ndarray] = []
        for segment in range(whole.last + 1):
            members = whole.members(segment)
            slices = whole.slices(segment, [SAMPLES] * len(members))
            which, number = whole.permuted(segment, 0, slices)
            found.append(listed[np.array(members)[which]] * SAMPLES + number)
        return np.concatenate(found)

    return order


def buffered(samples: int) -> Order:
    """webdataset: shards shuffled, then a buffer of so many samples."""

    def order(epoch: int) -> np.ndarray:
        draw = random.Random(epoch)
        shards = draw.sample(range(SHARDS), SHARDS)
        stream: Iterator[int] = (s * SAMPLES + i for s in shards for i in range(SAMPLES))
        return np.fromiter(filters.shuffle(samples, rng=draw)(stream), np.int64)

    return order


def measure(order: Order) -> dict[str, float]:
    entropies, same = [], []
    tenths = np.zeros((TOTAL, 10))
    for epoch in range(EPOCHS):
        found = order(epoch)
        assert len(np.unique(found)) == TOTAL
        shards = found // SAMPLES
        classes = (shards % CLASSES).reshape(-1, BATCH)
        for batch in classes:
            p = np.bincount(batch, minlength=CLASSES) / BATCH
            entropies.append(-np.sum(p[p > 0] * np.log(p[p > 0])))
        same.append(np.mean(shards[1:] == shards[:-1]))
        tenths[found, np.arange(TOTAL) * 10 // TOTAL] += 1
    expected = EPOCHS / 10
    chi2 = np.sum((tenths - expected) ** 2 / expected) / (TOTAL * 9)
    return {"entropy": np.mean(entropies), "chi2": chi2, "same_shard": np.mean(same)}


@pytest.fixture(scope="module")
def ideal() -> dict[str, float]:
    return measure(full)


def test_a_full_permutation_is_what_the_measures_call_one(ideal) -> None:
    assert ideal["chi2"] == pytest.approx(1, abs=0.02)
    assert ideal["same_shard"] == pytest.approx(1 / SHARDS, rel=0.1)


@pytest.mark.parametrize(("shards", "at_least"), [(8, 0.77), (16, 0.88), (32, 0.95), (64, 0.98)])
def test_windows_beside_buffers_of_as_many_samples(ideal, shards, at_least) -> None:
    ours, theirs = measure(windowed(shards)), measure(buffered(shards * SAMPLES))
    ratio, their_ratio = (m["entropy"] / ideal["entropy"] for m in (ours, theirs))
    print(f"window({shards}): entropy {ratio:.3f}, {ours}; buffer {their_ratio:.3f}, {theirs}")
    assert ratio > at_least
    assert ours["chi2"] == pytest.approx(1, abs=0.1)
