"""Jobs of real ranks that are killed and gone on with by others: as if nothing had happened."""

from __future__ import annotations

import collections
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpufeed.cachefs.testing.pytest_plugin import BUCKET

SCRIPT = Path(__file__).with_name("resuming_rank.py")
SHARDS, SAMPLES = 5, 23
TOTAL = SHARDS * SAMPLES
BATCH = 9
URL = f"oss://{BUCKET}/train-{{000..{SHARDS - 1:03d}}}.tar"
TIMEOUT_S = 120

pytestmark = pytest.mark.slow


class Job:
    """Legs of one job on a node."""

    def __init__(self, node, place: Path, name: str, shuffle: str) -> None:
        self.node, self.place, self.name, self.shuffle = node, place, name, shuffle
        self.state = place / f"{name}.json"
        self.legs = 0

    def start(self, world_size: int, *, workers: int = 0, steps: int = 0, epochs: int = 2):
        self.legs += 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [
            subprocess.Popen(
                [sys.executable, SCRIPT, URL, self.state, self.seen(rank), str(steps), str(epochs)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size),
                     "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                     "GLOBAL_BATCH": str(BATCH), "WORKERS": str(workers),
                     "SHUFFLE": self.shuffle,
                     "GPUFEED_DAEMON": self.node.socket},
            )
            for rank in range(world_size)
        ]  # fmt: skip

    def run(self, world_size: int, **options) -> None:
        for process in self.start(world_size, **options):
            _, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors.decode()

    def run_killed(self, world_size: int, kill_after: int, **options) -> None:
        """All ranks die once rank 0 has made so many steps."""
        processes = self.start(world_size, **options)
        for _ in range(kill_after):
            line = processes[0].stdout.readline()
            assert line == b"step\n", processes[0].stderr.read().decode()
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
            assert process.returncode == -9, "it had ended before it was killed"

    def seen(self, rank: int) -> Path:
        return self.place / f"{self.name}-{self.legs}-{rank}.jsonl"

    def steps(self) -> dict[tuple[int, int], list]:
        """By place in the order: the global batch that ended there, and what was made of it.

        A step that was made but not saved before a kill is made again: it must be the same.
        """
        parts = collections.defaultdict(dict)
        for path in sorted(self.place.glob(f"{self.name}-*.jsonl")):
            leg = path.name.split("-")[1]
            for line in path.read_text().splitlines():
                epoch, samples, rank, rows = json.loads(line)
                parts[epoch, samples, leg][rank] = rows
        found: dict[tuple[int, int], list] = {}
        for (epoch, samples, _), by_rank in sorted(parts.items()):
            rows = [row for rank in sorted(by_rank) for row in by_rank[rank]]
            if len(rows) == BATCH:  # else some ranks were killed before they wrote theirs
                assert found.setdefault((epoch, samples), rows) == rows
        return found


@pytest.fixture
def jobs(node, tmp_path):
    node.put_tars(SHARDS, SAMPLES)
    process = node.start()
    yield lambda name, shuffle="shards": Job(node, tmp_path, name, shuffle)
    assert node.stop(process) == 0


@pytest.mark.parametrize("shuffle", ["shards", "window(3)"])
def test_a_job_killed_again_and_again_on_other_worlds_is_as_if_it_had_not_been(jobs, shuffle):
    straight, broken = jobs("straight", shuffle), jobs("broken", shuffle)
    straight.run(3)
    draw = random.Random(3)
    for world_size, workers in ((2, 0), (3, 2), (1, 2)):
        broken.run_killed(world_size, draw.randint(2, 5), workers=workers)
    broken.run(4, workers=1)
    want, got = straight.steps(), broken.steps()
    assert len(want) == 2 * (TOTAL // BATCH)
    assert got == want


def test_three_ranks_make_the_same_steps_and_each_sample_once(jobs):
    job = jobs("even")
    job.run(3, epochs=1)
    steps = [job.seen(rank).read_text().count("\n") for rank in range(3)]
    assert steps == [TOTAL // BATCH] * 3
    keys = [key for rows in job.steps().values() for key, _ in rows]
    assert len(keys) == len(set(keys)) == BATCH * (TOTAL // BATCH)
