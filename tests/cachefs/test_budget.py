"""The byte budget: its hard limit holds whatever is asked of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gpufeed.cachefs.budget import ByteBudget
from gpufeed.cachefs.errors import UsageError
from gpufeed.cachefs.units import BLOCK_BYTES as B


def test_bytes_of_an_evicted_shard_count_until_its_file_is_gone() -> None:
    budget = ByteBudget(10 * B)
    assert budget.reserve(8 * B)
    budget.commit(8 * B)
    budget.evict(8 * B)

    assert not budget.reserve(4 * B)
    assert (budget.reserved_bytes, budget.promised_bytes) == (0, 4 * B)
    assert not budget.grant(4 * B)
    budget.unlinked(8 * B)
    assert budget.grant(4 * B)
    assert (budget.reserved_bytes, budget.promised_bytes) == (4 * B, 0)


def test_who_was_promised_first_is_not_overtaken_by_a_smaller_one() -> None:
    budget = ByteBudget(10 * B)
    assert budget.adopt(8 * B)
    budget.evict(8 * B)

    assert not budget.reserve(9 * B)
    assert not budget.reserve(1 * B)


def test_more_than_is_available_is_refused_with_the_numbers() -> None:
    budget = ByteBudget(10 * B)
    with pytest.raises(UsageError, match="44 KiB asked of a budget with 40 KiB"):
        budget.reserve(11 * B)
    assert not budget.adopt(11 * B)


def test_a_reservation_grows_only_into_free_room() -> None:
    budget = ByteBudget(10 * B)
    assert budget.reserve(4 * B)
    assert budget.reserve(4 * B)

    assert not budget.resize(4 * B, 7 * B)
    assert budget.resize(4 * B, 6 * B)
    assert budget.resize(6 * B, 1 * B)
    assert budget.reserved_bytes == 5 * B


sizes = st.integers(0, 12).map(lambda n: n * B)


class BudgetMachine(RuleBasedStateMachine):
    """Every order of calls that the store may make."""

    promised = Bundle("promised")
    reserved = Bundle("reserved")
    resident = Bundle("resident")
    unlinking = Bundle("unlinking")

    def __init__(self) -> None:
        super().__init__()
        self.budget = ByteBudget(20 * B)

    @rule(target=reserved, size=sizes)
    def reserve(self, size: int):
        if size > self.budget.available_bytes:
            with pytest.raises(UsageError):
                self.budget.reserve(size)
            return 0
        if not self.budget.reserve(size):
            self.budget.withdraw(size)
            return 0
        return size

    @rule(target=promised, size=sizes)
    def promise(self, size: int):
        if size > self.budget.available_bytes:
            return 0
        if self.budget.reserve(size):
            self.budget.abort(size)
            return 0
        return size

    @rule(target=reserved, size=consumes(promised))
    def grant(self, size: int):
        if self.budget.grant(size):
            return size
        self.budget.withdraw(size)
        return 0

    @rule(target=reserved, old=consumes(reserved), new=sizes)
    def resize(self, old: int, new: int):
        return new if self.budget.resize(old, new) else old

    @rule(target=resident, size=consumes(reserved))
    def commit(self, size: int):
        self.budget.commit(size)
        return size

    @rule(target=unlinking, size=consumes(reserved))
    def discard(self, size: int):
        self.budget.discard(size)
        return size

    @rule(target=unlinking, size=consumes(resident))
    def evict(self, size: int):
        self.budget.evict(size)
        return size

    @rule(target=resident, size=sizes)
    def adopt(self, size: int):
        return size if self.budget.adopt(size) else 0

    @rule(size=consumes(unlinking))
    def unlinked(self, size: int):
        self.budget.unlinked(size)

    @invariant()
    def the_limit_holds(self):
        budget = self.budget
        held = budget.resident_bytes + budget.reserved_bytes
        assert held + budget.unlinking_bytes <= budget.capacity_bytes
        assert held + budget.promised_bytes <= budget.capacity_bytes
        assert min(held, budget.unlinking_bytes, budget.promised_bytes) >= 0


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
