import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.loaders.order import (
    epoch_shards,
    mix,
    rank_parts,
    rank_rows,
    sample_seeds,
    step_count,
    whole_parts,
)

counts_lists = st.lists(st.integers(0, 40), min_size=0, max_size=30)


@given(st.integers(0, 500), st.integers(0, 2**63), st.integers(0, 10_000))
def test_every_epoch_is_a_permutation_of_the_shards(count, seed, epoch):
    order = epoch_shards(count, seed=seed, epoch=epoch, shuffle="shards")
    assert sorted(order.tolist()) == list(range(count))
    again = epoch_shards(count, seed=seed, epoch=epoch, shuffle="shards")
    assert order.tolist() == again.tolist()


def test_without_shuffle_the_order_is_the_listing():
    assert epoch_shards(5, seed=9, epoch=3, shuffle="none").tolist() == [0, 1, 2, 3, 4]


def test_epochs_and_seeds_give_different_orders():
    orders = {
        tuple(epoch_shards(50, seed=seed, epoch=epoch, shuffle="shards").tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_the_order_of_a_version_never_changes():
    # A running job must not see another order after an upgrade: change ORDER_VERSION instead.
    order = epoch_shards(10, seed=1, epoch=2, shuffle="shards").tolist()
    assert order == [1, 7, 6, 8, 0, 4, 9, 5, 2, 3]
    assert mix(1, 2, 3) == 7702586659592502839
    assert sample_seeds(1, 2)(3, 4) == mix(1, 1, 2, 3, 4)


def read(parts, counts) -> list[tuple[int, int]]:
    """The samples of a rank's parts, in order."""
    got = []
    for part in parts:
        assert part.ranges
        for low, high in part.ranges:
            assert 0 <= low < high <= counts[part.shard]
            got += [(part.shard, i) for i in range(low, high)]
    return got


def global_batches(order, counts, size, world_size, start=0) -> list[list[tuple[int, int]]]:
    """What all ranks read, put together step by step."""
    steps = max(0, sum(counts) - start) // size
    batches = [[] for _ in range(steps)]
    for rank in range(world_size):
        rows = rank_rows(size, rank=rank, world_size=world_size)
        got = read(rank_parts(order, counts, rows=rows, start=start), counts)
        assert len(got) == steps * rows.count
        for step in range(steps):
            batches[step] += got[step * rows.count : (step + 1) * rows.count]
    return batches


@given(counts_lists, st.integers(1, 40), st.data(), st.integers(0, 3))
def test_a_global_batch_is_the_same_on_every_world(counts, size, data, epoch):
    order = epoch_shards(len(counts), seed=5, epoch=epoch, shuffle="shards")
    sequence = [(int(shard), i) for shard in order for i in range(counts[shard])]
    want = [sequence[k * size : (k + 1) * size] for k in range(len(sequence) // size)]
    world_size = data.draw(st.integers(1, min(size, 64)))
    assert global_batches(order, counts, size, world_size) == want


@given(counts_lists, st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 9)),
       min_size=1, max_size=5))  # fmt: skip
def test_changes_of_world_and_batch_lose_and_repeat_nothing(counts, legs):
    """Each leg: a world, samples a rank and batch, and the steps until the next change."""
    order = epoch_shards(len(counts), seed=5, epoch=0, shuffle="shards")
    sequence = [(int(shard), i) for shard in order for i in range(counts[shard])]
    taken = []
    for world_size, batch, steps in legs:
        size = world_size * batch
        for got in global_batches(order, counts, size, world_size, start=len(taken))[:steps]:
            taken += got
    assert taken == sequence[: len(taken)]
    assert sum(counts) - len(taken) >= 0


@given(counts_lists, st.integers(0, 1300))
def test_the_only_rank_goes_on_anywhere(counts, start):
    order = epoch_shards(len(counts), seed=5, epoch=0, shuffle="shards")
    sequence = [(int(shard), i) for shard in order for i in range(counts[shard])]
    start = min(start, len(sequence))
    got = []
    for part in whole_parts(order, counts, start=start):
        low, high = part.ranges[0] if part.ranges else (0, counts[part.shard])
        got += [(part.shard, i) for i in range(low, high)]
    assert got == sequence[start:]


@given(st.integers(1, 200), st.integers(1, 64))
def test_ranks_differ_by_at_most_one_row(size, world_size):
    rows = [rank_rows(size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [r.begin for r in rows] == [0, *(r.end for r in rows[:-1])]
    assert rows[-1].end == size
    assert max(r.count for r in rows) - min(r.count for r in rows) <= 1
    if size % world_size == 0:
        assert {r.count for r in rows} == {size // world_size}


def test_the_only_rank_reads_every_shard_whole():
    order = np.array([2, 0, 1])
    assert [(p.shard, p.ranges) for p in whole_parts(order)] == [(2, None), (0, None), (1, None)]


@pytest.mark.parametrize(
    ("total", "drop", "world", "want"),
    [(10, False, 1, 4), (10, True, 1, 3), (10, False, 2, 1), (0, False, 1, 0)],
)
def test_step_counts_follow_the_drop_rule(total, drop, world, want):
    assert step_count(total, size=3 * world, world_size=world, drop_last=drop) == want


@given(st.integers(0, 2**40), st.integers(0, 1000))
def test_samples_of_an_epoch_have_seeds_of_their_own(seed, epoch):
    seed_of = sample_seeds(seed, epoch)
    seeds = {seed_of(shard, index) for shard in range(20) for index in range(20)}
    assert len(seeds) == 400
    assert all(0 <= value < 2**64 for value in seeds)
