"""When credentials are renewed: pure arithmetic."""

from __future__ import annotations

import math
import random

import pytest

from gpufeed.cachefs.origin.credentials.schedule import Schedule
from gpufeed.cachefs.origin.credentials.source import Issued
from gpufeed.cachefs.origin.oss_sign import Credentials

KEY = Credentials("k", "s", "t")


def schedule(seed: int = 1) -> Schedule:
    return Schedule(random.Random(seed))


@pytest.mark.parametrize(
    ("lifetime_s", "earliest_s", "latest_s", "expires_s"),
    [
        (3600.0, 3600 - 720 * 1.5, 3600 - 720, 3590),
        (36_000.0, 36_000 - 900 * 1.5, 36_000 - 900, 35_990),
        (900.0, 900 - 180 * 1.5, 900 - 180, 890),
        (1.0, 0.7, 0.8, 0.95),
    ],
)
def test_they_are_renewed_ahead_and_count_as_expired_a_little_early(
    lifetime_s, earliest_s, latest_s, expires_s
):
    asked = []
    for seed in range(200):
        state = schedule(seed)
        state.issued(Issued(KEY, lifetime_s), 1000.0)
        asked.append(state.ask_at_s - 1000.0)
        assert state.expires_at_s == pytest.approx(1000 + expires_s)
    assert min(asked) >= earliest_s - 1e-9
    assert max(asked) <= latest_s + 1e-9
    # Spread: the nodes of a cluster do not come together.
    assert max(asked) - min(asked) > 0.9 * (latest_s - earliest_s)


def test_at_first_there_are_none_and_they_are_due():
    state = schedule()
    assert state.is_expired(0.0)
    assert state.is_due(0.0)


def test_what_never_expires_is_asked_for_again_only_if_told_so():
    state = schedule()
    state.issued(Issued(KEY), 0.0)
    assert not state.is_expired(1e18)
    assert not state.is_due(1e18)
    state.issued(Issued(KEY, renew_in_s=300.0), 0.0)
    assert not state.is_expired(1e18)
    assert (state.is_due(299.0), state.is_due(300.0)) == (False, True)


def test_back_off_doubles_up_to_a_minute_and_begins_anew_after_a_success():
    state = schedule()
    delays = [state.failed(0.0) for _ in range(2000)]
    for i, delay_s in enumerate(delays[:12]):
        full_s = min(60.0, 2.0**i)
        assert full_s / 2 <= delay_s <= full_s
    assert max(delays) <= 60.0
    assert state.is_expired(0.0)
    state.issued(Issued(KEY, 3600.0), 0.0)
    assert state.failed(0.0) <= 1.0


def test_a_failing_renewal_has_several_tries_before_they_expire():
    state = schedule()
    state.issued(Issued(KEY, 100.0), 0.0)
    now_s, tries = state.ask_at_s, 0
    while not state.is_expired(now_s) and tries < 1000:
        state.failed(now_s)
        assert state.ask_at_s > now_s
        now_s, tries = state.ask_at_s, tries + 1
        if state.expires_at_s - now_s < 0.001:
            break
    assert tries >= 5
    assert math.isfinite(now_s)
