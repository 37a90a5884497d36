"""When a part is worth asking for again."""

from __future__ import annotations

import math

import pytest

from gpufeed.cachefs.origin import hedge
from gpufeed.cachefs.origin.hedge import HedgePolicy, Progress
from gpufeed.cachefs.units import KIB, MIB

PART = 8 * MIB


def learned(ratio_max: float = 0.05, count: int = 200) -> HedgePolicy:
    """An origin with a first byte after 20 ms, some after 60, and 80 MiB/s."""
    policy = HedgePolicy(ratio_max)
    for i in range(count):
        policy.finished(0.06 if i % 8 == 0 else 0.02, PART / (80 * MIB), PART)
    return policy


def stalled(lately_bytes: int = 0) -> Progress:
    return Progress(
        size_bytes=PART, remaining_bytes=PART // 2, lately_s=0.5, lately_bytes=lately_bytes
    )


def test_nothing_is_late_before_enough_was_seen():
    assert learned(count=hedge.SAMPLES_MIN - 1).late_s(PART) is None
    assert learned(count=hedge.SAMPLES_MIN).late_s(PART) is not None


def test_late_is_a_multiple_of_what_the_slow_ones_take():
    late_s = learned().late_s(PART)
    assert late_s == pytest.approx(hedge.LATE_RATIO * (0.06 + 0.1))


def test_a_small_object_has_its_own_measure_and_a_least():
    policy = HedgePolicy(0.05)
    for _ in range(100):
        policy.finished(0.01, 0.0001, 10 * KIB)
    assert policy.late_s(10 * KIB) == hedge.LATE_MIN_S
    assert policy.late_s(PART) is None  # of bodies that long nothing is known


def test_a_body_that_took_no_time_counts_too():
    policy = HedgePolicy(0.05)
    for _ in range(hedge.SAMPLES_MIN):
        policy.finished(0.01, 0.0, PART)
    assert policy.late_s(PART) == hedge.LATE_MIN_S


def test_what_is_usual_follows_the_last_ones():
    policy = learned()
    before_s = policy.late_s(PART)
    for _ in range(hedge.SAMPLES_MAX):
        policy.finished(0.02, 1.0, PART)
    assert policy.late_s(PART) > 5 * before_s


def test_a_part_that_does_not_move_is_hedged():
    assert learned().judge(stalled(), 0) == 0.0


def test_a_part_that_will_be_done_before_a_fresh_request_is_let_be():
    policy = learned()
    # The other half would take half a second as well, a fresh request 70 ms: no.
    assert policy.judge(stalled(PART // 2), 0) == 0.0
    nearly = Progress(size_bytes=PART, remaining_bytes=PART // 100, lately_s=0.5,
                      lately_bytes=PART // 2)  # fmt: skip
    again_s = policy.judge(nearly, 0)
    assert 0 < again_s < math.inf
    assert policy.judge(nearly, hedge.CHECKS_MAX) == math.inf


def test_hedges_are_a_part_of_all_requests():
    policy = learned(ratio_max=0.0625, count=1000)
    hedged = sum(policy.judge(stalled(), 0) == 0.0 for _ in range(100))
    assert hedged == hedge.BURST_COUNT
    for _ in range(80):
        policy.finished(0.02, 0.1, PART)
    hedged = sum(policy.judge(stalled(), 0) == 0.0 for _ in range(100))
    assert hedged == 5
    policy.refund()
    assert policy.judge(stalled(), 0) == 0.0


def test_with_a_ratio_of_nothing_nothing_is_hedged():
    assert learned(ratio_max=0.0).late_s(PART) is None
