"""How many threads: by configuration, by CPUs, by the quota of the cgroup."""

from __future__ import annotations

import os

import pytest

from gpufeed.cachefs.origin.cpus import thread_count, usable_cpus


@pytest.mark.parametrize(
    ("configured", "connections", "cpus", "count"),
    [
        (0, 64, 1.0, 1),
        (0, 64, 2.0, 1),
        (0, 64, 4.0, 2),
        (0, 64, 0.5, 1),
        (0, 64, 128.0, 6),
        (0, 3, 128.0, 3),
        (5, 64, 1.0, 5),
        (5, 2, 1.0, 2),
    ],
)
def test_threads_follow_the_cpus_unless_told(configured, connections, cpus, count):
    assert thread_count(configured, connections, cpus) == count


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_a_cgroup_the_affinity_counts(tmp_path):
    assert usable_cpus(str(tmp_path)) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("text", "cpus"), [("50000 100000", 0.5), ("max 100000", None)])
def test_the_second_cgroups_quota_is_read(tmp_path, text, cpus):
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path, "sys/fs/cgroup/a/cpu.max", text + "\n")
    assert usable_cpus(str(tmp_path)) == (cpus or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("text", "cpus"), [("25000", 0.25), ("-1", None)])
def test_the_first_cgroups_quota_is_read(tmp_path, text, cpus):
    write(tmp_path, "proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/x\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", text + "\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert usable_cpus(str(tmp_path)) == (cpus or len(os.sched_getaffinity(0)))
