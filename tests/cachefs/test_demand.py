"""The demand rate: a starved session looks as fast as it would be."""

from __future__ import annotations

import pytest

from gpufeed.cachefs.demand import EXTENTS_MIN, DemandRate


def consume(rate: DemandRate, count: int, *, each_s: float, stall_s: float, now_s: float) -> float:
    """The session holds one extent, works on it, gives it back, and waits for the next."""
    for _ in range(count):
        rate.seeking(True, now_s)
        now_s += stall_s
        rate.seeking(False, now_s)
        rate.published(now_s)
        now_s += each_s
        rate.released(1, now_s)
    return now_s


@pytest.mark.parametrize("stall_s", [0.0, 0.1, 10.0])
def test_stalls_do_not_count(stall_s: float) -> None:
    rate = DemandRate()
    consume(rate, 100, each_s=0.5, stall_s=stall_s, now_s=7.0)
    assert rate.extents_per_s == pytest.approx(2.0, rel=0.02)


def test_half_a_sample_in_hand_is_a_stall_too() -> None:
    rate, now_s = DemandRate(), 0.0
    rate.published(now_s)
    for _ in range(100):
        rate.seeking(True, now_s)
        now_s += 9.0
        rate.seeking(False, now_s)
        rate.published(now_s)
        now_s += 0.25
        rate.released(1, now_s)
    assert rate.extents_per_s == pytest.approx(4.0, rel=0.02)


def test_a_full_window_is_the_sessions_own_time() -> None:
    rate, now_s = DemandRate(), 0.0
    for _ in range(8):
        rate.published(now_s)
    for _ in range(100):
        now_s += 0.5
        rate.released(1, now_s)
        rate.published(now_s)
    assert rate.extents_per_s == pytest.approx(2.0, rel=0.02)


def test_little_seen_is_nothing_said() -> None:
    rate = DemandRate()
    consume(rate, EXTENTS_MIN - 1, each_s=1.0, stall_s=0.0, now_s=0.0)
    assert rate.extents_per_s is None


def test_a_job_that_changes_its_pace_is_followed() -> None:
    rate = DemandRate()
    now_s = consume(rate, 500, each_s=1.0, stall_s=0.0, now_s=0.0)
    consume(rate, 800, each_s=0.1, stall_s=0.0, now_s=now_s)
    assert rate.extents_per_s == pytest.approx(10.0, rel=0.35)
