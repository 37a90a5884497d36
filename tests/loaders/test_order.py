import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.loaders.order import (
    epoch_shards,
    mix,
    rank_parts,
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


@given(
    counts_lists,
    st.integers(1, 7),
    st.integers(1, 6),
    st.integers(0, 3),
)
def test_ranks_cut_every_global_batch_into_neighbouring_runs(counts, batch, world, epoch):
    order = epoch_shards(len(counts), seed=5, epoch=epoch, shuffle="shards")
    sequence = [(int(shard), i) for shard in order for i in range(counts[shard])]
    steps = step_count(sum(counts), batch_size=batch, world_size=world, drop_last=True)
    for rank in range(world):
        got = []
        for part in rank_parts(order, counts, batch_size=batch, rank=rank, world_size=world):
            assert part.ranges
            for low, high in part.ranges:
                assert 0 <= low < high <= counts[part.shard]
                got += [(part.shard, i) for i in range(low, high)]
        stride = batch * world
        want = []
        for step in range(steps):
            begin = step * stride + rank * batch
            want += sequence[begin : begin + batch]
        assert got == want


def test_the_only_rank_reads_every_shard_whole():
    order = np.array([2, 0, 1])
    assert [(p.shard, p.ranges) for p in whole_parts(order)] == [(2, None), (0, None), (1, None)]


@pytest.mark.parametrize(
    ("total", "drop", "world", "want"),
    [(10, False, 1, 4), (10, True, 1, 3), (10, False, 2, 1), (0, False, 1, 0)],
)
def test_step_counts_follow_the_drop_rule(total, drop, world, want):
    assert step_count(total, batch_size=3, world_size=world, drop_last=drop) == want


@given(st.integers(0, 2**40), st.integers(0, 1000))
def test_samples_of_an_epoch_have_seeds_of_their_own(seed, epoch):
    seed_of = sample_seeds(seed, epoch)
    seeds = {seed_of(shard, index) for shard in range(20) for index in range(20)}
    assert len(seeds) == 400
    assert all(0 <= value < 2**64 for value in seeds)
