"""A loader with its own daemon where nothing can be made in /dev/shm: containers have 64 MB of it.

/dev/shm is an empty file system, mounted read-only, in a mount namespace of its own; so a semaphore
or a tensor that somebody wants to share there is an error. The PID namespace ends the lingering
daemon with its trainer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from node import make_samples, tar_of

UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
MOUNT = 'mount -t tmpfs -o ro none /dev/shm && "$@"'
TRAINER = """
import json, os, sys
from gpufeed.loaders import DataLoader, ShardDataset

def sizes(sample):
    return sample["__key__"], len(sample["jpg"])

if __name__ == "__main__":
    url, method = sys.argv[1:]
    try:
        os.close(os.open("/dev/shm/try", os.O_CREAT | os.O_RDWR))
        raise SystemExit("/dev/shm can be written: the test proves nothing")
    except OSError:
        pass
    dataset = ShardDataset(url, decode=sizes, daemon="off")
    workers = {"num_workers": 2, "multiprocessing_context": method} if method != "none" else {}
    loader = DataLoader(dataset, batch_size=4, **workers)
    seen = {}
    for _ in range(2):
        for keys, lengths in loader:
            seen |= dict(zip(keys, lengths.tolist()))
    loader.close()
    print(json.dumps(seen))
"""


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = [*UNSHARE, MOUNT, "sh", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def home() -> Iterator[Path]:
    # A socket's path has 107 bytes.
    with tempfile.TemporaryDirectory(prefix="gs-") as place:
        yield Path(place)


@pytest.mark.skipif(not can_mount(), reason="needs root and the right to mount")
@pytest.mark.parametrize("method", ["none", "fork", "spawn", "forkserver"])
def test_batches_come_without_dev_shm(home: Path, method: str) -> None:
    samples = make_samples(24, 0)
    shard = home / "train-000.tar"
    shard.write_bytes(tar_of(samples))
    script = home / "trainer.py"
    script.write_text(TRAINER)
    done = subprocess.run(
        [*UNSHARE, MOUNT, "sh", sys.executable, str(script), str(shard), method],
        capture_output=True, text=True, check=False, timeout=100,
        env={**os.environ, "XDG_RUNTIME_DIR": str(home)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {key: len(fields["jpg"]) for key, fields in samples.items()}
