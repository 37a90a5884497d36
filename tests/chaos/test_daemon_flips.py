"""Bytes of cache files change under a running daemon: nobody is ever served one of them."""

from __future__ import annotations

import os
import random
import signal

import pytest
from chaos_disk import shard_files
from chaos_readers import Readers
from chaos_siege import Siege

from gpufeed.cachefs.units import MIB

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

SEED = 30
FLIPS = 300
READERS = 4
CAPACITY_BYTES = 128 * MIB
# Read between two flips, so that a flip is met before the next is made.
EXTENTS_BETWEEN = 4
# Of the flips, at the least; one in a file that was set aside just then, or in its padding, or in
# what only a start reads, is not noticed.
QUARANTINED_RATIO_MIN = 0.3


def flip(cache, draw: random.Random) -> bool:
    """One bit of one random byte of one random file. False: it is just being made or removed."""
    name = draw.choice(sorted(shard_files(cache)))
    try:
        descriptor = os.open(cache / "shards" / name[:2] / name, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        if size == 0:
            return False
        at = draw.randrange(size)
        (byte,) = os.pread(descriptor, 1, at)
        os.pwrite(descriptor, bytes([byte ^ 1 << draw.randrange(8)]), at)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def test_flipped_bytes_are_never_served(chaos) -> None:
    draw = random.Random(SEED)
    siege = Siege(chaos, chaos.cache, capacity_bytes=CAPACITY_BYTES, seed=SEED)
    daemon = siege.launch()
    siege.check_start(daemon)
    readers = Readers(chaos.socket, siege.truth, count=READERS, seed=SEED, leaves_early_ratio=0.0)
    daemon.log.wait_for(" committed ", len(siege.truth))
    made = 0
    while made < FLIPS:
        made += flip(chaos.cache, draw)
        readers.wait_extents(EXTENTS_BETWEEN)
    readers.stop()
    status = daemon.settled(sessions=0, fills_in_flight=0, arena_leased_slots=0)
    print(
        f"\n{made} flips under {readers.extents} extents read: {status['quarantined_total']:.0f} "
        f"set aside, {status['fills_total']:.0f} fills"
    )
    assert status["quarantined_total"] >= QUARANTINED_RATIO_MIN * FLIPS
    assert status["fills_total"] >= len(siege.truth) + status["quarantined_total"] - READERS
    siege.check_files(daemon)
    daemon.end(signal.SIGTERM)

    # What nobody has read since it was flipped is still there; the next daemon does not serve it.
    daemon = siege.launch()
    assert daemon.is_ready(60)
    readers = Readers(chaos.socket, siege.truth, count=READERS, seed=SEED + 1, shards_max=24)
    readers.wait_extents(1000)
    readers.stop()
    siege.check_files(daemon)
    daemon.end(signal.SIGTERM)
