"""The book of plans: whatever sessions do, it counts right and is empty when all have ended."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs import plan
from gpufeed.cachefs.errors import ProtocolError
from gpufeed.cachefs.nextuse import NextUses
from gpufeed.cachefs.plan import PlanBook

digests = st.sampled_from("abcdef")
DATASET = list("abcdef")


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), digests), max_size=40),
    advances=st.lists(st.integers(0, 3), max_size=40),
)
def test_claims_and_pending_positions_are_counted(rows, advances) -> None:
    uses = NextUses()
    book = PlanBook(uses)
    pending: dict[int, collections.deque[str]] = collections.defaultdict(collections.deque)
    for session, digest in rows:
        book.claim(session, 1, DATASET)
        book.extend(session, [digest])
        pending[session].append(digest)
    for session in advances:
        if pending[session]:
            pending[session].popleft()
            book.advance(session)
    sessions = {session for session, _ in rows}
    for digest in "abcdef":
        assert book.pending(digest) == any(digest in p for p in pending.values())
        number = uses.find(digest)
        assert (number is not None and uses.claimed(number)) == bool(sessions)
    for session in sessions:
        book.drop(session)

    assert book.is_empty
    assert not any(uses.claimed(number) for number in range(6) if uses.capacity_count > number)


def test_ranks_of_one_job_share_a_rate_and_a_cursor() -> None:
    uses = NextUses()
    book = PlanBook(uses)
    for session in (1, 2):
        book.claim(session, 7, DATASET)
        book.join(session, "job")
        # Rank 1 reads a, c, e; rank 2 reads b, d, f.
        book.forecast(session, 7, [session - 1, session + 1, session + 3], anew=True)
    book.measured(1, 2.0)

    assert [uses.wait_s(uses.find(digest)) for digest in "abcdef"] == [0, 0, 0.5, 0.5, 1, 1]
    book.begin(1, "a")
    book.begin(2, "b")
    assert uses.wait_s(uses.find("a")) == float("inf")
    assert uses.wait_s(uses.find("f")) == 0.5


def test_a_forecast_of_shards_that_are_not_there_is_refused() -> None:
    book = PlanBook(NextUses())
    book.claim(1, 7, DATASET)
    book.join(1, "job")
    with pytest.raises(ProtocolError, match="outside the dataset's 6"):
        book.forecast(1, 7, [6], anew=True)


def test_a_forecast_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FORECAST_POSITIONS_MAX", 10)
    book = PlanBook(NextUses())
    book.claim(1, 7, DATASET)
    book.join(1, "job")
    book.forecast(1, 7, [0, 1, 2, 3, 4, 5], anew=True)
    book.forecast(1, 7, [5, 4, 3, 2, 1, 0], anew=False)
    with pytest.raises(ProtocolError, match="more than 10 positions"):
        book.forecast(1, 7, [0], anew=False)
    book.forecast(1, 7, [0], anew=True)
