"""Time to next use: what odd forecasts and sessions that come and go cost, and that they are right.

What the numbers are for is tested with the policy (`test_policy`) and the book (`test_plan`).
"""

from __future__ import annotations

import numpy as np
import pytest

from gpufeed.cachefs import nextuse
from gpufeed.cachefs.nextuse import FURTHER_MAX, NextUses


def uses_of(*digests: str) -> NextUses:
    uses = NextUses()
    uses.claim(1, uses.numbers(digests))
    uses.join(1, "job")
    return uses


def test_a_forecast_with_repetitions_has_each_use_in_its_turn() -> None:
    uses = uses_of(*"abc")
    order = "abacabaacb"
    uses.forecast(1, uses.numbers(order[:6]), anew=True)
    uses.forecast(1, uses.numbers(order[6:]), anew=False)
    for i, digest in enumerate(order):
        for other in "abc":
            expected = order.index(other, i) - i if other in order[i:] else np.inf
            assert uses.wait_s(uses.find(other)) == expected
        uses.used(1, uses.find(digest))
    assert uses.planning_count == 0


def test_of_a_shard_forecast_without_end_the_nearest_uses_are_remembered() -> None:
    uses = uses_of("a")
    many = np.zeros(5000, np.int32)
    uses.forecast(1, many, anew=True)
    uses.forecast(1, many, anew=False)
    waits = []
    for _ in range(FURTHER_MAX + 3):
        waits.append(uses.wait_s(0))
        uses.used(1, 0)
    assert waits == [0.0] * (FURTHER_MAX + 2) + [np.inf]


def test_the_nearest_use_comes_first_whichever_rank_told_it() -> None:
    uses = uses_of("a", "b")
    uses.join(2, "job")
    a, b = uses.find("a"), uses.find("b")
    # Of one job's two ranks, the first reads "a" after four others, again and again.
    uses.forecast(1, np.array([b, b, b, b, a, a, a, a], np.int32), anew=True)
    uses.forecast(2, np.array([b, a, b, a], np.int32), anew=True)
    waits = []
    for _ in range(6):
        waits.append(uses.wait_s(a))
        uses._promote(0, a)
    assert waits == [1, 3, 4, 5, 6, 7]


def test_numbers_that_leave_and_come_back_are_not_noted_without_end() -> None:
    uses = NextUses()
    digests = [str(i) for i in range(1000)]
    for session in range(50):
        uses.claim(session, uses.numbers(digests))
        uses.drop(session)
    noted = len(uses._leavers) + sum(map(len, uses._leaver_arrays))
    assert noted <= 3 * uses.capacity_count
    # What has left is given to others, each number once.
    fresh = uses.numbers(f"new {i}" for i in range(1000))
    uses.claim(99, fresh)
    assert sorted(fresh.tolist()) == list(range(1000))


def test_a_number_that_is_given_on_has_nothing_of_its_last_shard() -> None:
    uses = NextUses()
    for session, digest in ((1, "a"), (2, "b")):
        uses.claim(session, uses.numbers([digest]))
        uses.join(session, "job")
    uses.forecast(1, np.zeros(5, np.int32), anew=True)
    uses.drop(1)
    (number,) = uses.numbers(["new"])
    assert number == 0
    uses.claim(2, np.array([number], np.int32))
    for _ in range(3):
        assert uses.wait_s(number) == np.inf
        uses.used(2, number)


def test_positions_are_moved_down_once_enough_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nextuse, "_REBASE_AT", 40)
    monkeypatch.setattr(nextuse, "_REBASE_LEAST", 10)
    uses = uses_of(*"abcd")
    for digest in "abcd" * 12:
        uses.forecast(1, uses.numbers(digest), anew=False)
        uses.used(1, uses.find(digest))
    assert uses._sessions[1].end < 40
    uses.forecast(1, uses.numbers("dcba"), anew=False)
    assert [uses.wait_s(uses.find(digest)) for digest in "abcd"] == [3, 2, 1, 0]
