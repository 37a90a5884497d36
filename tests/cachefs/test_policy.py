"""The policy: what nobody wants goes first, then what is needed last; what must stay, stays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufeed.cachefs.config import PolicyConfig
from gpufeed.cachefs.farthest import CHUNK_COUNT
from gpufeed.cachefs.nextuse import NextUses
from gpufeed.cachefs.policy import Admit, Bypass, PlanPolicy, Restored, Want
from gpufeed.cachefs.shares import NOBODY, Shares, Standing, TenantShare
from gpufeed.cachefs.units import BLOCK_BYTES

SIZE = 10 * BLOCK_BYTES


class Node:
    """A store that does what the policy says, with room for `room` shards of one size."""

    def __init__(self, room: int, tenants=None, **config) -> None:
        self.uses = NextUses()
        config = PolicyConfig(**{"adhoc_ratio": 0.0, **config})
        self.shares = Shares(config, room * SIZE, tenants)
        self.policy = PlanPolicy(self.uses, self.shares)
        self.room = room
        self.held: dict[str, Standing] = {}
        self.now_s = 0.0

    def job(self, session: int, *orders: str, rate: float = 1.0) -> None:
        numbers = self.uses.numbers(sorted(set("".join(orders))))
        self.uses.claim(session, numbers)
        self.uses.join(session, f"job {session}")
        self.uses.set_rate(session, rate)
        for i, order in enumerate(orders):
            forecast = self.uses.numbers(order)
            self.uses.forecast(session, forecast, anew=i == 0)

    def begin(self, session: int, digest: str) -> None:
        self.now_s += 1
        number = self.uses.find(digest)
        assert number is not None
        self.uses.used(session, number)
        if digest in self.held:
            self.policy.use(digest, self.now_s)

    def ask(self, digest: str, standing: Standing = NOBODY, *, ahead: bool = False):
        free = (self.room - len(self.held)) * SIZE
        want = Want(digest, SIZE, standing, ahead)
        return self.policy.decide(want, free, now_s=self.now_s)

    def put(self, digest: str, standing: Standing = NOBODY, *, ahead: bool = False) -> bool:
        self.now_s += 1
        decision = self.ask(digest, standing, ahead=ahead)
        for victim in decision.victims:
            del self.held[victim]
            self.policy.remove(victim)
        if isinstance(decision, Bypass):
            return False
        want = Want(digest, SIZE, standing, ahead)
        self.policy.abandon(want)
        self.policy.add(want, self.now_s)
        self.held[digest] = standing
        assert len(self.held) <= self.room
        assert self.shares.charged_bytes == len(self.held) * SIZE
        return True


def found(digests: Sequence[str], last_uses: list[int]) -> Restored:
    numbers = {digest: number for number, digest in enumerate(digests)}
    return Restored(numbers, np.full(len(digests), SIZE), np.array(last_uses))


def holds(node: Node) -> str:
    return "".join(sorted(node.held))


def test_room_is_taken_without_victims() -> None:
    node = Node(1)
    assert node.ask("a") == Admit(())


def test_what_nobody_wants_goes_first_longest_unused_first() -> None:
    node = Node(3)
    for digest in "abc":
        node.put(digest)
    node.policy.use("a", node.now_s + 1)
    assert node.put("d")
    assert holds(node) == "acd"
    assert node.put("e")
    assert holds(node) == "ade"


def test_a_single_jobs_shards_are_never_evicted_for_others_of_it() -> None:
    node = Node(2)
    node.job(1, "abcd", "dcba")
    for digest in "abcd":
        node.begin(1, digest)
        node.put(digest)
    assert holds(node) == "ab"


def test_with_two_jobs_the_one_needed_last_goes() -> None:
    node = Node(2)
    node.job(1, "abcd", "dcba")
    node.job(2, "dcab", "abcd")
    node.begin(1, "a")
    node.put("a")  # next read by job 2, third
    node.begin(2, "d")
    node.put("d")  # next read by job 1, third from where it is
    node.begin(2, "c")
    # c comes in one position at job 1, a in none at job 2, d in two at job 1.
    assert node.put("c")
    assert holds(node) == "ac"


def test_a_newcomer_needed_last_of_all_passes_by() -> None:
    node = Node(2)
    node.job(1, "abc", "abc")
    node.job(2, "abc", "bac")
    node.begin(1, "a")
    node.put("a")
    node.begin(1, "b")
    node.put("b")
    node.begin(1, "c")
    node.begin(2, "a")
    node.begin(2, "b")
    node.begin(2, "c")
    assert isinstance(node.ask("c"), Bypass)


def test_a_shard_fetched_ahead_is_judged_by_the_use_after_the_next() -> None:
    node = Node(1)
    node.job(1, "ab", "ab")
    node.job(2, "ba", "ba")
    node.put("a")
    # b is read at once by job 2, and next by job 1 just as soon as a is: nothing is gained.
    assert isinstance(node.ask("b", ahead=True), Bypass)
    assert isinstance(node.ask("b"), Bypass)


def test_faster_jobs_shards_are_needed_sooner() -> None:
    node = Node(1)
    node.job(1, "ab", "ab", rate=1.0)
    node.job(2, "cd", "cd", rate=100.0)
    node.begin(1, "a")
    node.put("a")
    node.begin(2, "c")
    assert node.put("c")
    node.begin(1, "b")
    assert not node.put("b")
    assert holds(node) == "c"


def test_leased_shards_stay_until_released() -> None:
    node = Node(1)
    node.put("a")
    node.policy.lease("a")
    assert isinstance(node.ask("b"), Bypass)
    node.policy.release("a", node.now_s)
    assert node.ask("b") == Admit(("a",))


def test_shards_of_a_session_that_told_no_order_stay_while_it_lives() -> None:
    node = Node(1)
    node.put("a")
    node.uses.claim(1, node.uses.numbers("ab"))
    assert isinstance(node.ask("b"), Bypass)
    node.uses.drop(1)
    assert node.put("b")


def test_the_last_epochs_shards_make_way_once_they_were_read() -> None:
    node = Node(1)
    node.job(1, "ab")
    node.job(2, "cd", "cd")
    node.begin(1, "a")
    node.put("a")
    node.begin(2, "c")
    assert node.put("c")


def test_a_killed_jobs_claims_are_gone() -> None:
    node = Node(1)
    node.job(1, "ab", "ab")
    node.begin(1, "a")
    node.put("a")
    node.job(2, "cd", "cd")
    node.uses.drop(1)
    node.begin(2, "c")
    assert node.put("c")
    assert holds(node) == "c"


def test_a_quota_is_a_hard_limit_and_is_paid_by_its_own_dataset() -> None:
    node = Node(4, quotas=(f"oss://b/small/={2 * SIZE}",))
    small, other = Standing("oss://b/small/x"), Standing("oss://b/other/x")
    node.put("o", other)
    for digest in "abc":
        assert node.put(digest, small)
    assert holds(node) == "bco"
    assert node.shares.group_bytes(small) == 2 * SIZE


def test_a_shard_above_its_quota_never_enters() -> None:
    node = Node(4, quotas=(f"oss://b/small/={SIZE - BLOCK_BYTES}",))
    assert isinstance(node.ask("a", Standing("oss://b/small/x")), Bypass)


def test_pins_stay_whatever_else_is_needed() -> None:
    node = Node(2, pins=("oss://b/hot/",))
    hot = Standing("oss://b/hot/x")
    assert node.put("a", hot)
    assert node.put("b", hot)
    node.job(1, "xy", "xy")
    node.begin(1, "x")
    assert not node.put("x")
    assert holds(node) == "ab"


def test_a_pinned_shard_displaces_what_a_plan_wants() -> None:
    node = Node(1, pins=("oss://b/hot/",))
    node.job(1, "xy", "xy")
    node.begin(1, "x")
    node.put("x")
    assert node.put("a", Standing("oss://b/hot/x"))
    assert holds(node) == "a"


def test_ad_hoc_reads_are_least_recently_used_in_a_corner_of_their_own() -> None:
    node = Node(4, adhoc_ratio=0.5)
    adhoc = Standing("oss://b/file", adhoc=True)
    node.job(1, "wxyz", "wxyz")
    for digest in "wx":
        node.begin(1, digest)
        assert node.put(digest)
    for digest in "abc":
        assert node.put(digest, adhoc)
    assert holds(node) == "bcwx"
    node.begin(1, "y")
    assert not node.put("y"), "a plan does not take the corner"


def test_a_tenant_below_its_share_takes_from_one_above_it_and_not_the_other_way() -> None:
    node = Node(4)
    red, blue = Standing(tenant="red"), Standing(tenant="blue")
    for digest in "abcd":
        node.put(digest, red)
    for digest in "wxyz":
        assert node.put(digest, blue)
    assert holds(node) == "cdyz", "half each, the oldest first"
    assert node.put("e", red)
    assert holds(node) == "deyz", "at its share a tenant displaces its own"


def test_weights_divide_the_store() -> None:
    node = Node(4, {"red": TenantShare(weight=3)})
    red, blue = Standing(tenant="red"), Standing(tenant="blue")
    for digest in "abcd":
        node.put(digest, red)
    for digest in "xyz":
        node.put(digest, blue)
    assert holds(node) == "bcdz"


def test_a_tenants_quota_is_hard_and_is_made_room_for_among_its_own() -> None:
    node = Node(6, {"red": TenantShare(quota_bytes=2 * SIZE)})
    red, blue = Standing(tenant="red"), Standing(tenant="blue")
    assert node.put("x", blue)
    for digest in "abc":
        assert node.put(digest, red)
    assert holds(node) == "bcx", "free room does not lift a quota"
    assert node.put("y", blue)
    too_large = Want("d", 3 * SIZE, red)
    refused = node.policy.decide(too_large, 9 * SIZE, now_s=node.now_s)
    assert isinstance(refused, Bypass)
    assert "larger than the quota of the tenant red" in refused.reason


def test_a_tenants_quota_holds_beside_its_datasets() -> None:
    node = Node(9, {"red": TenantShare(quota_bytes=3 * SIZE)}, quotas=(f"oss://b/={2 * SIZE}",))
    small, other = Standing("oss://b/x", tenant="red"), Standing("oss://c/x", tenant="red")
    for digest in "ab":
        assert node.put(digest, small)
    assert node.put("c", small)
    assert holds(node) == "bc", "the dataset's quota"
    assert node.put("d", other)
    assert node.put("e", other)
    assert len(node.held) == 3, "the tenant's"


def test_opening_anothers_shard_does_not_make_it_ones_own() -> None:
    node = Node(4)
    red, blue = Standing(tenant="red"), Standing(tenant="blue")
    node.put("a", red)
    node.put("b", NOBODY)
    for digest in "ab":
        node.policy.adopt(digest, blue, 0.0)
    numbers = {digest: node.uses.find(digest) for digest in "ab"}
    assert node.shares.is_of(numbers["a"], red)
    assert node.shares.is_of(numbers["b"], blue)


def test_an_aborted_shard_costs_its_standing_nothing() -> None:
    node = Node(4, quotas=(f"oss://b/={SIZE}",))
    standing = Standing("oss://b/x")
    assert isinstance(node.ask("a", standing), Admit)
    assert isinstance(node.ask("b", standing), Bypass), "what is admitted counts at once"
    node.policy.abandon(Want("a", SIZE, standing))
    assert isinstance(node.ask("b", standing), Admit)


def test_what_nobody_claims_expires_and_what_is_claimed_does_not() -> None:
    node = Node(4)
    assert node.policy.expired(1e6) == ([], float("inf"))
    node.policy = PlanPolicy(node.uses, node.shares, ttl_s=100.0)
    for digest in "abc":
        node.put(digest)  # at 1, 2 and 3 s
    node.uses.claim(1, node.uses.numbers("a"))
    assert node.policy.expired(100.0) == ([], 101.0)
    node.policy.lease("c")
    assert node.policy.expired(104.0)[0] == ["b"]
    node.policy.release("c", 104.0)
    assert node.policy.expired(105.0)[0] == ["b", "c"]
    node.uses.drop(1)
    assert node.policy.expired(105.0)[0] == ["a", "b", "c"]


def test_what_is_pinned_does_not_expire() -> None:
    node = Node(4, pins=("oss://b/hot/",))
    node.policy = PlanPolicy(node.uses, node.shares, ttl_s=100.0)
    node.put("a", Standing("oss://b/hot/x"))
    node.put("b", Standing("oss://b/cold/x"))
    assert node.policy.expired(500.0)[0] == ["b"]


def test_a_shard_that_a_dataset_claims_leaves_the_ad_hoc_corner() -> None:
    node = Node(2, adhoc_ratio=0.5)
    node.put("a", Standing("oss://b/x", adhoc=True))
    assert node.policy.minds_standing
    node.policy.adopt("a", Standing("oss://b/x"), node.now_s)
    assert node.put("b", Standing("oss://b/y", adhoc=True))
    assert holds(node) == "ab", "the corner is free again"


def test_restored_shards_count_for_a_quota_once_somebody_claims_them() -> None:
    node = Node(4, quotas=(f"oss://b/={2 * SIZE}",))
    node.policy.restore(found("abc", [1, 2, 3]), 0.0)
    assert node.shares.group_bytes(Standing("oss://b/x")) == 0
    for digest in "abc":
        node.policy.adopt(digest, Standing("oss://b/x"), 1.0)
    assert node.shares.group_bytes(Standing("oss://b/x")) == 3 * SIZE
    node.held = dict.fromkeys("abc", Standing("oss://b/x"))
    assert node.put("d", Standing("oss://b/x"))
    assert node.shares.group_bytes(Standing("oss://b/x")) == 2 * SIZE


def test_a_quota_that_was_lowered_far_is_kept_after_some_decisions() -> None:
    count, mine = 1000, Standing("oss://b/x")
    node = Node(count + 10, quotas=(f"oss://b/={2 * SIZE}",))
    digests = [f"{i:04}" for i in range(count)]
    node.policy.restore(found(digests, list(range(count))), 0.0)
    node.held = dict.fromkeys(digests, mine)
    for digest in digests:
        node.policy.adopt(digest, mine, 1.0)
    node.policy.lease("0000")
    entered = [node.put(f"new {i}", mine) for i in range(8)]
    assert not entered[0]
    assert entered[-1]
    assert node.shares.group_bytes(mine) == 2 * SIZE
    assert "0000" in node.held


def test_a_shard_that_grows_on_its_way_in_stays_below_its_quota() -> None:
    node = Node(9, quotas=(f"oss://b/={3 * SIZE}",))
    mine = Standing("oss://b/x")
    want = Want("a", SIZE, mine)
    assert isinstance(node.policy.decide(want, 9 * SIZE, now_s=0.0), Admit)
    assert node.policy.grow(want, 2 * SIZE)
    assert not node.policy.grow(want, SIZE)
    assert node.shares.group_bytes(mine) == 3 * SIZE
    node.policy.abandon(Want("a", 3 * SIZE, mine))
    assert node.shares.charged_bytes == 0


def test_of_a_large_dataset_claimed_anew_what_is_not_here_is_nobodys_to_adopt() -> None:
    node = Node(4, quotas=(f"oss://b/={2 * SIZE}",))
    node.policy.restore(found("a", [1]), 0.0)
    digests = ["a", *(f"{i:04}" for i in range(5000))]
    node.uses.claim(1, node.uses.numbers(digests))
    for digest in digests:
        node.policy.adopt(digest, Standing("oss://b/x"), 1.0)
    assert node.shares.group_bytes(Standing("oss://b/x")) == SIZE


def test_what_a_start_found_leaves_oldest_first() -> None:
    node = Node(3)
    node.policy.restore(found("bca", [2, 3, 1]), 0.0)
    node.held = dict.fromkeys("abc", Standing())
    assert len(node.policy) == 3
    node.policy.use("a", 1.0)
    assert node.put("d")
    assert node.put("e")
    assert holds(node) == "ade"


@pytest.mark.parametrize("count", [3, 1500])
def test_the_victim_is_the_farthest_of_many(count: int) -> None:
    digests = [f"{i:04}" for i in range(count)]
    node = Node(count - 1)
    for session, order in ((1, digests), (2, digests[::-1])):
        numbers = node.uses.numbers(order)
        node.uses.claim(session, numbers)
        node.uses.join(session, str(session))
        node.uses.forecast(session, numbers, anew=True)
        node.uses.forecast(session, numbers, anew=False)
    for digest in digests[:-1]:
        node.put(digest)
    decision = node.ask(digests[-1])
    # Needed at once by session 2: whoever is in the middle for both goes.
    assert isinstance(decision, Admit)
    waits = {d: node.uses.wait_s(node.uses.find(d)) for d in digests[:-1]}
    assert waits[decision.victims[0]] == max(waits.values())


def test_among_chunks_that_were_emptied_only_what_is_here_is_a_victim() -> None:
    count = 3 * CHUNK_COUNT
    digests = [f"{i:04}" for i in range(count)]
    node = Node(2)
    node.policy.restore(found(digests, list(range(count))), 0.0)
    for digest in digests[:-1]:
        node.policy.remove(digest)
    node.held = {digests[-1]: NOBODY}
    assert node.put("new")
    assert node.put("newer")
    assert digests[-1] not in node.held
    node.policy.lease("new")
    node.policy.lease("newer")
    assert isinstance(node.ask("newest"), Bypass)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_happens_limits_hold_and_everything_is_given_back(data) -> None:
    names = "abcdefghij"
    node = Node(data.draw(st.integers(1, 6)), adhoc_ratio=0.3,
                quotas=(f"oss://q/={2 * SIZE}",), pins=("oss://p/",))  # fmt: skip
    standings = [
        Standing(), Standing("oss://q/x"), Standing("oss://p/x"), Standing(adhoc=True),
        Standing(tenant="red"), Standing(tenant="blue"),
    ]  # fmt: skip
    leased: set[str] = set()
    live: set[int] = set()
    for _ in range(data.draw(st.integers(1, 60))):
        move = data.draw(st.sampled_from(["put", "job", "drop", "begin", "lease", "release"]))
        digest = data.draw(st.sampled_from(names))
        session = data.draw(st.integers(1, 4))
        if move == "put" and digest not in node.held:
            before = dict(node.held)
            node.put(digest, data.draw(st.sampled_from(standings)), ahead=data.draw(st.booleans()))
            gone = set(before) - set(node.held)
            assert not gone & leased
            for victim in gone:
                assert not before[victim].url.startswith("oss://p/")
        elif move == "job" and session not in live:
            live.add(session)
            orders = [data.draw(st.permutations(names)) for _ in range(2)]
            node.job(session, *("".join(order) for order in orders))
        elif move == "drop":
            live.discard(session)
            node.uses.drop(session)
        elif move == "begin" and session in live:
            node.begin(session, digest)
        elif move == "lease" and digest in node.held and digest not in leased:
            leased.add(digest)
            node.policy.lease(digest)
        elif move == "release" and digest in leased:
            leased.discard(digest)
            node.policy.release(digest, node.now_s)
        assert node.shares.group_bytes(Standing("oss://q/x")) <= 2 * SIZE
    for session in live:
        node.uses.drop(session)
    for digest in list(node.held):
        node.policy.remove(digest)
    assert len(node.policy) == 0
    assert node.shares.charged_bytes == 0
    assert node.uses.is_empty
