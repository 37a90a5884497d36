"""Runs ``cachebench share``: data, daemons, readers, rounds in which both sides take turns.

Two daemons serve the same cache directory one after the other in each round: one whose arena holds
all the data (arena hits), one whose arena holds little of it (NVMe hits).
"""

from __future__ import annotations

import collections
import io
import os
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpufeed.bench.children import Child, Family, stream
from gpufeed.bench.fingerprint import fingerprint
from gpufeed.bench.interrupts import interruptible
from gpufeed.bench.measure import threads_cpu_s
from gpufeed.bench.progress import Progress
from gpufeed.bench.services import Daemon, start_local_daemon
from gpufeed.bench.share.jobs import Job
from gpufeed.bench.share.placement import kept_to, two_cpus
from gpufeed.bench.share.report import Result, assemble
from gpufeed.bench.workplace import Workplace, workplace
from gpufeed.cachefs.errors import IntegrityError, UsageError
from gpufeed.cachefs.units import GB, MIB, round_up

SILENCE_S = 120.0
SAMPLE_BYTES = 113_000
SHARD_BYTES = 128 * MIB
# What the arena has beyond the data: fills and their in-flight share.
ARENA_SPARE_RATIO = 1.5
# The arena of the daemon that must read its disk, as a share of the data.
SMALL_ARENA_RATIO = 0.125
SMALL_ARENA_BYTES_MIN = 64 * MIB
# The least that a session is granted: the reader that is measured has all of it in hand.
WAKE_WINDOW_EXTENTS = 4
_STEPS_A_ROUND = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOptions:
    """What to measure.

    Raises:
        UsageError: out of range.
    """

    work_dir: Path
    readers: int = 4
    read_bytes: int = 16 * GB
    data_bytes: int = 32 * SHARD_BYTES
    extent_bytes: int = 4 * MIB
    depth: int = 4
    turns: int = 2000
    rounds: int = 3

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 1 <= self.readers <= 64:
            raise UsageError("--readers must be 1 to 64")
        if not SHARD_BYTES <= self.data_bytes <= 1 << 40:
            raise UsageError(f"--data-size must be at least {SHARD_BYTES} bytes")
        if self.rounds < 1 or self.turns < 10 or self.read_bytes < self.readers:
            raise UsageError("--rounds must be at least 1, --turns 10 and --gb above 0")

    @property
    def shards_count(self) -> int:
        """How many shards the data is made of."""
        return self.data_bytes // SHARD_BYTES

    @property
    def passes(self) -> int:
        """How often each reader reads all the data."""
        return max(1, round(self.read_bytes / self.readers / self.data_bytes))


def run(options: ShareOptions, progress: Progress) -> Result:
    """Measure; returns the result.

    Raises:
        GpufeedError: something did not come up, or a reader failed.
    """
    with (
        interruptible(),
        workplace(options.work_dir, keep=False) as place,
        Family(place.run_dir) as family,
    ):
        progress.stage("making data", options.shards_count)
        data = _make_data(place.run_dir / "data", options, progress)
        bench = _Bench(options, place, family, data)
        progress.stage("rounds", _STEPS_A_ROUND * options.rounds)
        rounds = [bench.round(number, progress) for number in range(options.rounds)]
        settings = {
            "readers": options.readers, "read_bytes": options.passes * options.readers * bench.size,
            "data_bytes": bench.size, "extent_bytes": options.extent_bytes,
            "depth": options.depth, "turns": options.turns, "rounds": options.rounds,
            "sample_bytes": SAMPLE_BYTES, "wakeup_cpus": list(two_cpus()),
        }  # fmt: skip
        return {"fingerprint": fingerprint(place.run_dir), **assemble(rounds, settings)}


def _make_data(folder: Path, options: ShareOptions, progress: Progress) -> list[Path]:
    """Tar shards of samples of one size."""
    folder.mkdir()
    body = os.urandom(SAMPLE_BYTES)
    paths = []
    for shard in range(options.shards_count):
        path = folder / f"shard-{shard:06d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for sample in range(SHARD_BYTES // round_up(SAMPLE_BYTES + 512, 512) - 1):
                info = tarfile.TarInfo(f"{shard:06d}-{sample:06d}.jpg")
                info.size = SAMPLE_BYTES
                tar.addfile(info, io.BytesIO(body))
        paths.append(path)
        progress.update(shard + 1)
    return paths


