"""How many CPUs we may use, and how many engine threads that deserves.

CPU affinity and cgroup quotas (v1 and v2) bound it. Every file is read below `root`, so a test
gives a fixture tree.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from gpufeed.cachefs import cgroups

# One thread receives 2 to 3 GB/s, so these fill a 100 Gbit/s network; more would only take turns.
THREADS_AUTO_MAX = 6
# The others decode, hash and serve.
CPUS_PER_THREAD = 2


def thread_count(configured: int, connections_max: int, cpus: float) -> int:
    """How many engine threads: as configured, or (0) by the CPUs; each needs a connection."""
    count = configured or min(THREADS_AUTO_MAX, int(cpus / CPUS_PER_THREAD))
    return max(1, min(count, connections_max))


def usable_cpus(root: str = "/") -> float:
    """CPUs of our affinity mask, or the least quota of our cgroup and those above it."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(root)])


def _quotas(root: str) -> Iterator[float]:
    for version, folder in cgroups.folders(root, "cpu"):
        if version == 2:
            quota = cgroups.read_text(root, f"{folder}/cpu.max").split()
            yield from _quota(quota[:1], quota[1:])
        else:
            yield from _quota(
                cgroups.read_text(root, f"{folder}/cpu.cfs_quota_us").split(),
                cgroups.read_text(root, f"{folder}/cpu.cfs_period_us").split(),
            )


def _quota(quota_us: list[str], period_us: list[str]) -> Iterator[float]:
    """Nothing where there is none (``max``, -1)."""
    if quota_us and period_us and quota_us[0].isdigit() and period_us[0].isdigit():
        cpus = int(quota_us[0]) / max(1, int(period_us[0]))
        if cpus > 0 and math.isfinite(cpus):
            yield cpus
