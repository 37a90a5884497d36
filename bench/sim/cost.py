"""What a decision of the daemon's policy costs at full size: time and memory, no simulation.

A node with `shards` resident shards, which are four fifths of the dataset, and `jobs` jobs of
different speeds that each forecast two epochs in orders of their own. Each reads at its speed,
which the policy knows with an error of up to `RATE_ERROR_RATIO`, measured anew now and then; what
is missing asks to enter the full cache. Timed are each decision alone (`decide`), and all that the
policy does for a read, on the average of all reads (`used`, `use`, `decide` and what follows from
it); memory is what its tables allocate for each shard that it knows, digests left out, since the
store keeps those anyway.
"""

from __future__ import annotations

import heapq
import os
import time
import tracemalloc
from typing import Any

import numpy as np

from gpufeed.bench.progress import Progress
from gpufeed.cachefs.config import PolicyConfig
from gpufeed.cachefs.nextuse import NextUses
from gpufeed.cachefs.policy import Admit, PlanPolicy, Restored, Want
from gpufeed.cachefs.shares import Shares
from gpufeed.cachefs.units import MIB

SIZE_BYTES = 64 * MIB
RESIDENT_RATIO = 0.8
SPEED_RANGE = (0.5, 2.0)
RATE_ERROR_RATIO = 0.2
RATE_EVERY_READS = 64
# Before the clock starts: tables that were just made are not in any cache of the machine.
WARM_UP_READS = 10_000
DECISION_US_MAX = 50.0
BYTES_A_SHARD_MAX = 300.0


class _Node:
    def __init__(self, resident: int, jobs: int, seed: int) -> None:
        generator = self.generator = np.random.default_rng(seed)
        self.speeds = generator.uniform(*SPEED_RANGE, jobs)
        known = int(resident / RESIDENT_RATIO)
        self.digests = [f"{i:032x}" for i in range(known)]
        self.resident = np.zeros(known, np.bool_)
        self.resident[:resident] = True
        self.orders = [generator.permutation(known).astype(np.int32) for _ in range(jobs)]
        following = [generator.permutation(known).astype(np.int32) for _ in range(jobs)]
        tracemalloc.start()
        self.uses = NextUses()
        self.policy = PlanPolicy(self.uses, Shares(PolicyConfig(), resident * SIZE_BYTES))
        self._restore(resident)
        numbers = self.uses.numbers(self.digests)
        for job in range(jobs):
            self.uses.claim(job, numbers)
            self.uses.join(job, f"job {job}")
            self.uses.forecast(job, numbers[self.orders[job]], anew=True)
            self.uses.forecast(job, numbers[following[job]], anew=False)
        self.bytes_a_shard = tracemalloc.get_traced_memory()[0] / known
        tracemalloc.stop()
        self.turns = [(0.0, job, 0) for job in range(jobs)]

    def _restore(self, resident: int) -> None:
        found = Restored(
            dict(zip(self.digests[:resident], range(resident), strict=True)),
            np.full(resident, SIZE_BYTES, np.int64), np.arange(resident),
        )  # fmt: skip
        self.policy.restore(found, now_s=0.0)

    def turn(self) -> tuple[float, int, int]:
        """When who reads next, and what; the policy may learn the reader's rate first."""
        now_s, job, count = heapq.heappop(self.turns)
        heapq.heappush(self.turns, (now_s + 1 / self.speeds[job], job, count + 1))
        if count % RATE_EVERY_READS == 0:
            error = self.generator.uniform(-RATE_ERROR_RATIO, RATE_ERROR_RATIO)
            self.uses.set_rate(job, float(self.speeds[job] * (1 + error)))
        return now_s, job, int(self.orders[job][count])

    def read(self, now_s: float, job: int, shard: int) -> float | None:
        """One read, as the daemon tells the policy; the time of its decision, if there was one."""
        digest = self.digests[shard]
        number = self.uses.find(digest)
        assert number is not None
        self.uses.used(job, number)
        if self.resident[shard]:
            self.policy.use(digest, now_s)
            return None
        want = Want(digest, SIZE_BYTES)
        begin_ns = time.thread_time_ns()
        decision = self.policy.decide(want, 0, now_s=now_s)
        spent_us = (time.thread_time_ns() - begin_ns) / 1000
        if isinstance(decision, Admit):
            for victim in decision.victims:
                self.policy.remove(victim)
                self.resident[int(victim, 16)] = False
            self.policy.abandon(want)
            self.policy.add(want, now_s)
            self.resident[shard] = True
        return spent_us


def measure(shards: int, jobs: int, reads: int, seed: int, progress: Progress) -> dict[str, Any]:
    """Returns the result that ``--json`` writes."""
    progress.stage("making plans", jobs)
    node = _Node(shards, jobs, seed)
    progress.stage("deciding", reads)
    all_us: list[float] = []
    decided_us: list[float] = []
    for _ in range(min(WARM_UP_READS, shards * jobs // 4)):
        node.read(*node.turn())
    for i in range(reads):
        now_s, job, shard = node.turn()
        begin_ns = time.thread_time_ns()
        decision_us = node.read(now_s, job, shard)
        spent_us = (time.thread_time_ns() - begin_ns) / 1000
        all_us.append(spent_us)
        if decision_us is not None:
            decided_us.append(decision_us)
        if i % 1000 == 0:
            progress.update(i)
    mean_us = float(np.mean(decided_us))
    return {
        "kind": "policy-cost",
        "version": 1,
        "shards": shards,
        "jobs": jobs,
        "reads": reads,
        "decisions": len(decided_us),
        "decision_us_mean": mean_us,
        "decision_us_p50": float(np.median(decided_us)),
        "decision_us_p99": float(np.percentile(decided_us, 99)),
        "decision_us_max": float(np.max(decided_us)),
        "read_us_mean": float(np.mean(all_us)),
        "bytes_a_shard": node.bytes_a_shard,
        "load_average": os.getloadavg()[0],
        "targets": [
            {"what": "microseconds a decision", "value": mean_us, "limit": DECISION_US_MAX,
             "met": mean_us <= DECISION_US_MAX},
            {"what": "microseconds a read", "value": float(np.mean(all_us)),
             "limit": DECISION_US_MAX, "met": float(np.mean(all_us)) <= DECISION_US_MAX},
            {"what": "bytes a shard", "value": node.bytes_a_shard, "limit": BYTES_A_SHARD_MAX,
             "met": node.bytes_a_shard <= BYTES_A_SHARD_MAX},
        ],
    }  # fmt: skip
