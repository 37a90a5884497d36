"""The loader with a daemon of its own: elected once, shared, gone by itself, never in the way."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from gpufeed.cachefs.testing.pytest_plugin import BUCKET

SCRIPT = """
import hashlib, json, os, sys
from gpufeed.loaders import DataLoader, ShardDataset

def decode(sample):
    return {"key": sample["__key__"], "sum": hashlib.sha256(sample["jpg"]).hexdigest()}

dataset = ShardDataset("oss://BUCKET/train-{000..003}.tar", decode=decode)
loader = DataLoader(dataset, batch_size=16, num_workers=2)
for epoch in range(2):
    found = {}
    for batch in loader:
        found.update(zip(batch["key"], batch["sum"]))
    print(json.dumps(found), flush=True)
    if "--hold" in sys.argv:
        sys.stdin.readline()
loader.close()
""".replace("BUCKET", BUCKET)


@pytest.fixture
def home():
    place = Path(tempfile.mkdtemp(prefix="ge-"))
    yield place
    shutil.rmtree(place)


def daemons(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "--embedded" in line and str(home) in line:
            found.append(process)
    return found


def run(home: Path, node, *flags: str, mode: str = "auto") -> subprocess.Popen[str]:
    environment = {
        **node.environment(), "GPUFEED_DAEMON": mode, "XDG_RUNTIME_DIR": str(home),
        "GPUFEED_DAEMON_LINGER_S": "0.3", "GPUFEED_DAEMON_SOCKET_PATH": str(home / "node.sock"),
    }  # fmt: skip
    script = home / "train.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), *flags], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for_no_daemon(home: Path) -> None:
    deadline_s = time.monotonic() + 15
    while daemons(home):
        assert time.monotonic() < deadline_s, "the embedded daemon stays"
        psutil.wait_procs(daemons(home), timeout=1)


def expected(samples: dict[str, dict[str, bytes]]) -> dict[str, str]:
    return {key: hashlib.sha256(fields["jpg"]).hexdigest() for key, fields in samples.items()}


def answers(process: subprocess.Popen[str]) -> list[dict[str, str]]:
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert errors == ""
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_without_a_daemon_the_loader_starts_one_that_ends_by_itself(home, node, mode) -> None:
    samples = node.put_tars(4, 40)

    assert answers(run(home, node, mode=mode)) == [expected(samples)] * 2

    wait_for_no_daemon(home)
    staying = {".lock", ".start", ".log"}
    assert [p.name for p in (home / "gpufeed").iterdir() if p.suffix not in staying] == []
    assert (node.place / "cache").exists() == (mode == "auto")


def test_loaders_of_one_user_share_one_daemon_and_one_fetch(home, node) -> None:
    samples = node.put_tars(4, 40)
    total = sum(p.stat().st_size for p in node.bucket.glob("*.tar"))

    trainers = [run(home, node, "--hold") for _ in range(3)]
    for trainer in trainers:
        assert trainer.stdout.readline(), trainer.communicate()[1]
    running = daemons(home)
    for trainer in trainers:
        trainer.stdin.write("\n\n")
        trainer.stdin.flush()
    found = [answers(trainer) for trainer in trainers]

    assert len(running) == 1
    assert found == [[expected(samples)]] * 3
    assert node.standin.counters()["bytes"] == total
    wait_for_no_daemon(home)


def test_a_killed_trainer_leaves_no_process(home, node) -> None:
    node.put_tars(4, 40)
    trainer = run(home, node, "--hold")
    trainer.stdout.readline()
    workers = psutil.Process(trainer.pid).children(recursive=True)
    assert len(workers) == 2
    assert len(daemons(home)) == 1

    trainer.kill()
    trainer.communicate()

    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
    wait_for_no_daemon(home)


def test_required_says_what_to_do(home, node) -> None:
    trainer = run(home, node, mode="required")

    _, errors = trainer.communicate(timeout=60)

    assert trainer.returncode != 0
    last = errors.strip().splitlines()[-1]
    assert "DaemonUnavailableError" in last
    assert "gpufeed daemon" in last


def test_a_node_daemon_is_preferred(home, node) -> None:
    samples = node.put_tars(4, 40)
    process = node.start()
    os.symlink(node.socket, home / "node.sock")

    assert answers(run(home, node)) == [expected(samples)] * 2

    assert not daemons(home)
    assert node.status()["sessions_total"] == 1
    assert node.stop(process) == 0


def test_an_embedded_daemon_that_cannot_start_says_why_in_the_trainer(home, node) -> None:
    process = node.start()

    trainer = run(home, node)
    _, errors = trainer.communicate(timeout=60)

    last = errors.strip().splitlines()[-1]
    assert "another gpufeed daemon uses the cache directory" in last
    assert trainer.returncode != 0
    assert node.stop(process) == 0
    wait_for_no_daemon(home)


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_without_a_daemon_the_fsspec_door_starts_one_that_ends_by_itself(home, node, mode) -> None:
    (node.bucket / "file").write_bytes(b"read through an embedded daemon")
    environment = {
        **node.environment(), "GPUFEED_DAEMON": mode, "XDG_RUNTIME_DIR": str(home),
        "GPUFEED_DAEMON_LINGER_S": "0.3", "GPUFEED_DAEMON_SOCKET_PATH": str(home / "node.sock"),
    }  # fmt: skip
    code = f"import fsspec; print(fsspec.open('gpufeed://{BUCKET}/file').open().read().decode())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "read through an embedded daemon"
    assert done.stderr == ""
    wait_for_no_daemon(home)


def test_importing_the_loader_stays_light(home) -> None:
    code = (
        "import sys, gpufeed.loaders.dataloader, gpufeed.cachefs.connect, gpufeed.cachefs.client;"
        "print([m for m in ('aiohttp', 'lmdb', 'uvloop', 'httptools') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"