class _Bench:
    """One run's data and the two daemons' directory."""

    def __init__(
        self, options: ShareOptions, place: Workplace, family: Family, data: Sequence[Path]
    ) -> None:
        self._options = options
        self._place = place
        self._family = family
        self._sizes = tuple(path.stat().st_size for path in data)
        self.size = sum(self._sizes)
        self._url = f"file://{data[0].parent}/"
        self._map_fd = self._plain_map(data)
        self._done = 0

    def _plain_map(self, data: Sequence[Path]) -> int:
        """The shards in one memfd, each at a whole extent."""
        descriptor = os.memfd_create("gpufeed-bench-plain", os.MFD_CLOEXEC)
        begin = 0
        for path in data:
            with path.open("rb") as file:
                while piece := file.read(16 * MIB):
                    os.pwrite(descriptor, piece, begin + file.tell() - len(piece))
            begin += round_up(path.stat().st_size, self._options.extent_bytes)
        os.ftruncate(descriptor, begin)
        return descriptor

    def round(self, number: int, progress: Progress) -> dict[str, Any]:
        """All six measurements, both sides of each ratio right after one another."""
        options = self._options
        found: dict[str, Any] = {}

        def done(what: str) -> None:
            self._done += 1
            progress.update(self._done, f"round {number + 1}: {what}")

        daemon = self._daemon(int(self.size * ARENA_SPARE_RATIO))
        try:
            # Into the arena, and into the store.
            self._readers([self._session(daemon, 0, passes=1)])
            for name in ("hits", "plain") if number % 2 == 0 else ("plain", "hits"):
                jobs = [
                    self._session(daemon, i) if name == "hits" else self._plain(i)
                    for i in range(options.readers)
                ]
                found[name], cpu_used_s = self._readers(jobs, daemon.pid)
                if name == "hits":
                    found["daemon_cpu_s"] = cpu_used_s
                done(name)
            window_bytes = WAKE_WINDOW_EXTENTS * options.extent_bytes
            cpus = two_cpus()
            for name in ("wake", "ping") if number % 2 == 0 else ("ping", "wake"):
                job = Job(
                    mode=name, go_fd=-1, socket=daemon.socket, url=self._url,
                    window_bytes=window_bytes, turns=options.turns, cpus=cpus,
                )  # fmt: skip
                with kept_to(daemon.pid, cpus[1:]):
                    found[name] = self._readers([job])[0][0]
                done(name)
        finally:
            self._family.end(daemon.child)
        found |= self._disk(number, done)
        self._require_same(found)
        return found

    def _require_same(self, found: dict[str, Any]) -> None:
        """What every reader of the data saw adds up to the same, however it came by it."""
        sums = {
            round(reader[reading]["sum"] / reader[reading]["bytes"] * self.size)
            for name in ("hits", "plain", "nvme") for reader in found[name]
            for reading in ("first", "again")
        }  # fmt: skip
        if len(sums) != 1:
            raise IntegrityError(f"the readers did not see the same bytes: sums {sorted(sums)}")

    def _disk(self, number: int, done: Callable[[str], None]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        small = max(SMALL_ARENA_BYTES_MIN, int(self.size * SMALL_ARENA_RATIO))
        files = tuple(str(path) for path in sorted((self._cache / "shards").glob("*/*")))
        daemon = self._daemon(small)
        try:
            for name in ("nvme", "bare") if number % 2 == 0 else ("bare", "nvme"):
                job = self._session(daemon, 0, passes=1)
                if name == "bare":
                    job = Job(
                        mode="bare", go_fd=-1, files=files, depth=self._options.depth,
                        extent_bytes=self._options.extent_bytes,
                    )  # fmt: skip
                found[name] = self._readers([job])[0]
                done(name)
        finally:
            self._family.end(daemon.child)
        return found

    @property
    def _cache(self) -> Path:
        return self._place.run_dir / "cache"

    def _daemon(self, arena_bytes: int) -> Daemon:
        return start_local_daemon(
            self._family, socket=self._place.socket_dir / "d.sock", cache_dir=self._cache,
            sizes=(2 * self.size, round_up(arena_bytes, self._options.extent_bytes)),
            extent_bytes=self._options.extent_bytes, allow=self._url,
        )  # fmt: skip

    def _session(self, daemon: Daemon, number: int, passes: int = 0) -> Job:
        return Job(
            mode="session", go_fd=-1, socket=daemon.socket, url=self._url,
            passes=passes or self._options.passes,
            first_shard=number * len(self._sizes) // self._options.readers,
        )  # fmt: skip

    def _plain(self, number: int) -> Job:
        return Job(
            mode="plain", go_fd=-1, map_fd=self._map_fd, sizes_bytes=self._sizes,
            extent_bytes=self._options.extent_bytes, passes=self._options.passes,
            first_shard=number * len(self._sizes) // self._options.readers,
        )  # fmt: skip

    def _readers(
        self, jobs: Sequence[Job], daemon_pid: int | None = None
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Start them, let them begin together; returns what they say and the daemon's CPU.

        The latter is of each of their readings, from the sign to begin to the end of the last.
        """
        go, starter = os.pipe()
        try:
            children = [self._start(job, go) for job in jobs]
            waiting: collections.Counter[str] = collections.Counter()
            used_s: dict[str, float] = {}
            found = []
            since_s = 0.0
            reading = ""
            for _, message in stream(children, silence_s=SILENCE_S):
                what = str(message.get("what"))
                waiting[what] += 1
                if what == "done":
                    found.append(message)
                if waiting[what] < len(jobs):
                    continue
                # All of them are through with one reading, and wait for the sign of the next.
                now_s = threads_cpu_s(daemon_pid) if daemon_pid else 0.0
                if reading:
                    used_s[reading] = now_s - since_s
                reading = {"ready": "first"}.get(what, what)
                since_s = now_s
                if what != "done":
                    os.write(starter, bytes(len(jobs)))
        finally:
            os.close(go)
            os.close(starter)
        for child in children:
            self._family.end(child)
        return found, used_s

    def _start(self, job: Job, go: int) -> Child:
        descriptors = [go] if job.map_fd < 0 else [go, job.map_fd]
        text = replace(job, go_fd=go).dump()
        command = [sys.executable, "-m", "gpufeed.bench.share.reader", text]
        return self._family.start(f"reader-{job.mode}", command, pass_fds=descriptors)
