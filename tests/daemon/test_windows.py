"""What sessions may hold together: never more than the limit, and the first leaves some."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs.errors import CapacityError
from gpufeed.daemon.windows import WINDOW_EXTENTS_MIN, Windows


@given(st.integers(8, 2000), st.lists(st.integers(0, 1 << 33), max_size=30))
def test_the_sum_stays_below_the_limit_and_each_gets_a_workable_window(slots, wishes) -> None:
    windows = Windows(slots, 4096)
    granted = []
    for wish in wishes:
        try:
            granted.append(windows.grant(wish))
        except CapacityError:
            assert slots * 0.75 - sum(granted) < WINDOW_EXTENTS_MIN
            break

    assert all(window >= WINDOW_EXTENTS_MIN for window in granted)
    assert sum(granted) <= max(WINDOW_EXTENTS_MIN, slots * 0.75)


def test_eight_ranks_fit_a_common_arena_whatever_the_first_asks_for() -> None:
    windows = Windows(1500, 4 << 20)

    first = windows.grant(1 << 40)
    rest = [windows.grant(256 << 20) for _ in range(7)]

    assert first == 140
    assert rest == [64] * 7


def test_a_small_arena_has_room_for_eight_greedy_ranks() -> None:
    windows = Windows(64, 1 << 20)

    assert [windows.grant(1 << 40) for _ in range(8)] == [6, 6, 6, 6, 6, 4, 4, 4]


def test_a_refusal_has_the_numbers() -> None:
    windows = Windows(8, 1 << 20)
    windows.grant(0)

    with pytest.raises(CapacityError, match=r"6 MiB.*4 MiB"):
        windows.grant(0)
    windows.give_back(4)
    assert windows.grant(0) == 4


@given(st.integers(8, 2000), st.lists(st.tuples(st.integers(1, 1 << 22), st.booleans())))
def test_a_window_that_is_needed_whole_is_whole_or_refused(slots, wishes) -> None:
    windows = Windows(slots, 4096)
    limit, granted = int(slots * 0.75), 0
    for wish, whole in wishes:
        try:
            window = windows.grant(wish, whole=whole)
        except CapacityError:
            if whole:
                assert max(WINDOW_EXTENTS_MIN, -(-wish // 4096)) > limit - granted
            continue
        if whole:
            assert window == max(WINDOW_EXTENTS_MIN, -(-wish // 4096))
        granted += window
        assert granted <= limit


def test_a_lower_limit_keeps_what_is_granted_and_refuses_more() -> None:
    windows = Windows(100, 4096)
    assert windows.grant(40 * 4096, whole=True) == 40
    windows.limit(20)
    with pytest.raises(CapacityError):
        windows.grant(4096)
    windows.give_back(40)
    assert windows.grant(4096) == WINDOW_EXTENTS_MIN
