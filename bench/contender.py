"""The process of one contender: reads a spec, runs its epochs, writes JSON lines.

``python -m gpufeed.bench.contender SPEC_FILE``, started under a keeper by the runner. It writes to
standard output, one object a line:

- ``{"type": "ready"}`` once everything is imported,
- ``{"type": "step", "phase", "samples", "total", "au_pct"}`` some times a second,
- ``{"type": "row", "row": {...}}`` at the end of each epoch, verified,
- ``{"type": "error", "class", "message"}`` and a non-zero status when something is wrong.

The origin's counters are read before and after each epoch, outside the measured time.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gpufeed.bench import accelerator, contenders, demodata
from gpufeed.bench.contenders import Contender, ContenderSpec
from gpufeed.bench.measure import Epoch, busy_cpu_s, run_epoch, tree_cpu_s, verify
from gpufeed.bench.origincounters import OriginCounters, read_counters
from gpufeed.cachefs.errors import GpufeedError

_REPORT_EVERY_S = 0.2


class Reporter:
    """Writes JSON lines; steps at most every `_REPORT_EVERY_S`."""

    def __init__(self, write: Callable[[str], Any]) -> None:
        self._write = write
        self._next_s = 0.0

    def send(self, message: Mapping[str, Any]) -> None:
        """Write one message."""
        self._write(json.dumps(message, separators=(",", ":")) + "\n")

    def step(self, phase: str, total: int, epoch: Epoch) -> None:
        """Report progress, if it is time to."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _REPORT_EVERY_S
        self.send(
            {
                "type": "step",
                "phase": phase,
                "samples": epoch.sample_count,
                "total": total,
                "au_pct": epoch.au_pct,
            }
        )


def make_row(
    spec: ContenderSpec, phase: str, epoch: Epoch, *, cpu_s: float, origin: OriginCounters
) -> dict[str, Any]:
    """One row of the report."""
    samples = epoch.sample_count
    nominal_s = [spec.step_s * rows / spec.batch_size for rows in epoch.rows]
    late_s = sum(epoch.computes_s) - sum(nominal_s)
    return {
        "name": spec.name,
        "phase": phase,
        "samples": samples,
        "steps": len(epoch.rows),
        "au_pct": round(epoch.au_pct, 2),
        "samples_per_s": round(epoch.samples_per_s, 1),
        "stall_s": round(epoch.stall_s, 3),
        "first_batch_s": round(epoch.first_batch_s, 3),
        "open_s": round(epoch.open_s, 3),
        "epoch_s": round(epoch.wall_s, 3),
        "wait_p50_ms": round(epoch.wait_ms(0.5), 2),
        "wait_p95_ms": round(epoch.wait_ms(0.95), 2),
        "wait_p99_ms": round(epoch.wait_ms(0.99), 2),
        "step_late_ms": round(1e3 * late_s / max(1, len(epoch.rows)), 3),
        "cpu_s_per_1k": round(1e3 * cpu_s / max(1, samples), 3),
        "origin_requests": origin.requests,
        "origin_bytes": origin.bytes,
        "exactly_once": True,
        "bytes_equal": True,
        "waits_ms": [round(1e3 * wait, 1) for wait in epoch.waits_s],
        "computes_ms": [round(1e3 * compute, 1) for compute in epoch.computes_s],
    }


def run_phase(
    spec: ContenderSpec, phase: str, contender: Contender, data: demodata.DemoData, out: Reporter
) -> None:
    """Run one epoch, check it, and report its row.

    Raises:
        IntegrityError: a sample is missing, repeated or has other bytes than the source.
    """
    device = accelerator.make(spec.compute, spec.step_s, spec.batch_size)
    roots = [os.getpid(), *([spec.daemon_pid] if spec.daemon_pid else [])]
    origin_before, cpu_before = read_counters(spec.origin), tree_cpu_s(*roots)
    others_before = _others_cpu_s(spec)
    epoch = run_epoch(
        contender.epoch,
        device,
        on_step=lambda state: out.step(phase, spec.sample_count, state),
    )
    others_s = _others_cpu_s(spec) - others_before
    cpu_s = tree_cpu_s(*roots) - cpu_before
    origin = read_counters(spec.origin) - origin_before
    verify(
        epoch,
        contenders.chosen_indices(data, spec),
        lambda index: data.samples[index].crc64,
        f"{spec.name}, {phase} epoch",
    )
    row = make_row(spec, phase, epoch, cpu_s=cpu_s, origin=origin)
    if spec.bench_pid:
        capacity_s = max(epoch.wall_s, 1e-9) * (os.cpu_count() or 1)
        row["others_cpu_pct"] = round(100 * max(others_s, 0.0) / capacity_s, 1)
    out.send({"type": "row", "row": row})


def _others_cpu_s(spec: ContenderSpec) -> float:
    """CPU seconds of everything on this machine that is not part of the run."""
    return busy_cpu_s() - tree_cpu_s(spec.bench_pid) if spec.bench_pid else 0.0


def run(spec: ContenderSpec, out: Reporter) -> None:
    """Run all epochs of a spec."""
    data = demodata.load(Path(spec.data_root))
    contender = contenders.kind_of(spec.name).make(spec, data)
    contender.prepare()
    out.send({"type": "ready"})
    try:
        for phase in spec.phases:
            run_phase(spec, phase, contender, data, out)
    finally:
        contender.close()
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out.send({"type": "end", "peak_rss_bytes": peak_kib * 1024})


def read_spec(path: Path) -> ContenderSpec:
    """Read a spec written by `write_spec`."""
    known = {spec_field.name for spec_field in fields(ContenderSpec)}
    values = {name: value for name, value in json.loads(path.read_text()).items() if name in known}
    values["phases"] = tuple(values["phases"])
    return ContenderSpec(**values)


def write_spec(spec: ContenderSpec, path: Path) -> None:
    """Write a spec for a child; readable by this user only, it has credentials."""
    path.touch(mode=0o600)
    path.write_text(json.dumps({**asdict(spec), "origin": dict(spec.origin)}))


def main(argv: list[str]) -> int:
    """Run one contender; see the top of the file."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints belongs into the log
    out = Reporter(stream.write)
    try:
        run(read_spec(Path(argv[0])), out)
    except GpufeedError as error:
        out.send({"type": "error", "class": type(error).__name__, "message": str(error)})
        return error.exit_status
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        out.send({"type": "error", "class": "WorkerError", "message": text})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
