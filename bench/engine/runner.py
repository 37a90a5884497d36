"""One run of ``cachebench engine``: objects, server, every engine in turn, round by round.

The server has one CPU, the engine another: on one, each would be charged for the other's caches and
wake-ups, and loopback bills part of the receiving to whoever sends. Rounds are interleaved, so that
a machine that becomes slower does so for every engine.

Whatever happens, `run` leaves no process, socket or file: see `gpufeed.bench.runner`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpufeed.bench.children import Child, Family, stream
from gpufeed.bench.engine import report
from gpufeed.bench.engine.clients import Setting
from gpufeed.bench.engine.libraries import VENDOR_HOST
from gpufeed.bench.engine.nginx import find_nginx, nginx_version, server_pid, start_nginx
from gpufeed.bench.engine.objects import (
    BUCKET,
    Source,
    StoredObject,
    make_objects,
    object_count,
    room_needed,
)
from gpufeed.bench.engine.registry import KINDS, kind_of
from gpufeed.bench.engine.worker import Spec, write_spec
from gpufeed.bench.fingerprint import fingerprint
from gpufeed.bench.interrupts import interruptible, to_the_end
from gpufeed.bench.progress import Progress
from gpufeed.bench.runner import REPEATS_MAX, child_environment
from gpufeed.bench.workplace import Workplace, require_free, workplace
from gpufeed.cachefs.errors import StorageError, UsageError, WorkerError
from gpufeed.cachefs.units import GIB, KIB, MIB, format_bytes

SILENCE_S = 120.0
CONNECTIONS_MAX = 1024
ORIGIN_THREADS_MAX = 64
PART_BYTES_MIN = 64 * KIB
SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Everything a run can be told. `directory` None: the fill's cache is in the work dir."""

    work_dir: Path
    names: tuple[str, ...] = tuple(KINDS)
    size_bytes: int = GIB
    repeats: int = 3
    part_bytes: int = 8 * MIB
    connections: int = 8
    client_cpus: int = 1
    origin_threads: int = 0
    directory: Path | None = None
    must_pass: bool = False

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: out of range, or the targets cannot be judged by these engines.
        """
        for name in self.names:
            kind_of(name)
        if not self.names:
            raise UsageError("--engines names nobody")
        object_count(self.size_bytes)
        for value, low, high, what in (
            (self.repeats, 1, REPEATS_MAX, "--repeats"),
            (self.connections, 1, CONNECTIONS_MAX, "--connections"),
            (self.client_cpus, 1, CONNECTIONS_MAX, "--client-cpus"),
            (self.origin_threads, 0, ORIGIN_THREADS_MAX, "--origin-threads"),
            (self.part_bytes, PART_BYTES_MIN, GIB, "--part"),
        ):
            if not low <= value <= high:
                raise UsageError(f"{what} is {value}; it must be {low} to {high}")
        needed = {name for target in report.TARGETS for name in (target.engine, target.against)}
        if self.must_pass and (missing := sorted(needed - set(self.names))):
            raise UsageError(f"--check compares {', '.join(missing)} too: name them in --engines")


@dataclass(frozen=True, slots=True)
class Cpus:
    """Where the server and the engines run."""

    server: tuple[int, ...]
    client: tuple[int, ...]

    @classmethod
    def choose(cls, usable: Sequence[int], client_count: int) -> Cpus:
        """The first for the server, the next for the engines; all on one if there is but one.

        Raises:
            UsageError: fewer than were asked for.
        """
        if len(usable) == 1 and client_count == 1:
            return cls(tuple(usable), tuple(usable))
        if client_count >= len(usable):
            raise UsageError(
                f"--client-cpus is {client_count}; of {len(usable)} CPUs one is the server's"
            )
        return cls(tuple(usable[:1]), tuple(usable[1 : 1 + client_count]))


def run(options: EngineOptions, progress: Progress) -> report.Result:
    """Run it all; see the top of the file.

    Raises:
        GpufeedError: what went wrong, after everything was ended and removed.
        Interrupted: a signal, likewise.
    """
    find_nginx()
    cpus = Cpus.choose(sorted(os.sched_getaffinity(0)), options.client_cpus)
    names, skipped = _runnable(options.names)
    for entry in skipped:
        progress.say(f"skipped {entry['engine']}: {entry['reason']}")
    with interruptible(), ExitStack() as stack:
        place = stack.enter_context(workplace(options.work_dir, keep=False))
        family = stack.enter_context(Family(place.run_dir, child_environment()))
        disk = stack.enter_context(_scratch(options.directory or place.run_dir, options.size_bytes))
        objects = _objects(place.run_dir / "objects", options.size_bytes, progress)
        nginx, endpoint = start_nginx(family, place.run_dir / "objects", objects, cpus.server)
        bench = _Bench(
            options,
            place,
            family,
            Source(endpoint=endpoint, objects=objects),
            cpus,
            nginx,
            progress,
        )
        bench.make_hosts()
        runs = bench.rounds(names, disk)
        settings = bench.settings(disk)
        settings["environment"] = fingerprint(disk)
    return report.assemble(runs, settings, skipped)


def _runnable(names: Sequence[str]) -> tuple[list[str], list[dict[str, str]]]:
    able, skipped = [], []
    for name in names:
        reason = kind_of(name).missing()
        if reason is None:
            able.append(name)
        else:
            skipped.append({"engine": name, "reason": reason})
    return able, skipped


@contextmanager
def _scratch(parent: Path, size_bytes: int) -> Iterator[Path]:
    """A directory of this run's own on the disk that is measured."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        # The objects may lie on the same disk, and the cache keeps a free floor.
        require_free(parent, 2 * room_needed(size_bytes), f"a fill of {format_bytes(size_bytes)}")
        made = Path(tempfile.mkdtemp(prefix="cachebench-engine-", dir=parent))
    except OSError as error:
        raise StorageError(f"{parent}: {error.strerror}; choose another --dir") from error
    try:
        yield made
    finally:
        to_the_end(lambda: shutil.rmtree(made, ignore_errors=True))


