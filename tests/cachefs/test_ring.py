"""A session's ring against a plain model of it: places, sequence numbers, releases."""

from __future__ import annotations

import collections

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpufeed.cachefs.errors import ProtocolError
from gpufeed.cachefs.ring import Lease, Ring


class RingMachine(RuleBasedStateMachine):
    """`Ring` against a deque of what was published and not released."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(5)
        self.taken = 0
        self.given = 0
        self.held: collections.deque[tuple[int, Lease]] = collections.deque()

    @rule()
    def take(self) -> None:
        fits = self.taken + len(self.held) < 5
        assert self.ring.take() is fits
        self.taken += fits

    @precondition(lambda self: self.taken)
    @rule()
    def untake(self) -> None:
        self.ring.untake()
        self.taken -= 1

    @precondition(lambda self: self.taken)
    @rule(slot=st.integers(0, 9))
    def publish(self, slot: int) -> None:
        self.taken -= 1
        self.given += 1
        assert self.ring.publish(slot, f"shard {slot}") == self.given
        self.held.append((self.given, Lease(slot, f"shard {slot}")))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(list(self.held)), unique=True))
        found = self.ring.release([seq for seq, _ in chosen])
        assert found == [lease for _, lease in chosen]
        for entry in chosen:
            self.held.remove(entry)

    @rule(data=st.data(), wrong=st.integers(-2, 30))
    def release_wrong(self, data: st.DataObject, wrong: int) -> None:
        here = [seq for seq, _ in self.held]
        if wrong in here:
            wrong = here[0]
            seqs = [wrong, wrong]
        else:
            seqs = [*here, wrong]
        with pytest.raises(ProtocolError, match="released"):
            self.ring.release(seqs)

    @invariant()
    def agrees(self) -> None:
        self.ring.check()
        assert self.ring.head == self.given
        assert self.ring.tail == (self.held[0][0] if self.held else self.given + 1)
        assert self.ring.held_count == len(self.held)
        assert self.ring.free_count == 5 - self.taken - len(self.held)


TestRing = RingMachine.TestCase


def test_the_end_gives_everything_back_once_and_nothing_follows() -> None:
    ring = Ring(3)
    for slot in range(2):
        assert ring.take()
        ring.publish(slot, "d")
    assert ring.take()
    assert ring.end() == [Lease(0, "d"), Lease(1, "d")]
    assert ring.end() == []
    ring.untake()
    assert not ring.take()
    with pytest.raises(ProtocolError, match="released twice"):
        ring.release([1])


def test_numbers_go_on_after_everything_was_given_back() -> None:
    ring = Ring(2)
    for epoch in range(3):
        seqs = []
        for slot in range(2):
            assert ring.take()
            seqs.append(ring.publish(slot, "d"))
        assert seqs == [2 * epoch + 1, 2 * epoch + 2]
        ring.release(seqs[::-1])
    assert ring.tail == 7
