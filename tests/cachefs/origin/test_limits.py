"""Limits that follow the service: cut by its signs, growing back by themselves, never above."""

from __future__ import annotations

import math

import pytest

from gpufeed.cachefs.origin import limits
from gpufeed.cachefs.origin.limits import AdaptiveLimits, Limit, Maxima, Sign
from gpufeed.cachefs.origin.rate import TokenBucket

MAXIMA = Maxima(connections_count=64, requests_per_s=2000.0, bytes_per_s=math.inf)


def at_rate(adaptive: AdaptiveLimits, requests_per_s: int, size_bytes: int = 0) -> None:
    """Two seconds of traffic, up to t = 2."""
    for i in range(2 * requests_per_s):
        now_s = i / requests_per_s
        adaptive.sent(now_s)
        adaptive.received(size_bytes, now_s)


def test_a_cut_starts_from_what_was_used_not_from_the_maximum():
    adaptive = AdaptiveLimits(MAXIMA, 0.0)
    at_rate(adaptive, 300)
    assert adaptive.told(Sign.REQUESTS, 10, 2.0)
    assert adaptive.requests_per_s.value(2.0) == pytest.approx(0.7 * 300, rel=0.01)
    assert adaptive.connections.value(2.0) == 64
    assert math.isinf(adaptive.bytes_per_s.value(2.0))


@pytest.mark.parametrize(("sign", "ratio"), [(Sign.BANDWIDTH, 0.7), (Sign.HELD_BACK, 0.9)])
def test_bandwidth_is_cut_from_what_came(sign, ratio):
    adaptive = AdaptiveLimits(MAXIMA, 0.0)
    at_rate(adaptive, 100, 1_000_000)
    assert adaptive.told(sign, 10, 2.0)
    assert adaptive.bytes_per_s.value(2.0) == pytest.approx(ratio * 1e8, rel=0.01)


def test_requests_at_once_are_cut_from_those_under_way():
    adaptive = AdaptiveLimits(MAXIMA, 0.0)
    assert adaptive.told(Sign.CONNECTIONS, 40, 5.0)
    assert int(adaptive.connections.value(5.0)) == 28


def test_signs_within_a_second_are_one():
    limit = Limit(100.0, 1.0)
    assert limit.cut(100.0, 0.5, 10.0)
    assert not limit.cut(100.0, 0.5, 10.9)
    assert limit.value(10.9) == 50.0
    assert limit.cut(50.0, 0.5, 11.1)
    assert limit.value(11.1) == pytest.approx(25.0, rel=0.02)


def test_a_limit_never_falls_below_its_floor_nor_grows_above_its_maximum():
    limit = Limit(100.0, 10.0)
    for second in range(0, 40, 2):
        limit.cut(1.0, 0.5, float(second))
    assert limit.value(38.0) == 10.0
    values = [limit.value(38.0 + t) for t in range(300)]
    assert values == sorted(values)
    assert values[-1] == 100.0
    assert not limit.is_cut


def test_who_used_little_is_not_cut_to_nothing_by_one_sign():
    limit = Limit(64.0, 1.0, 8.0)
    assert limit.cut(2.0, 0.7, 0.0)
    assert limit.value(0.0) == 8.0
    assert limit.cut(2.0, 0.7, 2.0, gently=True)
    assert limit.value(2.0) == 8.0
    for second in range(4, 20, 2):
        assert limit.cut(2.0, 0.7, float(second))
    assert limit.value(18.0) < 2.0
    assert not limit.cut(1.0, 0.7, 20.0, gently=True)


def test_growth_is_slow_around_what_was_too_much_and_fast_beyond():
    limit = Limit(2000.0, 1.0)
    limit.cut(300.0, 0.7, 0.0)
    assert limit.value(0.5) == 210.0
    assert limit.value(3.0) < 300.0
    assert limit.value(10.0) > 300.0
    assert limit.value(60.0) == 2000.0


def test_an_unlimited_limit_is_unlimited_again():
    limit = Limit(math.inf, 1.0)
    limit.cut(1e8, 0.7, 0.0)
    assert limit.value(0.0) == pytest.approx(7e7)
    assert limit.value(5.0) < 1.1e8
    limit.value(100.0)
    assert not limit.is_cut
    assert math.isinf(limit.value(100.0))


def test_late_first_bytes_take_connections_but_not_the_last_ones():
    adaptive = AdaptiveLimits(MAXIMA, 0.0)

    def answers(first_byte_s: float, in_flight: int, now_s: float) -> bool:
        cuts = [adaptive.answered(first_byte_s, in_flight, now_s) for _ in range(64)]
        return any(cuts)

    assert not answers(0.02, 60, 1.0)
    assert not answers(0.1, 60, 3.0)  # several times what is usual, but no time worth a cut
    assert answers(0.5, 60, 5.0)
    assert int(adaptive.connections.value(5.0)) == 54
    for i in range(100):
        answers(0.5 * 1.1**i, 60, 7.0 + 2 * i)
    assert adaptive.connections.value(207.0) >= limits.CALM_CONNECTIONS


def test_another_network_becomes_the_usual_one():
    adaptive = AdaptiveLimits(MAXIMA, 0.0)
    for i in range(100 * limits.LATENCY_ANSWERS):
        adaptive.answered(0.01 if i < 64 else 0.4, 60, float(i))
    cut = [adaptive.answered(0.4, 60, 1e5 + i) for i in range(limits.LATENCY_ANSWERS)]
    assert not any(cut)


def test_against_a_service_that_allows_so_much_the_limit_stays_close_to_it():
    # A service that throttles above 400 requests a second; we send as fast as our limit allows.
    adaptive = AdaptiveLimits(MAXIMA, 0.0)
    bucket = TokenBucket(2000.0, 0.0)
    sent: list[float] = []
    now_s = 0.0
    while now_s < 60.0:
        bucket.set_rate(adaptive.requests_per_s.value(now_s), now_s)
        now_s += bucket.reserve(now_s) + 1e-6
        sent.append(now_s)
        adaptive.sent(now_s)
        last_second = sum(1 for at_s in reversed(sent[-500:]) if at_s > now_s - 1.0)
        if last_second > 400:
            adaptive.told(Sign.REQUESTS, 64, now_s)
    settled = sum(1 for at_s in sent if at_s > 20.0) / 40.0
    assert 300 < settled <= 420


def test_a_bucket_deals_amounts_and_takes_them_back():
    bucket = TokenBucket(1000.0, 0.0)
    assert bucket.reserve(0.0, 5000.0) == 0.0  # above the burst: at once, since nothing is owed
    assert bucket.reserve(0.0, 5000.0) == pytest.approx(4.9)
    bucket.refund(5000.0)
    assert bucket.reserve(0.0, 5000.0) == pytest.approx(4.9)
    bucket.set_rate(2000.0, 0.0)
    assert bucket.reserve(0.0, 5000.0) == pytest.approx(9.9 / 2)
