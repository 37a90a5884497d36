"""Which shards enter the store and which leave it. Decisions only; the store acts on them.

The victim is the shard whose next use is farthest off (`gpufeed.cachefs.nextuse`): that is Belady's
MIN, from the plans of all live jobs. Where the newcomer itself is needed later than every possible
victim, it is streamed past the cache (**bypass**). What deviates from that, and why:

- while there is one job with a plan, nothing that it wants is evicted: no choice saves bytes then
  (each shard comes once an epoch), but farthest-next-use would bunch the misses at the epoch's end
  and write far more; keeping what is there spreads them evenly (**never-evict**);
- wanted by nobody: the first to go, longest unused first;
- claimed by a session that has not told its order: never evicted while it lives;
- ad-hoc reads live in a small corner of their own, where the least recently used goes first;
- quotas bound what a dataset may hold, pins keep it whatever else is needed, and no tenant below
  its fair share loses a shard to another (`gpufeed.cachefs.shares`);
- leased shards are never victims.

Pure and deterministic: no I/O, no clock, no randomness; the same calls give the same answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gpufeed.cachefs.farthest import UNWANTED_S, Farthest
from gpufeed.cachefs.nextuse import NextUses
from gpufeed.cachefs.shares import NOBODY, Mask, Shares, Standing

# Shards looked at in one decision: a bound for its time, met only where hundreds are leased.
LOOKS_MAX = 256


@dataclass(frozen=True, slots=True)
class Want:
    """A shard that asks to enter.

    Attributes:
        digest: its identity.
        size_bytes: what its file takes.
        standing: whose it is.
        ahead: it is fetched before its next use, which therefore does not count.
    """

    digest: str
    size_bytes: int
    standing: Standing = NOBODY
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """Cache it, after these have been evicted."""

    victims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bypass:
    """Stream it without caching.

    Attributes:
        reason: for logs.
        victims: go all the same: their dataset holds more than its quota, which was lowered.
    """

    reason: str
    victims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """What a start found.

    Attributes:
        numbers: the shards' digests, numbered from 0 on; stays the caller's.
        sizes_bytes: of the shards' files, by number.
        last_uses: serial numbers, by number: a larger one was used later.
    """

    numbers: dict[str, int]
    sizes_bytes: NDArray[np.int64]
    last_uses: NDArray[np.int64]


class Policy(Protocol):
    """What the store tells and asks. Digests name shards; sizes are bytes on disk.

    An admitted shard is charged to its standing at once; `add` or `abandon` follows.
    """

    def add(self, want: Want, now_s: float) -> None:
        """The shard is resident, and was used just now."""
        ...

    def abandon(self, want: Want) -> None:
        """An admitted shard did not become resident."""
        ...

    def grow(self, want: Want, more_bytes: int) -> bool:
        """May an admitted shard be so much larger? It is charged for that at once."""
        ...

    def restore(self, found: Restored, now_s: float) -> None:
        """What a start found is resident. Called once, first."""
        ...

    def use(self, digest: str, now_s: float) -> None:
        """A resident shard was used."""
        ...

    def lease(self, digest: str) -> None:
        """A resident shard is being read: no victim until `release`."""
        ...

    def release(self, digest: str, now_s: float) -> None:
        """Nobody reads a resident shard any more."""
        ...

    def remove(self, digest: str) -> None:
        """The shard is not resident any more, leased or not."""
        ...

    @property
    def minds_standing(self) -> bool:
        """Whether it matters whose a shard is: `adopt` is worth its while."""
        ...

    def adopt(self, digest: str, standing: Standing, now_s: float) -> None:
        """Somebody claims a resident shard, whose it may not have been until now."""
        ...

    def expired(self, now_s: float) -> tuple[list[str], float]:
        """Shards not used for too long, and when to ask again at the latest."""
        ...

    def decide(self, want: Want, available_bytes: int, *, now_s: float) -> Admit | Bypass:
        """May this shard enter, where `available_bytes` are free?"""
        ...


class PlanPolicy:
    """The policy described at the top of the file.

    Args:
        uses: when shards will be read; the daemon's sessions keep it up to date.
        shares: quotas, pins, tenants and the ad-hoc corner.
        ttl_s: what nobody claims and nobody used for so long expires; 0: never.
    """

    def __init__(self, uses: NextUses, shares: Shares, *, ttl_s: float = 0.0) -> None:
        self._uses = uses
        self._shares = shares
        self._ttl_s = ttl_s or np.inf
        self._farthest = Farthest(uses, shares)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    # --- what the store tells -----------------------------------------------------------------

    def add(self, want: Want, now_s: float) -> None:
        """See `Policy`."""
        number = self._uses.number(want.digest)
        self._uses.keep(number)
        self._farthest.fit()
        assert not self._farthest.is_here(number), want.digest
        self._count += 1
        self._shares.enter(number, want.standing, want.size_bytes)
        self._farthest.enter(number, now_s)

    def restore(self, found: Restored, now_s: float) -> None:
        """See `Policy`. Whose they are is told when somebody claims them."""
        assert not self._count, "restored into a policy that holds something"
        self._uses.restore(found.numbers)
        self._farthest.fit()
        self._shares.restore(found.sizes_bytes)
        self._farthest.restore(found.last_uses, now_s)
        self._count = len(found.numbers)

    def abandon(self, want: Want) -> None:
        """See `Policy`."""
        self._shares.abandon(want.standing, want.size_bytes)

    def grow(self, want: Want, more_bytes: int) -> bool:
        """See `Policy`. Nothing is evicted for it."""
        limits = self._shares.limits(want.standing, more_bytes)
        if limits.refusal or limits.own_short_bytes > 0 or limits.tenant_short_bytes > 0:
            return False
        self._shares.charge(want.standing, more_bytes)
        return True

    def use(self, digest: str, now_s: float) -> None:
        """See `Policy`."""
        self._farthest.enter(self._number(digest), now_s)

    def lease(self, digest: str) -> None:
        """See `Policy`."""
        self._farthest.hold(self._number(digest))

    def release(self, digest: str, now_s: float) -> None:
        """See `Policy`."""
        self._farthest.let_go(self._number(digest), now_s)

    def remove(self, digest: str) -> None:
        """See `Policy`."""
        number = self._number(digest)
        self._count -= 1
        self._farthest.leave(number)
        self._shares.leave(number)
        self._uses.unkeep(number)

    @property
    def minds_standing(self) -> bool:
        """See `Policy`."""
        return self._shares.tells_apart

    def adopt(self, digest: str, standing: Standing, now_s: float) -> None:
        """See `Policy`."""
        number = self._uses.find(digest)
        if number is None or not self._farthest.is_here(number):
            return
        if self._shares.is_of(number, standing) or self._shares.is_anothers(number, standing):
            # Who had it fetched pays for it, whoever else opens it: it could be evicted by them.
            return
        self._shares.adopt(number, standing)
        self._farthest.renew(number, now_s)

    def expired(self, now_s: float) -> tuple[list[str], float]:
        """See `Policy`. What is claimed, leased or pinned does not expire."""
        if self._ttl_s == np.inf:
            return [], np.inf
        numbers, oldest_s = self._farthest.unused_since(now_s - self._ttl_s)
        stay = self._shares.is_pinned
        unclaimed = [n for n in numbers if not self._uses.claimed(n) and not stay(n)]
        again_s = min(oldest_s, now_s) + self._ttl_s
        return [self._uses.digest(number) for number in unclaimed], again_s

    def _number(self, digest: str) -> int:
        number = self._uses.find(digest)
        assert number is not None, digest
        return number

    # --- what the store asks ------------------------------------------------------------------

    def decide(self, want: Want, available_bytes: int, *, now_s: float) -> Admit | Bypass:
        """See `Policy`. Victims are named, not removed: the store calls `remove` for each."""
        self._farthest.sweep(now_s)
        limits = self._shares.limits(want.standing, want.size_bytes)
        if limits.refusal:
            return Bypass(limits.refusal)
        search = _Search(self._uses, self._farthest, self._shares, want)
        short_bytes = want.size_bytes - available_bytes
        try:
            if limits.own_short_bytes > 0:
                search.take_own(
                    self._shares.of_group(limits.group), limits.own_short_bytes, now_s,
                    is_recency=limits.is_recency,
                )  # fmt: skip
            if limits.tenant_short_bytes > 0 and not search.refusal:
                search.take_own(
                    self._shares.of_tenant(want.standing), limits.tenant_short_bytes, now_s
                )
            if not search.refusal and search.room_bytes < short_bytes:
                if self._shares.is_shared:
                    search.take_shared(short_bytes, now_s)
                else:
                    search.take(short_bytes, now_s)
        finally:
            search.close()
        if search.refusal:
            return Bypass(search.refusal, self._named(search.surplus))
        self._shares.charge(want.standing, want.size_bytes)
        return Admit(self._named(search.victims))

    def _named(self, numbers: list[int]) -> tuple[str, ...]:
        return tuple(self._uses.digest(number) for number in numbers)


class _Search:
    """One decision's way to its victims. What it has looked at is hidden until `close`."""

    def __init__(self, uses: NextUses, farthest: Farthest, shares: Shares, want: Want) -> None:
        self._uses = uses
        self._farthest = farthest
        self._shares = shares
        self._want = want
        self._number = uses.find(want.digest)
        self._hidden: list[tuple[int, float]] = []
        self.victims: list[int] = []
        # Those that go even if the newcomer does not enter.
        self.surplus: list[int] = []
        self.room_bytes = 0
        self.refusal = ""

    def close(self) -> None:
        """Show again what was hidden."""
        for number, horizon_s in self._hidden:
            self._farthest.unhide(number, horizon_s)

    def _needed_s(self, now_s: float) -> float:
        """The newcomer's horizon: what is needed no later does not make way for it."""
        number, want = self._number, self._want
        if want.standing.adhoc or self._shares.pins(want.standing):
            return 0.0
        if number is None or self._uses.is_bare(number) or not self._uses.claimed(number):
            return UNWANTED_S / 2
        return now_s + self._uses.wait_s(number, skip_one=want.ahead)

    def _take(self, number: int) -> None:
        self.victims.append(number)
        self.room_bytes += self._shares.size_bytes(number)

    def take(self, short_bytes: int, now_s: float) -> None:
        """Victims of `short_bytes` in all, from the farthest on."""
        needed_s = self._needed_s(now_s)
        # What nobody wants goes first even then; what the only job wants does not.
        spared_s = UNWANTED_S / 2 if self._uses.planning_count == 1 else np.inf
        for _ in range(LOOKS_MAX):
            if self.room_bytes >= short_bytes:
                return
            found = self._farthest.top(now_s)
            if found is None or found[1] <= needed_s:
                self.refusal = "every other shard is leased, or needed no later"
                return
            if found[1] < spared_s < np.inf and needed_s > 0:
                self.refusal = "the only job with a plan would lose another of its shards instead"
                return
            self._hidden.append((found[0], self._farthest.hide(found[0])))
            self._take(found[0])
        if self.room_bytes < short_bytes:
            self.refusal = f"the {LOOKS_MAX} shards needed last are leased or too small"

    def take_own(
        self, mine: Mask, short_bytes: int, now_s: float, *, is_recency: bool = False
    ) -> None:
        """Victims among those that count for the newcomer's own quota, until that holds it."""
        size_bytes = self._shares.size_bytes
        room_bytes = sum(size_bytes(number) for number in self.victims if mine[number])
        # Above the quota already: it was lowered, or claimed shards count for it since.
        over_bytes = short_bytes - self._want.size_bytes
        if is_recency:
            candidates = self._farthest.oldest_of(mine, LOOKS_MAX)
        else:
            needed_s = self._needed_s(now_s) if over_bytes <= 0 else 0.0
            best = self._farthest.best_of(mine, now_s, LOOKS_MAX)
            candidates = [number for number, horizon_s in best if horizon_s > needed_s]
        for number in candidates:
            if room_bytes >= short_bytes:
                return
            self._hidden.append((number, self._farthest.hide(number)))
            if room_bytes < over_bytes:
                self.surplus.append(number)
            self._take(number)
            room_bytes += size_bytes(number)
        if room_bytes < short_bytes:
            self.refusal = "its quota is taken by shards that are leased, or needed no later"

    def take_shared(self, short_bytes: int, now_s: float) -> None:
        """Like `take`, where tenants share: those above their share make way first."""
        needed_s = self._needed_s(now_s)
        may, always = self._shares.displaceable(self._want.standing, self._want.size_bytes)
        chosen = set(self.victims)
        for mask, at_least_s in ((always, 0.0), (may, needed_s)):
            for number, horizon_s in self._farthest.best_of(mask, now_s, LOOKS_MAX):
                if self.room_bytes >= short_bytes:
                    return
                if number not in chosen and horizon_s > at_least_s:
                    chosen.add(number)
                    self._take(number)
        if self.room_bytes < short_bytes:
            self.refusal = "what this tenant may displace is leased, or needed no later"
