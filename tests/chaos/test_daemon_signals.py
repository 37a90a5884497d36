"""SIGTERM and SIGINT at random moments: the daemon ends in time and leaves only its cache."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from chaos_disk import shard_files
from chaos_readers import Readers
from chaos_siege import Siege

from gpufeed.cachefs.units import MIB

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

SEED = 40
ROUNDS = 40
READERS = 3
CAPACITY_BYTES = 20 * MIB
# What Kubernetes grants before it kills is 30 s; far less is normal.
GRACE_S_MAX = 10.0
LOAD_S_MAX = 0.5
START_S_MAX = 0.8
# A signal before the handlers are there has Python's own effect.
EARLY_STATUSES = (-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT, 1, 0)


def end_early(daemon, number: int) -> None:
    """While it starts: whatever it was doing, it is over at once."""
    daemon.process.send_signal(number)
    status = daemon.process.wait(GRACE_S_MAX)
    assert status in EARLY_STATUSES, status
    text = "\n".join(daemon.log.finish())
    assert "Traceback" not in text or "KeyboardInterrupt" in text, text
    daemon.close_ready()


def end_in_time(daemon, number: int) -> float:
    """Under load: in order, within the grace; returns how long it took, in seconds."""
    process = psutil.Process(daemon.process.pid)
    children = process.children(recursive=True)
    began_s = time.monotonic()
    daemon.end(number)
    took_s = time.monotonic() - began_s
    assert daemon.process.returncode == 0
    assert took_s < GRACE_S_MAX
    assert not children
    return took_s


def test_ended_at_random_moments_it_leaves_its_cache_and_nothing_else(chaos) -> None:
    siege = Siege(chaos, chaos.cache, capacity_bytes=CAPACITY_BYTES, seed=SEED)
    chaos.standin.set_scenario({"first_byte_ms": 3, "mb_per_s_total": 150})
    longest_s = 0.0
    under_load = 0
    for number in range(ROUNDS):
        draw = random.Random(f"{SEED}/{number}")
        sent = draw.choice((signal.SIGTERM, signal.SIGINT))
        daemon = siege.launch()
        if draw.random() < 0.2 and not daemon.is_ready(draw.uniform(0.0, START_S_MAX)):
            end_early(daemon, sent)
            continue
        siege.check_start(daemon)
        readers = Readers(chaos.socket, siege.truth, count=READERS, seed=number)
        time.sleep(draw.uniform(0.0, LOAD_S_MAX))  # a random moment is what is tested
        under_load += daemon.status()["sessions"] > 0
        longest_s = max(longest_s, end_in_time(daemon, sent))
        readers.stop()
        siege.ledger.absorb(daemon.log.lines)
        assert not siege.ledger.open, "it ended with reservations neither committed nor aborted"
        assert not Path(chaos.socket).exists()
        files = shard_files(siege.cache)
        assert files.keys() == siege.ledger.committed
        assert sum(files.values()) <= CAPACITY_BYTES
    print(
        f"\n{ROUNDS} signals, {under_load} with sessions open: ended within {longest_s:.2f} s; "
        f"{siege.served_count} shards served warm"
    )
    assert under_load >= ROUNDS // 2
    assert siege.served_count >= ROUNDS
