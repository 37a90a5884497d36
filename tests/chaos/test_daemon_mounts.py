"""Real file systems that fill up, die or turn read-only under a running daemon.

Where a fault can be undone (space is made) the cache comes back; a file system that was shut down
or aborted stays so until it is mounted anew, and then the daemon must go on without it and end in
peace. `test_daemon_disk.py` breaks single calls.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest
from chaos_data import put_shards, read_checked
from chaos_disk import shard_files
from chaos_node import comes_back
from chaos_readers import Pulse

from gpufeed.cachefs.client import Session
from gpufeed.cachefs.units import GIB, MIB

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

DISK_BYTES = 64 * MIB
SPARE_BYTES = 6 * MIB
HOT_SHARDS = 8
SHARDS = 16
GAP_S_MAX = 5.0
FS_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = struct.pack("I", 2)


def started(chaos, disk: Path):
    """A daemon with half of the shards in its store; returns it and what the shards hold."""
    truth = put_shards(chaos.bucket, SHARDS, seed=5)
    daemon = chaos.begin(
        GPUFEED_STORE_PATH=str(disk / "cache"), GPUFEED_STORE_CAPACITY_BYTES=str(GIB)
    )
    with Session.connect(chaos.socket) as session:
        read_checked(session, truth, sorted(truth)[:HOT_SHARDS])
    daemon.settled(fills_in_flight=0, store_resident_shards=HOT_SHARDS)
    return daemon, truth


def suffers(daemon, pulse: Pulse, what: str) -> None:
    """Three passes right after the fault: no long gap, and the daemon says what it thinks of it."""
    began_s = time.monotonic()
    pulse.wait_passes(3)
    gap_s = pulse.longest_gap_s(began_s)
    print(f"\n{what}: longest gap {gap_s:.2f} s")
    daemon.settled(store_degraded=1)
    assert gap_s < GAP_S_MAX


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_fills_up_is_stepped_around_and_comes_back(chaos, mounted, kind) -> None:
    disk = mounted(kind, DISK_BYTES)
    daemon, truth = started(chaos, disk)
    free = os.statvfs(disk)
    hog = disk / "hog"
    with hog.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - SPARE_BYTES)
    pulse = Pulse(chaos.socket, truth, seed=6)
    began_s = time.monotonic()
    pulse.wait_passes(3)
    gap_s = pulse.longest_gap_s(began_s)
    found = daemon.status()
    print(
        f"\n{kind} full: longest gap {gap_s:.2f} s, {found['bypass_total']:.0f} fills past the "
        f"cache, degraded {found['store_degraded']:.0f}"
    )
    # Either it met the end of the disk, or it saw it coming; some shards cannot be kept.
    assert found["bypass_total"] > 0
    assert found["store_resident_shards"] < SHARDS
    assert gap_s < GAP_S_MAX

    hog.unlink()
    comes_back(chaos, daemon)
    # One to find that there is room again, one to use it.
    pulse.wait_passes(2)
    pulse.stop()
    found = daemon.settled(
        sessions=0, fills_in_flight=0, arena_leased_slots=0, store_reserved_bytes=0
    )
    assert found["store_resident_shards"] >= SHARDS
    daemon.end(signal.SIGTERM)
    assert daemon.process.returncode == 0
    assert not [name for name in shard_files(disk / "cache") if name.endswith(".tmp")]


def shut_down(disk: Path) -> None:
    """As when the device goes away: every call ends in EIO."""
    descriptor = os.open(disk, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(descriptor, FS_IOC_SHUTDOWN, NO_LOG_FLUSH)
    finally:
        os.close(descriptor)


def abort(disk: Path) -> None:
    """As when the kernel finds the file system damaged: it turns read-only by itself."""
    subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=False, capture_output=True)
    with pytest.raises(OSError, match=r"Read-only|Input/output"):
        (disk / "probe").write_bytes(b"x")


@pytest.mark.parametrize("fault", [shut_down, abort], ids=["dies", "turns-read-only"])
def test_a_disk_that_is_lost_is_gone_on_without(chaos, mounted, fault) -> None:
    disk = mounted("ext4", DISK_BYTES)
    daemon, truth = started(chaos, disk)
    pulse = Pulse(chaos.socket, truth, seed=7)
    pulse.wait_extents(5)
    fault(disk)
    suffers(daemon, pulse, fault.__name__)
    pulse.stop()
    daemon.settled(sessions=0, fills_in_flight=0, arena_leased_slots=0)
    daemon.end(signal.SIGTERM)
    assert daemon.process.returncode == 0