def _objects(directory: Path, size_bytes: int, progress: Progress) -> tuple[StoredObject, ...]:
    progress.stage("making objects", object_count(size_bytes) + 1)
    objects: list[StoredObject] = []
    for item in make_objects(directory, size_bytes, seed=SEED):
        objects.append(item)
        progress.update(len(objects), format_bytes(sum(each.size_bytes for each in objects)))
    return tuple(objects)


class _Bench:
    """The part of a run that has objects and a server."""

    def __init__(
        self,
        options: EngineOptions,
        place: Workplace,
        family: Family,
        source: Source,
        cpus: Cpus,
        nginx: Child,
        progress: Progress,
    ) -> None:
        self._options = options
        self._place = place
        self._family = family
        self._source = source
        self._cpus = cpus
        self._nginx = nginx
        self._progress = progress
        self._hosts = place.run_dir / "hosts"

    def make_hosts(self) -> None:
        """Where the vendor's host name leads here, for the engines that insist on it."""
        self._hosts.write_text(f"127.0.0.1 localhost {VENDOR_HOST} {BUCKET}.{VENDOR_HOST}\n")

    def rounds(self, names: Sequence[str], disk: Path) -> dict[str, list[Any]]:
        """Every engine once a round; what each of them cost, round by round."""
        runs: dict[str, list[Any]] = {name: [] for name in names}
        for turn in range(self._options.repeats):
            for name in names:
                scratch = disk / f"{name}-{turn}"
                scratch.mkdir()
                try:
                    found = self._run_one(name, turn, scratch)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
                runs[name].append(found)
                self._progress.say(report.run_line(name, turn, found))
        return runs

    def _run_one(self, name: str, turn: int, scratch: Path) -> dict[str, Any]:
        options, run_dir = self._options, self._place.run_dir
        spec = Spec(
            engine=name,
            setting=Setting(
                source=self._source,
                part_bytes=options.part_bytes,
                connections=options.connections,
                origin_threads=options.origin_threads,
                directory=str(scratch),
                socket_path=str(self._place.socket_dir / "engine.sock"),
            ),
            cpus=self._cpus.client,
            server_pid=server_pid(self._nginx, run_dir / "objects"),
        )
        path = run_dir / "spec.json"
        write_spec(spec, path)
        total_bytes = sum(item.size_bytes for item in self._source.measured)
        self._progress.stage(f"{name} {turn + 1}/{options.repeats}", total_bytes)
        child = self._family.start(f"engine-{name}", self._command(name, path))
        found: dict[str, Any] | None = None
        for _, message in stream([child], silence_s=SILENCE_S):
            if message["type"] == "lap":
                self._progress.update(message["bytes"], format_bytes(message["bytes"]))
            elif message["type"] == "run":
                found = message["run"]
        self._family.end(child)
        if found is None or found["bytes"] != total_bytes:
            raise WorkerError(f"{name} did not report {total_bytes} bytes: {found}")
        return found

    def _command(self, name: str, spec_path: Path) -> list[str]:
        command = [sys.executable, "-m", "gpufeed.bench.engine.worker", str(spec_path)]
        if not kind_of(name).needs_vendor_host:
            return command
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, str(self._hosts), *command]

    def settings(self, disk: Path) -> dict[str, Any]:
        """The fixed fields of the result."""
        options, cpus = self._options, self._cpus
        return {
            "source": "nginx, 1 worker, sendfile, loopback; objects in the page cache",
            "server_version": nginx_version(),
            "size_bytes": sum(item.size_bytes for item in self._source.measured),
            "objects": len(self._source.measured),
            "part_bytes": options.part_bytes,
            "connections": options.connections,
            "origin_threads": options.origin_threads,
            "repeats": options.repeats,
            "server_cpus": list(cpus.server),
            "client_cpus": list(cpus.client),
            "fill_directory": str(options.directory or options.work_dir),
            "engines": {name: kind.summary for name, kind in KINDS.items()},
            "made_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }
