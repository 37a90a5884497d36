"""The simulated node: jobs, an origin of limited bandwidth, and a cache that a policy rules. Pure.

Each job keeps the next `WINDOW_SHARDS` shards of its order requested and trains on them in order;
what one shard takes is its bytes at the job's speed, give or take `STEP_JITTER_RATIO`. A request
finds its shard resident, or joins its fetch, or begins one; a fetch that the policy admits takes
its room at once and is resident when it has arrived. The origin gives all fetches equal parts of
`origin_ratio` times what the live jobs demand. A shard that has arrived, or that was resident, is
in the job's window in memory at once, as extents of the arena are: it needs its place no longer.

Time jumps from event to event; the same seed gives the same run.
"""

from __future__ import annotations

import collections
import math
import random
from dataclasses import dataclass, field

from gpufeed.bench.sim.deciders import Decider
from gpufeed.bench.sim.workload import DEMAND_BYTES_PER_S, Job, Workload, order_of

WINDOW_SHARDS = 4
STEP_JITTER_RATIO = 0.2
_TINY_S = 1e-9
_TINY_BYTES = 1e-3


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to. `trace` has the shards in the order of reading; joins are left out."""

    trace: tuple[int, ...]
    origin_bytes: int
    written_bytes: int
    au_ratio: float


@dataclass(slots=True)
class _Request:
    shard: int
    is_ready: bool = False


@dataclass(slots=True)
class _Fetch:
    left_bytes: float
    is_admitted: bool
    requests: list[_Request]


@dataclass(slots=True)
class _Running:
    number: int
    job: Job
    requested: int = 0
    window: collections.deque[_Request] = field(default_factory=collections.deque)
    step_ends_s: float = math.inf
    trained_s: float = 0.0
    ended_s: float = 0.0
    is_live: bool = False

    @property
    def has_ended(self) -> bool:
        return self.requested >= self.job.read_count and not self.window


class Simulator:
    """One run; see the top of the file."""

    def __init__(
        self, workload: Workload, decider: Decider, *, capacity_bytes: int, origin_ratio: float,
        seed: int,
    ) -> None:  # fmt: skip
        self._workload = workload
        self._decider = decider
        self._capacity_bytes = capacity_bytes
        self._origin_ratio = origin_ratio
        self._random = random.Random(seed)
        self._jobs = [_Running(i, job) for i, job in enumerate(workload.jobs)]
        self._resident: set[int] = set()
        self._fetches: dict[int, _Fetch] = {}
        self._used_bytes = 0
        self._now_s = 0.0
        self._trace: list[int] = []
        self._origin_bytes = 0
        self._written_bytes = 0

    def run(self) -> Outcome:
        """Until the last job has ended."""
        waiting = sorted(self._jobs, key=lambda one: one.job.arrives_s, reverse=True)
        live: list[_Running] = []
        while live or waiting:
            while waiting and waiting[-1].job.arrives_s <= self._now_s + _TINY_S:
                live.append(self._arrive(waiting.pop()))
            for one in live:
                self._serve(one)
            for one in [one for one in live if one.has_ended]:
                live.remove(one)
                one.ended_s = self._now_s
                self._decider.job_ended(one.number)
            moments_s = [one.step_ends_s for one in live]
            if waiting:
                moments_s.append(waiting[-1].job.arrives_s)
            if moments_s or self._fetches:
                self._pass_time(live, min(moments_s, default=math.inf))
        trained_s = sum(one.trained_s for one in self._jobs)
        lived_s = sum(one.ended_s - one.job.arrives_s for one in self._jobs)
        return Outcome(
            tuple(self._trace), self._origin_bytes, self._written_bytes, trained_s / lived_s
        )

    def _arrive(self, one: _Running) -> _Running:
        epochs = range(min(2, one.job.epoch_count))
        orders = [order_of(one.job.seed, epoch, len(self._workload.sizes)) for epoch in epochs]
        self._decider.job_arrived(one.number, one.job.speed, orders, self._now_s)
        return one

    # --- one job ------------------------------------------------------------------------------

    def _serve(self, one: _Running) -> None:
        """Request what fits the window, and begin a step if its shard is there."""
        while len(one.window) < WINDOW_SHARDS and one.requested < one.job.read_count:
            one.window.append(self._request(one))
        if one.step_ends_s == math.inf and one.window and one.window[0].is_ready:
            size_bytes = self._workload.sizes[one.window[0].shard]
            jitter = self._random.uniform(-STEP_JITTER_RATIO, STEP_JITTER_RATIO)
            step_s = size_bytes / (DEMAND_BYTES_PER_S * one.job.speed) * (1 + jitter)
            one.trained_s += step_s
            one.step_ends_s = self._now_s + step_s

    def _request(self, one: _Running) -> _Request:
        count = len(self._workload.sizes)
        epoch, position = divmod(one.requested, count)
        if position == 0 and epoch:
            more = epoch + 1 < one.job.epoch_count
            following = order_of(one.job.seed, epoch + 1, count) if more else None
            self._decider.epoch_begun(one.number, following)
        shard = int(order_of(one.job.seed, epoch, count)[position])
        one.requested += 1
        request = _Request(shard)
        here = shard in self._resident
        self._decider.begun(one.number, shard, is_resident=here, now_s=self._now_s)
        fetch = self._fetches.get(shard)
        if fetch is not None:
            fetch.requests.append(request)
            return request
        self._trace.append(shard)
        if here:
            request.is_ready = True
        else:
            self._fetch(shard, request)
        return request

    def _fetch(self, shard: int, request: _Request) -> None:
        size_bytes = self._workload.sizes[shard]
        self._origin_bytes += size_bytes
        victims = self._decider.admit(
            shard, size_bytes, self._capacity_bytes - self._used_bytes, self._now_s
        )
        if victims is not None:
            for victim in victims:
                self._resident.remove(victim)
                self._used_bytes -= self._workload.sizes[victim]
            self._used_bytes += size_bytes
            self._written_bytes += size_bytes
            assert self._used_bytes <= self._capacity_bytes, "the cache holds more than it can"
        self._fetches[shard] = _Fetch(float(size_bytes), victims is not None, [request])

    # --- time ---------------------------------------------------------------------------------

    def _pass_time(self, live: list[_Running], until_s: float) -> None:
        """On to the next end of a step or of a fetch, or to `until_s`."""
        per_fetch = 0.0
        if self._fetches:
            demand = DEMAND_BYTES_PER_S * sum(one.job.speed for one in live)
            per_fetch = self._origin_ratio * demand / len(self._fetches)
            least_bytes = min(fetch.left_bytes for fetch in self._fetches.values())
            until_s = min(until_s, self._now_s + least_bytes / per_fetch)
        passed_s = until_s - self._now_s
        self._now_s = until_s
        for shard, fetch in list(self._fetches.items()):
            fetch.left_bytes -= per_fetch * passed_s
            if fetch.left_bytes <= _TINY_BYTES:
                self._arrived(shard, fetch)
        for one in live:
            if one.step_ends_s <= self._now_s + _TINY_S:
                one.step_ends_s = math.inf
                one.window.popleft()

    def _arrived(self, shard: int, fetch: _Fetch) -> None:
        del self._fetches[shard]
        for request in fetch.requests:
            request.is_ready = True
        if fetch.is_admitted:
            self._resident.add(shard)
            self._decider.arrived(shard, self._workload.sizes[shard], self._now_s)
