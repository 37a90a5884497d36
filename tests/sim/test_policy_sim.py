"""Seeded runs of the simulated node: the policy keeps within a hundredth of what is possible."""

from __future__ import annotations

import pytest

from gpufeed.bench.sim.deciders import POLICIES, make_decider
from gpufeed.bench.sim.offline import fractional_bytes, min_bytes
from gpufeed.bench.sim.simulator import Outcome, Simulator
from gpufeed.bench.sim.workload import Workload, make_workload

SHARDS = 500


def workload(jobs: int, sizes="equal", speeds="equal", epochs: int = 8, seed: int = 1) -> Workload:
    return make_workload(
        jobs=jobs, sizes=sizes, speeds=speeds, shard_count=SHARDS, epoch_count=epochs, seed=seed
    )


def run(work: Workload, policy: str, cache_ratio: float, seed: int = 1) -> tuple[Outcome, int]:
    capacity = int(cache_ratio * work.total_bytes) // 4096 * 4096
    decider = make_decider(policy, seed=seed, capacity_bytes=capacity, shard_count=SHARDS)
    simulator = Simulator(work, decider, capacity_bytes=capacity, origin_ratio=0.6, seed=seed)
    return simulator.run(), capacity


@pytest.mark.parametrize("cache_ratio", [0.1, 0.5, 0.8])
def test_one_job_fetches_what_min_fetches_and_trains_as_with_never_evict(cache_ratio) -> None:
    work = workload(1)
    ours, capacity = run(work, "gpufeed", cache_ratio)
    never, _ = run(work, "never-evict", cache_ratio)
    assert ours.origin_bytes == min_bytes(ours.trace, work.sizes, capacity)
    assert ours.au_ratio == never.au_ratio
    assert ours.written_bytes == never.written_bytes


@pytest.mark.parametrize("sizes", ["equal", "lognormal"])
@pytest.mark.parametrize("speeds", ["equal", "unequal"])
def test_two_jobs_fetch_within_two_hundredths_of_the_least(sizes, speeds) -> None:
    # The benchmark holds it to one, on datasets and lives three times as large.
    work = workload(2, sizes, speeds)
    ours, capacity = run(work, "gpufeed", 0.5)
    never, _ = run(work, "never-evict", 0.5)
    assert ours.origin_bytes <= 1.02 * min_bytes(ours.trace, work.sizes, capacity)
    assert ours.origin_bytes < 0.8 * never.origin_bytes
    assert ours.au_ratio >= never.au_ratio


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_beats_the_bound_and_the_same_seed_is_the_same_run(policy: str) -> None:
    work = workload(3, "lognormal", "unequal", epochs=2)
    first, capacity = run(work, policy, 0.3)
    second, _ = run(work, policy, 0.3)
    assert first == second
    assert first.origin_bytes >= fractional_bytes(first.trace, work.sizes, capacity)
    assert 0 < first.au_ratio <= 1


def test_lru_on_a_permuted_epoch_reaches_its_closed_form() -> None:
    # One job, one window at a time: hits are c + (1 - c) ln(1 - c) of an epoch, 0.153 at c = 0.5.
    work = workload(1, epochs=12)
    lru, _ = run(work, "lru", 0.5)
    epochs_bytes = 11 * work.total_bytes
    hits = 1 - (lru.origin_bytes - work.total_bytes) / epochs_bytes
    assert hits == pytest.approx(0.153, abs=0.02)


def test_a_workload_follows_from_its_seed() -> None:
    assert workload(4, "lognormal", "unequal") == workload(4, "lognormal", "unequal")
    assert workload(4, seed=1) != workload(4, seed=2)
    jobs = workload(8).jobs
    assert jobs[0].arrives_s == 0
    assert any(job.read_count < job.epoch_count * SHARDS for job in jobs), "nobody is killed"
