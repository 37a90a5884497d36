"""The policies that are compared, behind one small interface; the simulator acts for them.

`GpufeedDecider` drives the daemon's own policy with the daemon's own book of uses. It is told what
sessions tell a daemon: the order of this epoch and of the next, each shard that is begun, and a
demand rate that is wrong by up to `RATE_JITTER_RATIO`, measured anew every `RATE_EVERY_READS`.

The others are what the field uses: least recently used, the better victim of two random ones (the
default of JuiceFS), S3-FIFO (Yang et al., SOSP 2023: a small queue of a tenth that only what was
read again leaves for the main queue, and a ghost queue of digests), and never evicting (CoorDL).
All bring in what they miss if they can make room; all are seeded.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Protocol

import numpy as np

from gpufeed.bench.sim.workload import Order
from gpufeed.cachefs.config import PolicyConfig
from gpufeed.cachefs.nextuse import NextUses, Numbers
from gpufeed.cachefs.policy import Bypass, PlanPolicy, Want
from gpufeed.cachefs.shares import Shares

RATE_JITTER_RATIO = 0.2
RATE_EVERY_READS = 64
SMALL_QUEUE_RATIO = 0.1
S3_FIFO_FREQUENCY_MAX = 3


class Decider(Protocol):
    """A policy. Shards are numbers; a victim list is acted on by the caller."""

    def job_arrived(self, job: int, speed: float, orders: list[Order], now_s: float) -> None:
        """A job begins; `orders` are its first epoch and, if it has one, the second."""
        ...

    def epoch_begun(self, job: int, following: Order | None) -> None:
        """A job enters an epoch; `following` is the order of the next one, if there is one."""
        ...

    def job_ended(self, job: int) -> None:
        """A job ended or was killed."""
        ...

    def begun(self, job: int, shard: int, *, is_resident: bool, now_s: float) -> None:
        """A job begins to read a shard."""
        ...

    def admit(
        self, shard: int, size_bytes: int, available_bytes: int, now_s: float
    ) -> list[int] | None:
        """Victims that make room for a shard that is fetched, or None: it is not cached."""
        ...

    def arrived(self, shard: int, size_bytes: int, now_s: float) -> None:
        """An admitted shard is resident."""
        ...


class _Planless:
    """What is common to policies that know no plans."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._sizes: dict[int, int] = {}

    def job_arrived(self, job: int, speed: float, orders: list[Order], now_s: float) -> None:
        """See `Decider`."""

    def epoch_begun(self, job: int, following: Order | None) -> None:
        """See `Decider`."""

    def job_ended(self, job: int) -> None:
        """See `Decider`."""

    def begun(self, job: int, shard: int, *, is_resident: bool, now_s: float) -> None:
        """See `Decider`."""

    def arrived(self, shard: int, size_bytes: int, now_s: float) -> None:
        """See `Decider`."""
        self._sizes[shard] = size_bytes


class NeverEvictDecider(_Planless):
    """First come, first kept."""

    def admit(
        self, shard: int, size_bytes: int, available_bytes: int, now_s: float
    ) -> list[int] | None:
        """See `Decider`."""
        return [] if size_bytes <= available_bytes else None


