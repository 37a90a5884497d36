"""The slot table against a model, and its order of recycling."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpufeed.cachefs.arena.slots import SlotTable
from gpufeed.cachefs.errors import UsageError

SLOTS = 5
EXTENTS = 25


class SlotMachine(RuleBasedStateMachine):
    """Holders per slot and the extent in it, as a dict would keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = {"a": math.inf, "b": math.inf}
        self.table = SlotTable(SLOTS, lambda digest: self.waits[digest])
        self.held: dict[int, int] = {}
        self.content: dict[int, tuple[str, int]] = {}
        self.ready: set[int] = set()
        self.touched = 0

    @rule(slots=st.integers(0, SLOTS))
    def limit_touched(self, slots: int) -> None:
        self.table.touch_max = slots

    @rule(digest=st.sampled_from("ab"), wait_s=st.sampled_from([0.0, 5.0, math.inf]))
    def plan(self, digest: str, wait_s: float) -> None:
        self.waits[digest] = wait_s

    @rule(digest=st.sampled_from("ab"), extent=st.integers(0, 4))
    def allocate(self, digest: str, extent: int) -> None:
        if self.table.knows(digest, extent):
            return
        available = self.table.available_count
        slot = self.table.allocate(digest, extent)
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
    @rule(data=st.data())
    def drop(self, data) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.table.drop(slot)
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


def filled(table: SlotTable, *extents: tuple[str, int]) -> None:
    """Each in a slot of its own, nobody's; in this order."""
    for digest, extent in extents:
        slot = table.allocate(digest, extent)
        table.mark_ready(slot)
        table.drop(slot)


def test_what_no_plan_reads_goes_first_the_latest_of_it() -> None:
    table = SlotTable(4, lambda digest: 100.0 if digest == "wanted" else math.inf)
    filled(table, ("wanted", 0), ("x", 0), ("y", 0), ("wanted", 2))
    taken = [table.allocate("new", 2 * i) for i in range(2)]
    assert taken == [2, 1]
    assert table.find("wanted", 0) is not None
    assert table.find("wanted", 2) is not None


def test_of_what_plans_read_the_farthest_goes() -> None:
    waits = {"soon": 1.0, "later": 10.0, "last": 100.0, "new": 0.0}
    table = SlotTable(3, waits.__getitem__)
    filled(table, ("last", 0), ("soon", 0), ("later", 0))
    assert [table.allocate("new", 2 * i) for i in range(3)] == [0, 2, 1]
    assert table.allocate("new", 9) is None


def test_in_a_large_arena_the_farthest_of_a_few_goes() -> None:
    waits = {f"d{i}": float(i) for i in range(1000)} | {"new": 0.0}
    table = SlotTable(1000, waits.__getitem__)
    draw = random.Random(1)
    filled(table, *((f"d{i}", 0) for i in draw.sample(range(1000), 1000)))
    for i in range(100):
        table.mark_ready(table.allocate("new", 2 * i))
    gone = [i for i in range(1000) if table.find(f"d{i}", 0) is None]
    # Of eight drawn at random the farthest is at 8/9 of all, on average.
    assert sum(gone) / len(gone) > 800


def test_the_slot_behind_the_extent_before_is_taken_unless_it_is_wanted_much_sooner() -> None:
    waits = {"a": 60.0, "b": 100.0, "new": 0.0}
    table = SlotTable(4, waits.__getitem__)
    filled(table, ("a", 0), ("b", 2), ("a", 4), ("b", 6))
    table.hold(1)
    table.drop(1)  # the latest idle one
    first = table.allocate("new", 0)
    assert first == 1
    assert table.allocate("new", 1) == 2, "wanted in 60 s, the farthest in 100"
    waits["a"] = 20.0
    table = SlotTable(4, waits.__getitem__)
    filled(table, ("a", 0), ("b", 2), ("a", 4), ("b", 6))
    table.hold(1)
    table.drop(1)
    assert table.allocate("new", 0) == 1
    assert table.allocate("new", 1) == 3


class Rank:
    """Reads its share of the shards, in a new order each epoch; `ahead` is the next two epochs."""

    def __init__(self, draw: random.Random, shards: range) -> None:
        self.draw, self.shards = draw, shards
        self.ahead = self.order() + self.order()
        self.extent, self.held = EXTENTS, []

    def order(self) -> list[int]:
        return self.draw.sample(self.shards, len(self.shards))

    def step(self, table: SlotTable) -> bool | None:
        """Read one extent; whether it lies behind the one before, None for a shard's first."""
        if self.extent == EXTENTS:
            self.ahead.pop(0)
            if len(self.ahead) == len(self.shards):
                self.ahead += self.order()
            self.extent = 0
        if len(self.held) == 16:
            table.drop(self.held.pop(0))
        digest = str(self.ahead[0])
        slot = table.find(digest, self.extent)
        if slot is None:
            slot = table.allocate(digest, self.extent)
            table.mark_ready(slot)
        else:
            table.hold(slot)
        follows = slot == self.held[-1] + 1 if self.extent else None
        self.held.append(slot)
        self.extent += 1
        return follows


def test_extents_follow_each_other_in_an_arena_that_has_been_full_for_long() -> None:
    draw = random.Random(0)
    ranks = [Rank(draw, range(n, 200, 4)) for n in range(4)]

    def wait_s(digest: str) -> float:
        shard = int(digest)
        return ranks[shard % 4].ahead.index(shard, 1)

    table = SlotTable(256, wait_s)
    found = [draw.choice(ranks).step(table) for _ in range(10_000)]
    table.check()
    ratio = found.count(True) / (len(found) - found.count(None))
    print(f"{ratio:.3f} follow the extent before")
    assert ratio > 0.7


def test_a_release_too_many_is_refused() -> None:
    table = SlotTable(1)
    table.drop(table.allocate("a", 0))

    with pytest.raises(UsageError, match="more often"):
        table.drop(0)
