"""A node for tests: a stand-in with data, and real `gpufeed daemon` processes over it."""

from __future__ import annotations

import io
import json
import os
import random
import select
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path

from gpufeed.cachefs.client import (
    ExtentEvent,
    FailEvent,
    SamplesEvent,
    Session,
    ShardEndEvent,
)
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, REGION, SECRET

READY_TIMEOUT_S = 60.0


def make_samples(count: int, seed: int, size: int = 20_000) -> dict[str, dict[str, bytes]]:
    rng = random.Random(seed)
    return {
        f"{seed:02d}{i:05d}": {"jpg": rng.randbytes(size + i), "cls": str(i % 7).encode()}
        for i in range(count)
    }


def tar_of(samples: dict[str, dict[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for key, fields in samples.items():
            for ext, data in fields.items():
                info = tarfile.TarInfo(f"{key}.{ext}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


class Node:
    """Started daemons end with `close`."""

    def __init__(self, standin, place: Path) -> None:
        self.standin = standin
        self.place = place
        self.bucket = Path(standin.root) / BUCKET
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ready: dict[str, object] = {}

    def put_tars(self, shards: int, samples: int) -> dict[str, dict[str, bytes]]:
        everything: dict[str, dict[str, bytes]] = {}
        for i in range(shards):
            mine = make_samples(samples, i)
            (self.bucket / f"train-{i:03d}.tar").write_bytes(tar_of(mine))
            everything |= mine
        return everything

    def put_loose(self, count: int) -> dict[str, bytes]:
        rng = random.Random(count)
        objects = {f"c{i % 3}/{i:04d}": rng.randbytes(3000 + 7 * i) for i in range(count)}
        for key, data in objects.items():
            path = self.bucket / "loose" / f"{key}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return objects

    def environment(self, **extra: str) -> dict[str, str]:
        return {
            **os.environ,
            "GPUFEED_ORIGIN_ENDPOINT": self.standin.endpoint,
            "GPUFEED_ORIGIN_REGION": REGION,
            "GPUFEED_ORIGIN_KEY": KEY,
            "GPUFEED_ORIGIN_SECRET": SECRET,
            "GPUFEED_ARENA_EXTENT_BYTES": "256KiB",
            "GPUFEED_ARENA_SIZE_BYTES": "16MiB",
            "GPUFEED_ORIGIN_PART_BYTES": "512KiB",
            "GPUFEED_STORE_PATH": str(self.place / "cache"),
            "GPUFEED_STORE_CAPACITY_BYTES": "64MiB",
            "GPUFEED_STORE_FREE_FLOOR_RATIO": "0",
            **extra,
        }

    @property
    def socket(self) -> str:
        return str(self.place / "d.sock")

    def popen(self, *flags: str, **extra: str) -> tuple[subprocess.Popen[bytes], bytes]:
        """Start a daemon; returns it and its ready line, empty if it gave none."""
        reading, writing = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "gpufeed.daemon", "daemon", "--socket", self.socket,
             "--http-port", "0", "--ready-fd", str(writing), *flags],
            env=self.environment(**extra), pass_fds=(writing,), stderr=subprocess.PIPE,
        )  # fmt: skip
        os.close(writing)
        with open(reading, "rb") as ready:
            line = ready.readline()
        self.processes.append(process)
        return process, line

    def start(self, *flags: str, **extra: str) -> subprocess.Popen[bytes]:
        process, line = self.popen(*flags, **extra)
        self.ready = json.loads(line) if line else {"error": "it gave no ready line"}
        if "error" in self.ready:
            process.wait()
            raise AssertionError(process.stderr.read().decode())
        return process

    def status(self) -> dict[str, float]:
        url = f"http://127.0.0.1:{self.ready['http_port']}/status"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)

    def get(self, path: str) -> str:
        url = f"http://127.0.0.1:{self.ready['http_port']}{path}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()

    def stop(self, process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> int:
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        if number != signal.SIGKILL:
            assert b"Traceback" not in errors, errors.decode()
        return process.returncode

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


# --- a session's side ---------------------------------------------------------------------------


def read_all(session: Session, dataset, shard_ids) -> dict[str, dict[str, bytes]]:
    """Read the planned shards to the end, as a loader would: copy a sample, give its extents."""
    positions = session.extend_plan(dataset, shard_ids)
    slots: dict[tuple[int, int], tuple[int, int]] = {}
    found: dict[str, dict[str, bytes]] = {}
    ended = 0
    while ended < len(positions):
        events = session.receive()
        if not events:
            assert select.select([session], [], [], 30)[0], "the daemon fell silent"
        for event in events:
            if isinstance(event, FailEvent):
                raise event.error
            if isinstance(event, ExtentEvent):
                slots[(event.position, event.extent)] = (event.slot, event.seq)
            elif isinstance(event, SamplesEvent):
                for ref in event.index:
                    fields = {m.ext: cut(session, slots, event.position, m) for m in ref.members}
                    assert ref.key not in found
                    found[ref.key] = fields
                last = event.index[len(event.index) - 1].members[-1]
                done = (last.offset_bytes + last.size_bytes) // session.extent_bytes
                release(session, slots, lambda p, e, q=event.position, d=done: p == q and e < d)
            elif isinstance(event, ShardEndEvent):
                ended += 1
                release(session, slots, lambda p, _, q=event.position: p == q)
    assert not slots
    return found


def cut(session: Session, slots, position: int, member) -> bytes:
    data, at, left = b"", member.offset_bytes, member.size_bytes
    while left:
        extent, inside = divmod(at, session.extent_bytes)
        take = min(left, session.extent_bytes - inside)
        begin = slots[(position, extent)][0] * session.extent_bytes + inside
        data += bytes(session.arena()[begin : begin + take])
        at, left = at + take, left - take
    return data


def release(session: Session, slots, which) -> None:
    chosen = [key for key in slots if which(*key)]
    session.release([slots.pop(key)[1] for key in chosen])


def wait_until_gone(node) -> None:
    """The daemon notices a closed socket by itself; look until it has, for at most 10 s."""
    deadline_s = time.monotonic() + 10
    status = node.status()
    while (status["sessions"] or status["fills_in_flight"]) and time.monotonic() < deadline_s:
        status = node.status()
    assert status["sessions"] == 0
    assert status["fills_in_flight"] == 0
    assert status["arena_leased_slots"] == 0
