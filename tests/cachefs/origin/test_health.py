"""When an origin counts as down, how it is probed, and when it is back."""

from __future__ import annotations

import pytest

from gpufeed.cachefs.origin.health import (
    FAILING_S,
    FAILURES_MAX,
    PROBE_CAP_S,
    PROBE_FIRST_S,
    OriginHealth,
)


@pytest.fixture
def health():
    return OriginHealth(0.0)


def bring_down(health: OriginHealth, now_s: float = 0.0) -> float:
    for _ in range(FAILURES_MAX):
        assert not health.failed(now_s, probe=False)
    assert health.failed(now_s + FAILING_S, probe=False)
    return now_s + FAILING_S


def test_many_failures_at_once_are_not_enough(health):
    for _ in range(10 * FAILURES_MAX):
        assert not health.failed(1000.0, probe=False)
    assert health.admit(1000.0) == "pass"


def test_few_failures_over_a_long_time_are_not_enough(health):
    for i in range(FAILURES_MAX - 1):
        assert not health.failed(10.0 * i, probe=False)
    assert health.state == "healthy"


def test_a_success_begins_the_count_anew(health):
    for i in range(100):
        health.failed(float(i), probe=False)
        health.succeeded(float(i))
    assert health.state == "healthy"


def test_while_it_is_down_one_probe_at_a_time_goes_out_further_and_further_apart(health):
    now_s = bring_down(health)
    assert health.admit(now_s) == "wait"
    waits = []
    for _ in range(8):
        at_s = health.probe_at_s
        waits.append(at_s - now_s)
        assert health.admit(at_s - 0.01) == "wait"
        assert health.admit(at_s) == "probe"
        assert health.admit(at_s + 100.0) == "wait"
        now_s = at_s + 1.0
        assert not health.failed(now_s, probe=True)
    assert waits[0] == PROBE_FIRST_S
    assert waits == sorted(waits)
    assert waits[-1] == PROBE_CAP_S


def test_a_probe_that_is_answered_opens_it_for_all(health):
    now_s = bring_down(health)
    assert health.admit(now_s + 1.0) == "probe"
    assert health.succeeded(now_s + 2.0)
    assert health.admit(now_s + 2.0) == "pass"
    assert not health.succeeded(now_s + 3.0)
    bring_down(health, now_s + 4.0)
    assert health.probe_at_s == pytest.approx(now_s + 4.0 + FAILING_S + PROBE_FIRST_S)


def test_an_attempt_begun_before_it_went_down_may_bring_it_back(health):
    now_s = bring_down(health)
    assert health.succeeded(now_s)
    assert health.state == "healthy"


def test_stragglers_that_fail_do_not_end_a_probe(health):
    now_s = bring_down(health)
    assert health.admit(now_s + 1.0) == "probe"
    health.failed(now_s + 1.5, probe=False)
    assert health.state == "probing"


def test_a_probe_that_was_given_up_is_followed_by_another_at_once(health):
    now_s = bring_down(health)
    assert health.admit(now_s + 1.0) == "probe"
    health.probe_ended(now_s + 1.1)
    assert health.admit(now_s + 1.1) == "probe"
    health.succeeded(now_s + 2.0)
    health.probe_ended(now_s + 2.0)
    assert health.state == "healthy"
