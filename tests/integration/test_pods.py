"""Daemon and trainer in two "pods": they share the socket's directory, read-only, nothing else.

Mount, IPC, PID and network namespaces of their own (a trainer with nothing but a loopback), and
once a user namespace too; 64 MB of /dev/shm each, 64 KiB of locked memory, and a trainer that is
root without the capabilities that a container's root does not have.
"""

from __future__ import annotations

import hashlib
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

from gpufeed.cachefs.testing.pytest_plugin import BUCKET

POD = str(Path(__file__).with_name("pod.py"))
UNSHARE = ["unshare", "--mount", "--ipc", "--pid", "--net", "--fork", "--mount-proc"]
pytestmark = pytest.mark.slow


def can_unshare() -> bool:
    if not all(map(shutil.which, ("unshare", "setpriv", "ip"))):
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def place() -> Iterator[Path]:
    # A socket's path has 107 bytes.
    place = Path(tempfile.mkdtemp(prefix="gp-"))
    for name in ("run", "cache", "root"):
        (place / name).mkdir()
    yield place
    shutil.rmtree(place)


@pytest.mark.parametrize("user", [False, True], ids=["root", "root of a user namespace"])
@pytest.mark.skipif(not can_unshare(), reason="needs root and the right to make namespaces")
def test_a_trainer_in_another_pod_reads_and_can_do_no_harm(place: Path, user: bool) -> None:
    bucket = place / "root" / BUCKET
    bucket.mkdir()
    wanted: dict[str, str] = {}
    for shard in range(3):
        samples = make_samples(24, shard)
        (bucket / f"train-{shard:03d}.tar").write_bytes(tar_of(samples))
        wanted |= {k: hashlib.sha256(fields["jpg"]).hexdigest() for k, fields in samples.items()}
    spec = {
        "socket": str(place / "run" / "d.sock"), "cache": str(place / "cache"),
        "root": str(place / "root"), "user": user, "url": f"oss://{BUCKET}/train-{{000..002}}.tar",
    }  # fmt: skip
    daemon = subprocess.Popen(
        [*UNSHARE, sys.executable, POD, "daemon", json.dumps(spec)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert daemon.stdout is not None
        begun = json.loads(daemon.stdout.readline())
        assert "error" not in begun["ready"], begun
        done = subprocess.run(
            [*UNSHARE, sys.executable, POD, "trainer", json.dumps(spec)],
            capture_output=True, text=True, check=False, timeout=110,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        trainer = json.loads(done.stdout.splitlines()[-1])
        told, _ = daemon.communicate(input="", timeout=60)
    finally:
        daemon.kill()
        daemon.wait()
    ended = json.loads(told)

    assert trainer["samples"] == {"fork": wanted, "spawn": wanted}
    nothing = {"events_bytes": 0, "used_bytes": 0, "names": []}
    assert trainer["shm"] == nothing
    assert ended["shm"] == nothing
    assert (trainer["user_namespace"] != os.readlink("/proc/self/ns/user")) == user
    assert trainer["processes"] <= 3, "it sees the other pod's processes"

    # EXDEV: what it would put there lies on another file system, as there is nowhere else to lie.
    assert set(trainer["socket"].values()) == {"EROFS", "EXDEV", "refused"}, trainer["socket"]
    assert ended["inode"] == begun["inode"], "the socket is another one"
    assert trainer["arena"] == {
        "map writable": "EPERM", "pwrite": "EPERM", "grow": "EPERM", "shrink": "EPERM",
        "seal": "EPERM", "reopened pwrite": "EPERM", "mprotect": "EACCES", "punch": "EPERM",
    }  # fmt: skip
    assert ended["rc"] == 0
    assert "not locked" in ended["log"]
    assert "memlock" in ended["log"]
    assert not os.listdir(place / "run") or os.listdir(place / "run") == ["d.sock.lock"]
