"""The cache disk breaks under a running daemon: readers go on from the origin, and it comes back.

The disk is broken inside the daemon's own calls (``diskshim.c``), so that a call can also hang;
`test_daemon_mounts.py` does it with real file systems. How long a reader waited for its next
extent, counted from the fault, is printed; the bound asserted leaves room for a busy machine.
"""

from __future__ import annotations

import signal
import time

import pytest
from chaos_data import put_shards, read_checked
from chaos_disk import shard_files
from chaos_node import comes_back
from chaos_readers import Pulse, Readers

from gpufeed.cachefs.client import Session
from gpufeed.cachefs.store.writer import SYNC_LATE_S
from gpufeed.cachefs.units import MIB

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

CAPACITY_BYTES = 96 * MIB
TIGHT_CAPACITY_BYTES = 8 * MIB
LOOKS = 20
HOT_SHARDS = 8
SHARDS = 16
# One second is the aim; what is noticed last is a sync, when it is late.
GAP_S_MAX = SYNC_LATE_S + 1.0

FAULTS = [
    ("EIO", ("write",)),
    ("EIO", ("sync",)),
    ("EIO", ("read",)),
    ("EIO", ("write", "read", "sync", "open", "rename", "unlink")),
    ("ENOSPC", ("write", "open")),
    ("EROFS", ("write", "open", "rename")),
    ("hang", ("write",)),
    ("hang", ("sync",)),
    ("hang", ("read",)),
    ("hang", ("open",)),
    ("hang", ("rename",)),
    ("hang", ("write", "read", "sync", "open", "rename", "unlink")),
]


@pytest.mark.parametrize(
    ("fault", "calls"), FAULTS, ids=lambda v: v if isinstance(v, str) else "-".join(v)
)
def test_a_broken_disk_is_stepped_around(chaos, shim, fault: str, calls: tuple[str, ...]) -> None:
    truth = put_shards(chaos.bucket, SHARDS, seed=3)
    daemon = chaos.begin(GPUFEED_STORE_CAPACITY_BYTES=str(CAPACITY_BYTES), **shim.environment)
    with Session.connect(chaos.socket) as session:
        read_checked(session, truth, sorted(truth)[:HOT_SHARDS])
    daemon.settled(fills_in_flight=0, store_resident_shards=HOT_SHARDS)

    pulse = Pulse(chaos.socket, truth, seed=4)
    pulse.wait_extents(5)
    with shim.broken(fault, *calls):
        began_s = time.monotonic()
        pulse.wait_passes(3)
        assert shim.hits, "no call met the fault: the test proves nothing"
        gap_s = pulse.longest_gap_s(began_s)
        print(f"\n{fault} {' '.join(calls)}: {shim.hits} calls hit, longest gap {gap_s:.2f} s")
        daemon.settled(store_degraded=1)
    comes_back(chaos, daemon)
    pulse.wait_passes(1)
    pulse.stop()
    assert gap_s < GAP_S_MAX

    daemon.settled(sessions=0, fills_in_flight=0, arena_leased_slots=0, store_reserved_bytes=0)
    daemon.end(signal.SIGTERM)
    assert daemon.process.returncode == 0
    assert not [name for name in shard_files(chaos.cache) if name.endswith(".tmp")]


@pytest.mark.parametrize("fault", ["EIO", "hang"])
def test_evicted_files_that_the_disk_keeps_count_until_they_are_gone(chaos, shim, fault) -> None:
    truth = put_shards(chaos.bucket, SHARDS, seed=8)
    daemon = chaos.begin(GPUFEED_STORE_CAPACITY_BYTES=str(TIGHT_CAPACITY_BYTES), **shim.environment)
    readers = Readers(chaos.socket, truth, count=2, seed=9)
    daemon.log.wait_for(" evicted ")
    peak_bytes = 0
    with shim.broken(fault, "unlink"):
        for _ in range(LOOKS):
            readers.wait_extents(20)
            peak_bytes = max(peak_bytes, sum(shard_files(chaos.cache).values()))
        assert shim.hits, "no call met the fault: the test proves nothing"
    readers.stop()
    print(f"\n{fault} unlink: {shim.hits} calls hit, at most {peak_bytes} bytes of shards")
    assert peak_bytes <= TIGHT_CAPACITY_BYTES
    daemon.settled(sessions=0, fills_in_flight=0, arena_leased_slots=0, store_reserved_bytes=0)
    resident = daemon.status()["store_resident_shards"]
    daemon.end(signal.SIGTERM)
    assert daemon.process.returncode == 0
    files = shard_files(chaos.cache)
    assert len(files) == resident, "what could not be removed was forgotten"
    assert not [name for name in files if name.endswith(".tmp")]
