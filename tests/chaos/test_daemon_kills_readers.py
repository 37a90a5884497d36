"""kill -9 the daemon 100 times under processes that read, and keep views while it dies.

Each sample of each epoch comes once, in order, with the right bytes, whatever the moment; views
that were kept over restarts, epochs and wraps of the ring never change a byte; and at the end each
reader has no more descriptors, arenas or memory than at its start. A daemon that is restarted under
load stays within its memory, earlier arenas included. Without kills, the same as with them while
the arena is much smaller than what is read.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
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
LONG_MAX = 2
HEAP_GROWN_KIB_MAX = 16 * 1024
ARENA = {"GPUFEED_ARENA_SIZE_BYTES": "24MiB"}
RESTARTS = 20
# Half of the limit is the heap's. Old arenas of 24, 20, 10 and 5 MiB leave no room for a session,
# and readers that wait for one let go of nothing: two of them keep no more than that.
RESTART_READERS = 2
MEMORY_BYTES = 128 * MIB
TIGHT = {
    "GPUFEED_ARENA_SIZE_BYTES": "24MiB",
    "GPUFEED_DAEMON_MEMORY_BYTES": str(MEMORY_BYTES),
}
LOOK_S = 0.005


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

    def __init__(self, node, place: Path, count: int, *, epochs: int, long_max: int) -> None:
        self._stop = place / "stop"
        script = Path(__file__).with_name("view_reader.py")
        self.processes = [
            subprocess.Popen(
                [sys.executable, script, node.socket, place / "truth.json", self._stop, str(seed),
                 str(WINDOW_BYTES), str(epochs), str(long_max)],
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

    def start(count: int, *, epochs: int = 2, long_max: int = LONG_MAX) -> Readers:
        started.append(Readers(chaos, place, count, epochs=epochs, long_max=long_max))
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


class MemoryWatch:
    """Looks all the time at what a daemon and the arenas that anybody maps take together."""

    def __init__(self, readers: list[int]) -> None:
        self.daemon = 0
        self.peak_bytes = self.peak_arenas_bytes = self.looks_count = self.several_count = 0
        self._readers = readers
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            arenas: dict[int, int] = {}
            for pid in (self.daemon, *self._readers):
                arenas |= arenas_of(pid)
            taken = sum(arenas.values())
            self.looks_count += 1
            self.several_count += len(arenas) > 1
            self.peak_arenas_bytes = max(self.peak_arenas_bytes, taken)
            self.peak_bytes = max(self.peak_bytes, taken + heap_of(self.daemon))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def arenas_of(pid: int) -> dict[int, int]:
    """Each arena that a process maps, by inode: the bytes of memory behind it."""
    found = {}
    try:
        with open(f"/proc/{pid}/maps") as file:
            ranges = [line.split()[0] for line in file if "gpufeed-arena" in line]
        for one in ranges:
            begin, end = (int(part, 16) for part in one.split("-"))
            status = os.stat(f"/proc/{pid}/map_files/{begin:x}-{end:x}")
            found[status.st_ino] = status.st_blocks * 512
    except (FileNotFoundError, ProcessLookupError):
        pass  # the process, or that mapping, has just ended
    return found


def heap_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status") as file:
            return next((int(x.split()[1]) * 1024 for x in file if x.startswith("RssAnon")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may look at what others map")
def test_a_daemon_restarted_under_load_stays_within_its_memory(chaos, place: Path, readers) -> None:
    put_data(chaos, place / "truth.json", shards=60)
    draw = random.Random(SEED)
    daemon = chaos.start(**TIGHT)
    # A view that is kept for ever keeps its arena: then there is room for few restarts.
    under_test = readers(RESTART_READERS, long_max=0)
    under_test.wait_ready()
    watch = MemoryWatch([process.pid for process in under_test.processes])
    try:
        for number in range(RESTARTS):
            watch.daemon = daemon.pid
            # Long enough for the arena to be used whole, sometimes.
            time.sleep(draw.uniform(0.2, 1.5))
            under_test.check_alive()
            chaos.stop(daemon, signal.SIGKILL if number % 2 else signal.SIGTERM)
            daemon = chaos.start(**TIGHT)
        watch.daemon = daemon.pid
        found = under_test.end(200)
    finally:
        watch.stop()
    print(
        f"{watch.looks_count} looks, {watch.several_count} at several arenas; at most "
        f"{watch.peak_arenas_bytes / MIB:.1f} MiB of arenas, {watch.peak_bytes / MIB:.1f} in all"
    )
    assert watch.several_count > RESTARTS, "no reader mapped an old arena: nothing was tried"
    assert watch.peak_arenas_bytes > 24 * MIB
    assert watch.peak_bytes <= MEMORY_BYTES
    for reader in found:
        assert reader["reconnects"] >= 3, reader
        assert reader["changed"] == 0, reader
        check_nothing_left(reader)
