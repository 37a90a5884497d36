"""Defaults derived from fixture machines: cgroup v1, v2, none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpufeed.cachefs.units import GIB, MIB
from gpufeed.daemon.machine import Machine, disk_usage_bytes

V1_UNLIMITED = "9223372036854771712"


@pytest.fixture
def tree(tmp_path):
    def write(**files: str) -> str:
        written = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\n", **files}
        for name, text in written.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(tmp_path)

    return write


def machine(root: str = "/", uid: int = 0, **environ: str) -> Machine:
    return Machine(root=root, environ=environ, uid=uid)


V1 = "5:cpu,cpuacct:/\n4:memory:/pods/a\n0::/\n"


@pytest.mark.parametrize(
    ("files", "limit_bytes", "how"),
    [
        ({}, 64 * GIB, "total memory"),
        ({"proc/self/cgroup": "0::/\n"}, 64 * GIB, "total memory"),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 64 * GIB, "total"),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{GIB}\n"}, GIB, "cgroup"),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
            },
            2 * GIB,
            "cgroup",
        ),
        # The path is the host's, the mount is the container's own cgroup.
        (
            {"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/memory.max": f"{3 * GIB}\n"},
            3 * GIB,
            "cgroup",
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
                "sys/fs/cgroup/memory/pods/a/memory.limit_in_bytes": f"{4 * GIB}\n",
            },
            4 * GIB,
            "cgroup",
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
            },
            64 * GIB,
            "total memory",
        ),
    ],
)
def test_the_memory_limit_is_the_least_of_all(tree, files, limit_bytes, how):
    limit = machine(tree(**files)).memory_limit()
    assert limit.value == limit_bytes
    assert how in limit.how


@pytest.mark.parametrize(
    ("memory_bytes", "extent_bytes", "arena_bytes"),
    [
        (64 * GIB, 4 * MIB, 8 * GIB),
        (8 * GIB, 4 * MIB, 2 * GIB),
        (100 * MIB, 4 * MIB, 64 * MIB),
        (100 * MIB, 16 * MIB, 128 * MIB),
        (402 * MIB, 4 * MIB, 100 * MIB),
    ],
)
def test_the_arena_is_a_quarter_within_bounds(tree, memory_bytes, extent_bytes, arena_bytes):
    root = tree(**{"proc/meminfo": f"MemTotal: {memory_bytes // 1024} kB\n"})
    assert machine(root).arena_bytes(extent_bytes).value == arena_bytes


def test_a_machine_without_proc_gets_the_least(tmp_path):
    assert machine(str(tmp_path)).arena_bytes(4 * MIB).value == 64 * MIB


def test_paths_are_the_systems_for_root_and_the_users_own_otherwise(tmp_path):
    assert machine().socket_path().value == "/run/gpufeed/gpufeed.sock"
    user = machine(uid=1000, XDG_RUNTIME_DIR="/run/user/1000", XDG_CACHE_HOME=str(tmp_path))
    assert user.socket_path().value == "/run/user/1000/gpufeed/gpufeed.sock"
    assert user.cache_path().value == f"{tmp_path}/gpufeed"
    assert machine(uid=1, HOME=str(tmp_path)).cache_path().value == f"{tmp_path}/.cache/gpufeed"
    homeless = machine(uid=1).cache_path()
    assert homeless.value == ""
    assert "memory only" in homeless.how


def test_capacity_counts_what_the_cache_holds(tmp_path: Path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "shard").write_bytes(b"x" * (3 * MIB))
    assert disk_usage_bytes(str(cache)) >= 3 * MIB
    found = machine().capacity_bytes(str(cache), 0.0)
    free = os.statvfs(cache)
    assert 0 < found.value < free.f_blocks * free.f_frsize
    assert "3 MiB held" in found.how
    assert machine().capacity_bytes(str(cache / "not" / "yet"), 0.05).value > 0
    assert machine().capacity_bytes("", 0.05).value == 0
