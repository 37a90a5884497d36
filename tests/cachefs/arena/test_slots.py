"""The slot table against a model, and its order of recycling."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpufeed.cachefs.arena.slots import SlotTable
from gpufeed.cachefs.errors import UsageError

SLOTS = 5


class SlotMachine(RuleBasedStateMachine):
    """Holders per slot and the extent in it, as a dict would keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(SLOTS)
        self.held: dict[int, int] = {}
        self.content: dict[int, tuple[str, int]] = {}
        self.ready: set[int] = set()
        self.touched = 0

    @rule(slots=st.integers(0, SLOTS))
    def limit_touched(self, slots: int) -> None:
        self.table.touch_max = slots

    @rule(
        digest=st.sampled_from("ab"), extent=st.integers(0, 4), near=st.none() | st.integers(0, 4)
    )
    def allocate(self, digest: str, extent: int, near: int | None) -> None:
        if self.table.knows(digest, extent):
            return
        available = self.table.available_count
        slot = self.table.allocate(digest, extent, near=near)
        if slot is None:
            assert available == 0
            assert len(self.held) == SLOTS or self.table.touch_max < SLOTS
            return
        assert available > 0
        assert slot < self.touched or slot < self.table.touch_max
        self.touched = max(self.touched, slot + 1)
        assert slot not in self.held
        self.held[slot] = 1
        self.content[slot] = (digest, extent)
        self.ready.discard(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fill(self, data) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.table.mark_ready(slot)
        if slot in self.content:
            self.ready.add(slot)

    @rule(digest=st.sampled_from("ab"), extent=st.integers(0, 4))
    def find_and_hold(self, digest: str, extent: int) -> None:
        slot = self.table.find(digest, extent)
        expected = [s for s in self.ready if self.content.get(s) == (digest, extent)]
        assert ([] if slot is None else [slot]) == expected
        if slot is not None:
            self.table.hold(slot)
            self.held[slot] = self.held.get(slot, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), wanted=st.booleans())
    def drop(self, data, wanted: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.table.drop(slot, wanted=wanted)
        self.held[slot] -= 1
        if not self.held[slot]:
            del self.held[slot]
            if slot not in self.ready:
                self.content.pop(slot, None)

    @rule(digest=st.sampled_from("ab"))
    def forget(self, digest: str) -> None:
        self.table.forget(digest)
        for slot in [s for s, c in self.content.items() if c[0] == digest]:
            self.content.pop(slot)
            self.ready.discard(slot)

    @invariant()
    def consistent(self) -> None:
        self.table.check()
        assert self.table.held_count == len(self.held)


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_recycling_takes_free_slots_then_unwanted_then_wanted_the_latest_first() -> None:
    table = SlotTable(4)
    slots = [table.allocate("a", i) for i in range(4)]
    for slot in slots:
        table.mark_ready(slot)
    table.drop(slots[0], wanted=True)
    table.drop(slots[1])
    table.drop(slots[2])

    taken = [table.allocate("b", i) for i in range(3)]

    assert slots == [0, 1, 2, 3]
    assert taken == [2, 1, 0]
    assert table.allocate("b", 9) is None


def test_a_neighbour_is_preferred() -> None:
    table = SlotTable(4)
    for i in range(4):
        table.mark_ready(table.allocate("a", i))
        table.drop(i)

    assert table.allocate("b", 1, near=1) == 2


def test_a_release_too_many_is_refused() -> None:
    table = SlotTable(1)
    table.drop(table.allocate("a", 0))

    with pytest.raises(UsageError, match="more often"):
        table.drop(0)
