"""The first policy: what is wanted stays, what is leased stays, the rest goes oldest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs.policy import SCAN_LIMIT, Admit, Bypass, NeverEvict


def nobody(_: str) -> bool:
    return False


def filled(*digests: str, size: int = 10, scan_limit: int = SCAN_LIMIT) -> NeverEvict:
    policy = NeverEvict(scan_limit=scan_limit)
    for digest in digests:
        policy.add(digest, size)
    return policy


def test_room_needs_no_victims() -> None:
    assert filled("a").decide(5, 5, wanted=nobody, leased=nobody) == Admit(())


def test_victims_go_oldest_use_first_and_no_more_than_needed() -> None:
    policy = filled("a", "b", "c", "d")
    policy.use("a")

    assert policy.decide(25, 10, wanted=nobody, leased=nobody) == Admit(("b", "c"))


def test_wanted_and_leased_shards_are_never_victims() -> None:
    policy = filled("a", "b", "c")

    decision = policy.decide(10, 0, wanted={"a"}.__contains__, leased={"b"}.__contains__)

    assert decision == Admit(("c",))


def test_a_newcomer_passes_by_when_every_shard_is_wanted() -> None:
    decision = filled("a", "b").decide(10, 0, wanted=lambda _: True, leased=nobody)

    assert isinstance(decision, Bypass)


def test_what_can_never_fit_is_refused_without_asking_about_any_shard() -> None:
    asked: list[str] = []

    decision = filled("a", "b").decide(
        31, 10, wanted=lambda digest: bool(asked.append(digest)), leased=nobody
    )

    assert isinstance(decision, Bypass)
    assert asked == []


def test_a_disk_below_its_floor_needs_victims_for_that_too() -> None:
    assert filled("a", "b").decide(10, -5, wanted=nobody, leased=nobody) == Admit(("a", "b"))


def test_a_search_is_bounded_and_goes_on_where_the_last_one_ended() -> None:
    policy = filled(*"abcdef", scan_limit=2)
    wanted = set("abcde").__contains__

    decisions = [policy.decide(10, 0, wanted=wanted, leased=nobody) for _ in range(3)]

    assert [type(decision) for decision in decisions] == [Bypass, Bypass, Admit]
    assert decisions[2] == Admit(("f",))


@given(
    sizes=st.lists(st.integers(1, 50), max_size=30),
    wanted=st.sets(st.integers(0, 29)),
    leased=st.sets(st.integers(0, 29)),
    size=st.integers(0, 300),
    available=st.integers(-50, 300),
)
def test_a_decision_is_safe_sufficient_and_minimal(sizes, wanted, leased, size, available) -> None:
    policy = NeverEvict()
    for number, shard_size in enumerate(sizes):
        policy.add(str(number), shard_size)
    free = [n for n in range(len(sizes)) if n not in wanted and n not in leased]

    decision = policy.decide(
        size, available, wanted=lambda d: int(d) in wanted, leased=lambda d: int(d) in leased
    )

    possible = size <= available + sum(sizes[n] for n in free)
    assert isinstance(decision, Admit) == possible
    if isinstance(decision, Admit):
        victims = [int(victim) for victim in decision.victims]
        assert victims == free[: len(victims)]
        gained = [sizes[victim] for victim in victims]
        assert available + sum(gained) >= size
        assert not victims or available + sum(gained[:-1]) < size
    assert len(policy) == len(sizes)
