"""The process of one engine: reads a spec, receives everything once, writes JSON lines.

``python -m gpufeed.bench.engine.worker SPEC_FILE``, started under a keeper by the runner. It writes
to standard output, one object a line: ``{"type": "lap", "bytes"}`` after each lap,
``{"type": "run", "run": {...}}`` at the end, and ``{"type": "error", "class", "message"}`` with a
non-zero status when something is wrong.

The clocks run while a lap is received and at no other time: making the client, warming up and
checking are outside. CPU is this process's own, all its threads, user and system.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpufeed.bench.engine.clients import Client, Setting
from gpufeed.bench.engine.objects import Source, StoredObject
from gpufeed.bench.engine.registry import kind_of
from gpufeed.bench.measure import busy_cpu_s
from gpufeed.cachefs.errors import GpufeedError

Send = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the process is told.

    Attributes:
        engine: its name in the registry.
        setting: what the engine is told.
        cpus: where it runs.
        server_pid: the server's process, whose CPU is read too.
    """

    engine: str
    setting: Setting
    cpus: tuple[int, ...]
    server_pid: int


@dataclass(slots=True)
class Run:
    """What one pass over the objects cost. `server_s` is None where it cannot be read."""

    bytes: int = 0
    wall_s: float = 0.0
    user_s: float = 0.0
    system_s: float = 0.0
    server_s: float | None = None
    others_s: float = 0.0
    peak_rss_bytes: int = 0
    notes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Clocks:
    wall_s: float
    user_s: float
    system_s: float
    server_s: float | None
    busy_s: float

    @classmethod
    def read(cls, server_pid: int) -> _Clocks:
        server_s, busy_s = thread_cpu_s(server_pid), busy_cpu_s()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.perf_counter(), usage.ru_utime, usage.ru_stime, server_s, busy_s)


def thread_cpu_s(pid: int) -> float | None:
    """CPU seconds of a process's first thread, to the nanosecond; None where the kernel hides it.

    The server has one thread.
    """
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def measure(client: Client, server_pid: int, on_lap: Callable[[int], None]) -> Run:
    """Receive everything and check it.

    Raises:
        IntegrityError: wrong bytes arrived.
    """
    run = Run()
    for lap in client.laps():
        before = _Clocks.read(server_pid)
        client.receive(lap)
        after = _Clocks.read(server_pid)
        _add(run, before, after, lap)
        client.check(lap)
        on_lap(run.bytes)
    run.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    run.notes = client.notes()
    return run


def _add(run: Run, before: _Clocks, after: _Clocks, lap: Sequence[StoredObject]) -> None:
    user_s = after.user_s - before.user_s
    system_s = after.system_s - before.system_s
    run.bytes += sum(item.size_bytes for item in lap)
    run.wall_s += after.wall_s - before.wall_s
    run.user_s += user_s
    run.system_s += system_s
    ours_s = user_s + system_s
    if before.server_s is not None and after.server_s is not None:
        server_s = after.server_s - before.server_s
        run.server_s = (run.server_s or 0.0) + server_s
        ours_s += server_s
    # Never below zero: /proc/stat counts in ticks of 10 ms.
    run.others_s += max(0.0, after.busy_s - before.busy_s - ours_s)


def write_spec(spec: Spec, path: Path) -> None:
    """Write a spec for a child."""
    path.write_text(json.dumps(asdict(spec)))


def read_spec(path: Path) -> Spec:
    """Read a spec written by `write_spec`."""
    values = json.loads(path.read_text())
    setting = values.pop("setting")
    source = setting.pop("source")
    objects = tuple(StoredObject(**item) for item in source.pop("objects"))
    return Spec(
        engine=values["engine"],
        setting=Setting(source=Source(objects=objects, **source), **setting),
        cpus=tuple(values["cpus"]),
        server_pid=values["server_pid"],
    )


def run(spec: Spec, send: Send) -> None:
    """Do it all; see the top of the file."""
    os.sched_setaffinity(0, spec.cpus)
    client = kind_of(spec.engine).load()(spec.setting)
    client.open()
    found = measure(client, spec.server_pid, lambda done: send({"type": "lap", "bytes": done}))
    client.close()
    send({"type": "run", "run": asdict(found)})


def main(argv: list[str]) -> int:
    """Run one engine; see the top of the file."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints belongs into the log

    def send(message: Mapping[str, Any]) -> None:
        stream.write(json.dumps(message, separators=(",", ":")) + "\n")

    try:
        run(read_spec(Path(argv[0])), send)
    except GpufeedError as error:
        send({"type": "error", "class": type(error).__name__, "message": str(error)})
        return error.exit_status
    except Exception as error:
        # The top of a process: libraries raise what they like.
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        send({"type": "error", "class": "WorkerError", "message": text})
        return 1
    return 0


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stderr.flush()
    # Nothing is left to do, and the vendor's connector crashes while an interpreter ends.
    os._exit(ended)
