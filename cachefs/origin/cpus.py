"""How many CPUs we may use, and how many engine threads that deserves.

Owns the reading of CPU affinity and of cgroup quotas (v1 and v2). Every file is read below `root`,
so a test gives a fixture tree.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

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
    for line in _read(root, "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            for above in _upwards(path):
                quota = _read(root, f"sys/fs/cgroup{above}/cpu.max").split()
                yield from _quota(quota[:1], quota[1:])
        elif "cpu" in controllers.split(","):
            for above in _upwards(path):
                base = f"sys/fs/cgroup/cpu{above}"
                yield from _quota(
                    _read(root, f"{base}/cpu.cfs_quota_us").split(),
                    _read(root, f"{base}/cpu.cfs_period_us").split(),
                )


def _quota(quota_us: list[str], period_us: list[str]) -> Iterator[float]:
    """Nothing where there is none (``max``, -1)."""
    if quota_us and period_us and quota_us[0].isdigit() and period_us[0].isdigit():
        cpus = int(quota_us[0]) / max(1, int(period_us[0]))
        if cpus > 0 and math.isfinite(cpus):
            yield cpus


def _upwards(path: str) -> Iterator[str]:
    # In a container the path may be the host's while the mount is our own cgroup: then only the
    # mount's root exists, which is the last one looked at.
    path = path.rstrip("/")
    while path.startswith("/"):
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _read(root: str, path: str) -> str:
    try:
        with open(os.path.join(root, path), encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
