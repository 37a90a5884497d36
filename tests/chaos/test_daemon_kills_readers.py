"""kill -9 the daemon 100 times under processes that read, and keep views while it dies.

Each sample of each epoch comes once, in order, with the right bytes, whatever the moment; views
that were kept over restarts, epochs and wraps of the ring never change a byte; and at the end each
reader has no more descriptors, arenas or memory than at its start. Without kills, the same while
the arena is much smaller than what is read.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from node import make_samples, tar_of

from gpufeed.cachefs.testing.pytest_plugin import BUCKET
from gpufeed.cachefs.units import MIB

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

READERS = 3
KILLS = 100
SEED = 5
SHARDS = 12
SAMPLES = 40
# From a daemon's readiness to its end.
LIFE_S_MAX = 0.6
CHURN_EPOCHS = 20
WINDOW_BYTES = 3 * MIB
HEAP_GROWN_KIB_MAX = 16 * 1024
ARENA = {"GPUFEED_ARENA_SIZE_BYTES": "24MiB"}


def put_data(node, path: Path, shards: int = SHARDS) -> None:
    """Shards in the bucket, and the truth about them in a file."""
    known = []
    for number in range(shards):
        samples = make_samples(SAMPLES, number)
        (node.bucket / f"train-{number:03d}.tar").write_bytes(tar_of(samples))
        crcs = []
        for key, fields in samples.items():
            crc = 0
            for data in fields.values():
                crc = zlib.crc32(data, crc)
            crcs.append((key, crc))
        known.append(crcs)
    url = f"oss://{BUCKET}/train-{{000..{shards - 1:03d}}}.tar"
    path.write_text(json.dumps({"url": url, "shards": known}))


class Readers:
    """Reading processes; `end` tells what each found."""

    def __init__(self, node, place: Path, count: int, window_bytes: int, epochs: int) -> None:
        self._stop = place / "stop"
        script = Path(__file__).with_name("view_reader.py")
        self.processes = [
            subprocess.Popen(
                [sys.executable, script, node.socket, place / "truth.json", self._stop, str(seed),
                 str(window_bytes), str(epochs)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for seed in range(count)
        ]  # fmt: skip

    def wait_ready(self) -> None:
        for process in self.processes:
            assert process.stdout.readline() == b"ready\n", process.stderr.read().decode()

    def check_alive(self) -> None:
        for process in self.processes:
            if process.poll() is not None:
                raise AssertionError(process.stderr.read().decode())

    def end(self, timeout_s: float) -> list[dict[str, int]]:
        self._stop.touch()
        found = []
        for process in self.processes:
            output, errors = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, errors.decode()
            found.append(json.loads(output))
            print(found[-1])
        return found

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def readers(chaos, place: Path):
    started: list[Readers] = []

    def start(count: int, window_bytes: int = WINDOW_BYTES, epochs: int = 2) -> Readers:
        started.append(Readers(chaos, place, count, window_bytes, epochs))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_daemon_killed_a_hundred_times(chaos, place: Path, readers) -> None:
    put_data(chaos, place / "truth.json")
    draw = random.Random(SEED)
    daemon = chaos.start(**ARENA)
    under_test = readers(READERS)
    under_test.wait_ready()
    for _ in range(KILLS):
        time.sleep(draw.uniform(0.0, LIFE_S_MAX))
        under_test.check_alive()
        chaos.stop(daemon, signal.SIGKILL)
        daemon = chaos.start(**ARENA)
    found = under_test.end(120)
    for reader in found:
        assert reader["changed"] == 0, reader
        assert reader["in_place"] > 1000, reader
        assert reader["reconnects"] >= KILLS // 2, reader
        check_nothing_left(reader)


def check_nothing_left(reader: dict[str, int]) -> None:
    assert reader["descriptors_left"] == 0, reader
    assert reader["arenas_left"] == 0, reader
    assert reader["heap_grown_kib"] < HEAP_GROWN_KIB_MAX, reader


def test_views_held_over_epochs_while_the_arena_churns(chaos, place: Path, readers) -> None:
    # 33 MB of data, 24 MiB of arena: slots get other extents all the time.
    put_data(chaos, place / "truth.json", shards=40)
    chaos.start(**ARENA)
    under_test = readers(READERS, epochs=CHURN_EPOCHS)
    under_test.wait_ready()
    found = under_test.end(300)
    for reader in found:
        assert reader["samples"] >= CHURN_EPOCHS * 40 * SAMPLES, reader
        assert reader["in_place"] > 1000, reader
        assert reader["changed"] == 0, reader
        check_nothing_left(reader)
