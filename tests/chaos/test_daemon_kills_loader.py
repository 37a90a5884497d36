"""kill -9 the daemon again and again under a training loop, which does not notice.

Each sample of each epoch comes once, in the order of the epoch, with the right bytes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from node import make_samples, tar_of

from gpufeed.cachefs.testing.pytest_plugin import BUCKET
from gpufeed.loaders.order import epoch_shards

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

SHARDS, SAMPLES = 12, 40
KILLS = 20
# Between two kills.
BATCHES_MAX = 60
ARENA = {"GPUFEED_ARENA_SIZE_BYTES": "24MiB"}
TIMEOUT_S = 180


def put_data(node) -> list[list[tuple[str, int]]]:
    """Shards in the bucket; what each holds."""
    known = []
    for number in range(SHARDS):
        samples = make_samples(SAMPLES, number)
        (node.bucket / f"train-{number:03d}.tar").write_bytes(tar_of(samples))
        known.append([(key, zlib.crc32(fields["jpg"])) for key, fields in samples.items()])
    return known


@pytest.mark.parametrize(
    ("workers", "by"), [("0", "path"), ("2", "path"), ("2+", "path"), ("0", "auto")]
)
def test_a_training_loop_goes_on_over_kills_of_its_daemon(chaos, place: Path, workers, by) -> None:
    known = put_data(chaos)
    draw = random.Random(len(workers))
    url = f"oss://{BUCKET}/train-{{000..{SHARDS - 1:03d}}}.tar"
    daemon = chaos.start(**ARENA)
    script = Path(__file__).with_name("loader_epochs.py")
    with subprocess.Popen(
        [sys.executable, script, chaos.socket if by == "path" else by, url, workers, "3",
         place / "stop"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # By itself it finds the node's daemon; it has no settings for another.
        env={**os.environ, "GPUFEED_DAEMON_SOCKET_PATH": chaos.socket},
    ) as trainer:  # fmt: skip
        try:
            assert trainer.stdout.readline() == b"batch\n", trainer.stderr.read().decode()
            for _ in range(KILLS):
                # Now and then none: then it is killed while it is sought, or while it starts.
                for _ in range(draw.choice([0, 1, draw.randint(2, BATCHES_MAX)])):
                    line = trainer.stdout.readline()
                    assert line == b"batch\n", (trainer.wait(), trainer.stderr.read().decode())
                chaos.stop(daemon, signal.SIGKILL)
                daemon = chaos.start(**ARENA)
            (place / "stop").touch()
            output, errors = trainer.communicate(timeout=TIMEOUT_S)
        finally:
            trainer.kill()
    assert trainer.returncode == 0, errors.decode()
    found = json.loads(output.splitlines()[-1])
    print(f"{len(found['epochs'])} epochs, sought a daemon {found['reconnects']} times")
    assert found["reconnects"] >= KILLS // 3
    for epoch, got in enumerate(found["epochs"]):
        order = epoch_shards(SHARDS, seed=3, epoch=epoch, shuffle="shards")
        want = [[key, crc] for shard in order for key, crc in known[shard]]
        assert got == want, f"epoch {epoch}"