class LruDecider(_Planless):
    """The least recently used goes first."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._order: collections.OrderedDict[int, None] = collections.OrderedDict()

    def begun(self, job: int, shard: int, *, is_resident: bool, now_s: float) -> None:
        """See `Decider`."""
        if is_resident:
            self._order.move_to_end(shard)

    def arrived(self, shard: int, size_bytes: int, now_s: float) -> None:
        """See `Decider`."""
        super().arrived(shard, size_bytes, now_s)
        self._order[shard] = None

    def admit(
        self, shard: int, size_bytes: int, available_bytes: int, now_s: float
    ) -> list[int] | None:
        """See `Decider`."""
        victims: list[int] = []
        for victim in self._order:
            if available_bytes >= size_bytes:
                break
            victims.append(victim)
            available_bytes += self._sizes[victim]
        if available_bytes < size_bytes:
            return None
        for victim in victims:
            del self._order[victim]
        return victims


class TwoRandomDecider(_Planless):
    """Of two residents drawn at random, the one used longer ago goes."""

    DRAWS_MAX = 64

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._residents: list[int] = []
        self._place: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._clock = 0

    def begun(self, job: int, shard: int, *, is_resident: bool, now_s: float) -> None:
        """See `Decider`."""
        self._clock += 1
        self._used[shard] = self._clock

    def arrived(self, shard: int, size_bytes: int, now_s: float) -> None:
        """See `Decider`."""
        super().arrived(shard, size_bytes, now_s)
        self._place[shard] = len(self._residents)
        self._residents.append(shard)

    def _remove(self, shard: int) -> None:
        place, last = self._place.pop(shard), self._residents.pop()
        if last != shard:
            self._residents[place] = last
            self._place[last] = place

    def admit(
        self, shard: int, size_bytes: int, available_bytes: int, now_s: float
    ) -> list[int] | None:
        """See `Decider`."""
        victims: list[int] = []
        for _ in range(self.DRAWS_MAX):
            if available_bytes >= size_bytes or not self._residents:
                break
            pair = (self._random.choice(self._residents), self._random.choice(self._residents))
            victim = min(pair, key=lambda one: self._used.get(one, 0))
            self._remove(victim)
            victims.append(victim)
            available_bytes += self._sizes[victim]
        return victims if available_bytes >= size_bytes else None


class S3FifoDecider(_Planless):
    """Small, main and ghost queues; see the top of the file."""

    def __init__(self, seed: int, capacity_bytes: int) -> None:
        super().__init__(seed)
        self._small_limit_bytes = SMALL_QUEUE_RATIO * capacity_bytes
        self._capacity_bytes = capacity_bytes
        self._small: collections.deque[int] = collections.deque()
        self._main: collections.deque[int] = collections.deque()
        self._small_bytes = 0
        self._ghosts: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._ghost_bytes = 0
        self._frequency: dict[int, int] = {}

    def begun(self, job: int, shard: int, *, is_resident: bool, now_s: float) -> None:
        """See `Decider`."""
        if is_resident:
            seen = self._frequency.get(shard, 0)
            self._frequency[shard] = min(seen + 1, S3_FIFO_FREQUENCY_MAX)

    def arrived(self, shard: int, size_bytes: int, now_s: float) -> None:
        """See `Decider`."""
        super().arrived(shard, size_bytes, now_s)
        self._frequency[shard] = 0
        if shard in self._ghosts:
            self._ghost_bytes -= self._ghosts.pop(shard)
            self._main.append(shard)
        else:
            self._small.append(shard)
            self._small_bytes += size_bytes

    def _forget(self, shard: int) -> None:
        self._ghosts[shard] = self._sizes[shard]
        self._ghost_bytes += self._sizes[shard]
        while self._ghost_bytes > self._capacity_bytes:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def _step(self) -> int | None:
        """Move or evict one shard; returns the evicted one."""
        if self._small and (self._small_bytes > self._small_limit_bytes or not self._main):
            shard = self._small.popleft()
            self._small_bytes -= self._sizes[shard]
            if self._frequency[shard] > 0:
                self._frequency[shard] = 0
                self._main.append(shard)
                return None
            self._forget(shard)
            return shard
        shard = self._main.popleft()
        if self._frequency[shard] > 0:
            self._frequency[shard] -= 1
            self._main.append(shard)
            return None
        return shard

    def admit(
        self, shard: int, size_bytes: int, available_bytes: int, now_s: float
    ) -> list[int] | None:
        """See `Decider`."""
        victims: list[int] = []
        steps = (S3_FIFO_FREQUENCY_MAX + 2) * (len(self._small) + len(self._main))
        while available_bytes < size_bytes and (self._small or self._main) and steps > 0:
            steps -= 1
            victim = self._step()
            if victim is not None:
                victims.append(victim)
                available_bytes += self._sizes[victim]
        return victims if available_bytes >= size_bytes else None


class GpufeedDecider:
    """The daemon's policy; see the top of the file."""

    def __init__(self, seed: int, capacity_bytes: int, shard_count: int) -> None:
        self._random = np.random.default_rng((seed, 7))
        self._uses = NextUses()
        shares = Shares(PolicyConfig(adhoc_ratio=0.0), capacity_bytes)
        self._policy = PlanPolicy(self._uses, shares)
        self._digests = [f"{i:x}" for i in range(shard_count)]
        self._numbers: dict[int, Numbers] = {}
        self._speed: dict[int, float] = {}
        self._reads: collections.Counter[int] = collections.Counter()

    def job_arrived(self, job: int, speed: float, orders: list[Order], now_s: float) -> None:
        """See `Decider`."""
        self._numbers[job] = self._uses.numbers(self._digests)
        self._uses.claim(job, self._numbers[job])
        self._uses.join(job, f"job {job}")
        self._speed[job] = speed
        self._measure(job)
        for i, order in enumerate(orders):
            self._uses.forecast(job, self._numbers[job][order], anew=i == 0)

    def _measure(self, job: int) -> None:
        error = self._random.uniform(-RATE_JITTER_RATIO, RATE_JITTER_RATIO)
        self._uses.set_rate(job, self._speed[job] * (1 + error))

    def epoch_begun(self, job: int, following: Order | None) -> None:
        """See `Decider`."""
        if following is not None:
            self._uses.forecast(job, self._numbers[job][following], anew=False)

    def job_ended(self, job: int) -> None:
        """See `Decider`."""
        self._uses.drop(job)

    def begun(self, job: int, shard: int, *, is_resident: bool, now_s: float) -> None:
        """See `Decider`."""
        self._reads[job] += 1
        if self._reads[job] % RATE_EVERY_READS == 0:
            self._measure(job)
        self._uses.used(job, int(self._numbers[job][shard]))
        if is_resident:
            self._policy.use(self._digests[shard], now_s)

    def admit(
        self, shard: int, size_bytes: int, available_bytes: int, now_s: float
    ) -> list[int] | None:
        """See `Decider`."""
        decision = self._policy.decide(
            Want(self._digests[shard], size_bytes), available_bytes, now_s=now_s
        )
        if isinstance(decision, Bypass):
            return None
        for victim in decision.victims:
            self._policy.remove(victim)
        return [int(victim, 16) for victim in decision.victims]

    def arrived(self, shard: int, size_bytes: int, now_s: float) -> None:
        """See `Decider`."""
        want = Want(self._digests[shard], size_bytes)
        self._policy.abandon(want)
        self._policy.add(want, now_s)


POLICIES = ("gpufeed", "never-evict", "lru", "2-random", "s3-fifo")


def make_decider(name: str, *, seed: int, capacity_bytes: int, shard_count: int) -> Decider:
    """One of `POLICIES`."""
    if name == "gpufeed":
        return GpufeedDecider(seed, capacity_bytes, shard_count)
    if name == "s3-fifo":
        return S3FifoDecider(seed, capacity_bytes)
    planless: dict[str, Callable[[int], Decider]] = {
        "never-evict": NeverEvictDecider, "lru": LruDecider, "2-random": TwoRandomDecider,
    }  # fmt: skip
    return planless[name](seed)
