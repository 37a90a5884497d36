"""The plan book forgets what the dead wanted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs.plan import PlanBook


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc")), max_size=30), st.data())
def test_pending_and_claimed_are_what_live_sessions_want(rows, data) -> None:
    book = PlanBook()
    pending: dict[int, list[str]] = {}
    for session, digest in rows:
        book.claim(session, [digest])
        book.extend(session, [digest])
        pending.setdefault(session, []).append(digest)
        if data.draw(st.booleans()):
            book.advance(session)
            pending[session].pop(0)
    for digest in "abc":
        assert book.pending(digest) == any(digest in p for p in pending.values())
        assert book.claimed(digest) == any(d == digest for _, d in rows)

    for session in range(3):
        book.drop(session)

    assert book.is_empty
