"""From the exec of a real daemon to the first bytes that a session reads from its store.

Each start is one of four: after a clean end or a kill, with a warm or a cold page cache. Dropping
the page cache needs root; where that is refused only warm starts are made, and the result says so.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpufeed.bench.startup.filler import FILE_BYTES, add_shards, set_clean
from gpufeed.cachefs.client import DatasetRequest, FailEvent, Session, ShardEndEvent
from gpufeed.cachefs.errors import GpufeedError
from gpufeed.cachefs.units import GIB, MIB

EXTENT_BYTES = 4 * MIB
READ_TIMEOUT_S = 300.0
COMMIT_TIMEOUT_S = 60.0
_SAMPLES_COUNT = 16
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_GPUFEED = "import sys; from gpufeed.daemon.cli import main; sys.exit(main())"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupOptions:
    """What to measure. `work_dir` is empty or does not exist; the caller removes it."""

    work_dir: Path
    shards_count: int = 1_000_000
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class _Daemon:
    socket: str
    http_port: int
    pid: int


def measure(options: StartupOptions) -> dict[str, Any]:
    """Make the cache and start daemons over it; returns the result.

    Raises:
        GpufeedError: a daemon did not come up, or did not serve from its store.
    """
    place = options.work_dir
    place.mkdir(parents=True, exist_ok=True)
    _write_tar(place / "shard.tar")
    _fill_real_shard(place, options.shards_count)
    small = _start_once(place, options.shards_count)
    begun_s = time.monotonic()
    cache = place / "cache"
    add_shards(cache, options.shards_count - 1, EXTENT_BYTES)
    made_s = time.monotonic() - begun_s
    starts: list[dict[str, Any]] = []
    for is_cold in (False, True):
        for is_clean in (True, False):
            for _ in range(options.repeats):
                set_clean(cache, is_clean)
                if is_cold and not _drop_page_cache():
                    continue
                found = _start_once(place, options.shards_count)
                starts.append({"cold": is_cold, "clean": is_clean, **found})
    index_bytes = (cache / "index" / "data.mdb").stat().st_size
    warm = [start["rss_bytes"] for start in starts if not start["cold"]]
    return {
        "shards": options.shards_count,
        "made_in_s": made_s,
        "index_bytes_per_shard": index_bytes / options.shards_count,
        "rss_bytes_per_shard": (min(warm) - small["rss_bytes"]) / options.shards_count,
        "cold_starts": "made" if any(s["cold"] for s in starts) else "not allowed here",
        "starts": starts,
    }


def _write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for i in range(_SAMPLES_COUNT):
            info = tarfile.TarInfo(f"{i:04d}.bin")
            info.size = MIB
            tar.addfile(info, io.BytesIO(bytes([i]) * MIB))


def _drop_page_cache() -> bool:
    os.sync()
    try:
        _DROP_CACHES.write_text("3\n", encoding="ascii")
    except OSError:
        return False
    return True


def _fill_real_shard(place: Path, shards_count: int) -> None:
    """Let a daemon fetch the one shard, and end when it has committed it."""
    with _daemon(place, shards_count) as daemon:
        _read_shard(daemon.socket, f"file://{place / 'shard.tar'}")
        deadline_s = time.monotonic() + COMMIT_TIMEOUT_S
        while _resident_shards(daemon) == 0:
            if time.monotonic() > deadline_s:
                raise GpufeedError(f"the shard was not committed within {COMMIT_TIMEOUT_S:g} s")
            time.sleep(0.05)


def _resident_shards(daemon: _Daemon) -> float:
    url = f"http://127.0.0.1:{daemon.http_port}/status"
    with urllib.request.urlopen(url, timeout=COMMIT_TIMEOUT_S) as answer:
        return float(json.load(answer)["store_resident_shards"])


def _start_once(place: Path, shards_count: int) -> dict[str, Any]:
    """One daemon: exec, ready, first shard read, ended."""
    begun_s = time.monotonic()
    with _daemon(place, shards_count) as daemon:
        ready_s = time.monotonic() - begun_s
        tiers = _read_shard(daemon.socket, f"file://{place / 'shard.tar'}")
        served_s = time.monotonic() - begun_s
        if not tiers.get("nvme"):
            raise GpufeedError(f"the daemon served nothing from its store: {dict(tiers)}")
        return {
            "ready_s": ready_s, "served_s": served_s, "cpu_s": _cpu_s(daemon.pid),
            "rss_bytes": _rss_bytes(daemon.pid), "from_store_bytes": tiers["nvme"],
            "load_average": os.getloadavg()[0],
        }  # fmt: skip


@contextmanager
def _daemon(place: Path, shards_count: int) -> Iterator[_Daemon]:
    reading, writing = os.pipe()
    socket = place / "d.sock"
    capacity_bytes = shards_count * FILE_BYTES + GIB
    log = (place / "daemon.log").open("ab")
    process = subprocess.Popen(  # noqa: S603 our own command
        [
            sys.executable, "-c", _GPUFEED, "daemon", "--socket", str(socket),
            "--cache-path", str(place / "cache"), "--capacity", str(capacity_bytes),
            "--arena", "64MiB", "--http-port", "0", "--allow", f"file://{place}/",
            "--ready-fd", str(writing),
        ],
        env={**os.environ, "GPUFEED_STORE_FREE_FLOOR_RATIO": "0"},
        pass_fds=(writing,), stdout=log, stderr=log,
    )  # fmt: skip
    os.close(writing)
    log.close()
    try:
        with open(reading, "rb") as ready:
            line = ready.readline()
        answer = json.loads(line) if line else {}
        if "socket" not in answer:
            tail = (place / "daemon.log").read_text(errors="replace")[-2000:]
            raise GpufeedError(f"the daemon did not come up: {tail}")
        yield _Daemon(str(answer["socket"]), int(answer["http_port"]), process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _read_shard(socket: str, url: str) -> Mapping[str, int]:
    """Read the one real shard through a session; returns its bytes by tier."""
    with Session.connect(socket) as session:
        dataset = session.open_dataset(DatasetRequest(urls=(url,), kind="tar"))
        session.extend_plan(dataset, [0])
        while True:
            if not select.select([session], [], [], READ_TIMEOUT_S)[0]:
                raise GpufeedError(f"the daemon sent nothing for {READ_TIMEOUT_S:g} s")
            for event in session.receive():
                if isinstance(event, FailEvent):
                    raise event.error
                if isinstance(event, ShardEndEvent):
                    return event.bytes_by_tier
                if hasattr(event, "seq"):
                    session.release([event.seq])


def _rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise GpufeedError(f"/proc/{pid}/status has no VmRSS")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
