"""Defaults that depend on the machine, each with the sentence that explains it.

Owns the reading of cgroup limits (v1 and v2), of total memory, and of the space on the cache's
filesystem. Nothing here is written or created. Every file is read below `root`, so a test gives a
fixture tree; the filesystem of the cache is asked as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gpufeed.cachefs import cgroups, paths
from gpufeed.cachefs.units import GIB, MIB, format_bytes

ARENA_BYTES_MIN = 64 * MIB
ARENA_BYTES_MAX = 8 * GIB
ARENA_SHARE = 0.25
CAPACITY_SHARE = 0.8
ARENA_SLOTS_MIN = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Derived(Generic[T]):
    """A default and how it was found."""

    value: T
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that we run on."""

    root: str = "/"
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    uid: int = field(default_factory=os.getuid)

    def memory_limit(self) -> Derived[int]:
        """The least of total memory and the limits of our cgroup and of those above it."""
        found = [(self._total_memory(), "total memory")]
        found += [(limit, "the cgroup's limit") for limit in self._cgroup_limits()]
        limit_bytes, what = min(found)
        return Derived(limit_bytes, f"{what}, {format_bytes(limit_bytes)}")

    def arena_bytes(self, extent_bytes: int) -> Derived[int]:
        """A quarter of the memory limit, within bounds, in whole extents."""
        limit = self.memory_limit()
        least = max(ARENA_BYTES_MIN, ARENA_SLOTS_MIN * extent_bytes)
        size_bytes = max(least, min(int(limit.value * ARENA_SHARE), ARENA_BYTES_MAX))
        return Derived(
            size_bytes // extent_bytes * extent_bytes,
            f"{ARENA_SHARE:.0%} of {limit.how}; at least {format_bytes(least)}, at most "
            f"{format_bytes(ARENA_BYTES_MAX)}",
        )

    def socket_path(self) -> Derived[str]:
        """The node's socket for root, a private one for a user."""
        if self.uid == 0:
            return Derived(paths.SYSTEM_SOCKET, "the node's socket, as we run as root")
        return Derived(paths.user_socket(self.environ), "the user's runtime directory")

    def cache_path(self) -> Derived[str]:
        """The system's or the user's cache directory; empty (memory only) if neither is writable.

        No disk is chosen by its speed: which NVMe may be filled is the operator's decision.
        """
        if self.uid == 0:
            path, how = "/var/cache/gpufeed", "the system's cache directory, as we run as root"
        else:
            home = self.environ.get("HOME", "")
            base = self.environ.get("XDG_CACHE_HOME", "") or (f"{home}/.cache" if home else "")
            path, how = f"{base}/gpufeed" if base else "", "the user's cache directory"
        if path and is_creatable(path):
            return Derived(path, how)
        return Derived("", f"memory only: {path or 'the home directory'} is not writable")

    def capacity_bytes(self, path: str, free_floor_ratio: float) -> Derived[int]:
        """A share of what the cache's filesystem has free or the cache already holds.

        What it holds is counted in, so that the capacity does not shrink with every restart.
        """
        if not path:
            return Derived(0, "memory only")
        found = os.statvfs(nearest_existing(path))
        free_bytes = found.f_bavail * found.f_frsize
        floor_bytes = int(found.f_blocks * found.f_frsize * free_floor_ratio)
        held_bytes = disk_usage_bytes(path)
        usable_bytes = max(0, free_bytes + held_bytes - floor_bytes)
        return Derived(
            int(usable_bytes * CAPACITY_SHARE) // MIB * MIB,
            f"{CAPACITY_SHARE:.0%} of {format_bytes(usable_bytes)}, which is "
            f"{format_bytes(free_bytes)} free and {format_bytes(held_bytes)} held by the cache, "
            f"less a floor of {format_bytes(floor_bytes)}",
        )

    def _total_memory(self) -> int:
        for line in cgroups.read_text(self.root, "proc/meminfo").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
        return ARENA_BYTES_MIN  # unknown: the least

    def _cgroup_limits(self) -> Iterator[int]:
        names = {1: "memory.limit_in_bytes", 2: "memory.max"}
        for version, folder in cgroups.folders(self.root, "memory"):
            text = cgroups.read_text(self.root, f"{folder}/{names[version]}").strip()
            if text.isdigit():
                yield int(text)


def nearest_existing(path: str) -> str:
    """`path`, or the closest one above it that exists."""
    path = os.path.abspath(path)
    while path != "/" and not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def is_creatable(path: str) -> bool:
    """Whether the directory `path` is writable, or could be made."""
    existing = nearest_existing(path)
    return os.path.isdir(existing) and os.access(existing, os.W_OK)


def disk_usage_bytes(path: str) -> int:
    """Bytes that the files below `path` occupy; what cannot be read counts nothing."""
    total_bytes = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                total_bytes += os.lstat(os.path.join(directory, name)).st_blocks * 512
            except OSError:  # removed meanwhile
                continue
    return total_bytes
