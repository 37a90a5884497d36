"""kill -9 the daemon at 200 random moments under load, on a disk of its own.

After each start: what the log says was committed and not evicted is served without a request to the
origin, every byte is right, no file lies about that is not a resident shard. All the time: the
capacity holds on the file system itself. After each kill the log and the directory tell what was
interrupted, and the test fails if too few kills interrupted anything.
"""

from __future__ import annotations

import collections
import random
import time
from pathlib import Path

import pytest
from chaos_disk import DiskWatch, index_bytes, shard_files, used_bytes
from chaos_readers import Readers
from chaos_siege import Siege

from gpufeed.cachefs.units import MIB

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

# Sieges, each of a directory of its own that lives through all its kills.
SEEDS = (20, 21, 22, 23)
KILLS = 50
READERS = 3
CAPACITY_BYTES = 20 * MIB
DISK_BYTES = 128 * MIB
# What the file system itself may take beside the files: maps of extents, grown directories.
OVERHEAD_BYTES = MIB
START_S_MAX = 0.8
LOAD_S_MAX = 0.5
# Kills of a siege that must have interrupted each of these.
LANDED_MIN = {"start": 1, "idle": 2, "fill": 15, "write": 10, "commit": 8, "evict": 3}
MOMENTS = ("start", "idle", "load", "load", "load", "load", "committing", "committing",
           "evicted", "evicted")  # fmt: skip


class Kills(Siege):
    """A siege by kill -9."""

    def __init__(self, chaos, disk: Path, seed: int) -> None:
        super().__init__(chaos, disk / "cache", capacity_bytes=CAPACITY_BYTES, seed=seed)
        self.landed: collections.Counter[str] = collections.Counter()
        self.read_shards = 0

    def interrupted(self, was_ready: bool) -> set[str]:
        """What the kill landed in."""
        if not was_ready:
            return {"start"}
        files = shard_files(self.cache)
        found = set()
        if self.ledger.open:
            found.add("fill")
        if any(name.endswith(".tmp") for name in files):
            found.add("write")
        if self.ledger.committing:
            found.add("commit")
        if self.ledger.evicted & files.keys():
            found.add("evict")
        return found or {"idle"}

    def after_kill(self, log: list[str], *, was_ready: bool) -> None:
        self.ledger.absorb(log)
        self.landed.update(self.interrupted(was_ready))
        assert sum(shard_files(self.cache).values()) <= CAPACITY_BYTES

    def one(self, number: int) -> None:
        draw = random.Random(f"{self.seed}/{number}")
        moment = draw.choice(MOMENTS)
        daemon = self.launch()
        if moment == "start" and not daemon.is_ready(draw.uniform(0.0, START_S_MAX)):
            self.after_kill(daemon.end(), was_ready=False)
            return
        self.check_start(daemon)
        readers = Readers(self.chaos.socket, self.truth, count=READERS, seed=number)
        if moment in ("committing", "evicted"):
            daemon.log.wait_for(f" {moment} ", draw.randint(1, 4), timeout_s=LOAD_S_MAX * 4)
            # So long into the commit or the removal: the moment is the point, nothing waits for it.
            time.sleep(draw.uniform(0.0, 0.008))
        elif moment == "idle":
            daemon.log.wait_for(" committed ", 2, timeout_s=LOAD_S_MAX * 4)
            readers.stop()
            daemon.settled(sessions=0, fills_in_flight=0)
        else:
            time.sleep(draw.uniform(0.0, LOAD_S_MAX))  # a random moment is what is tested
        log = daemon.end()
        readers.stop()
        self.read_shards += readers.shards
        self.after_kill(log, was_ready=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_moments_it_loses_and_invents_nothing(chaos, mounted, seed) -> None:
    disk = mounted("ext4", DISK_BYTES)
    siege = Kills(chaos, disk, seed)
    chaos.standin.set_scenario({"seed": seed, "first_byte_ms": 3, "mb_per_s_total": 150})
    first = siege.launch()
    assert first.is_ready(60)
    # With all folders made and nothing stored.
    baseline_bytes = used_bytes(disk) - index_bytes(siege.cache)
    first.end()

    with DiskWatch(disk) as watch:
        for number in range(KILLS):
            siege.one(number)
        last = siege.launch()
        siege.check_start(last)
        last.end()

    index = index_bytes(siege.cache)
    used = watch.peak_bytes - baseline_bytes - index
    print(
        f"\n{KILLS} kills landed in {dict(siege.landed)}; {siege.served_count} committed "
        f"shards served without a request, {siege.read_shards} read under load; at most {used} of "
        f"{CAPACITY_BYTES} bytes taken ({watch.samples} samples), index {index} bytes"
    )
    assert used <= CAPACITY_BYTES + OVERHEAD_BYTES
    short = {what: siege.landed[what] for what, n in LANDED_MIN.items() if siege.landed[what] < n}
    assert not short, f"too few kills landed in {short}: the run proves nothing about those"
    assert siege.served_count >= KILLS
