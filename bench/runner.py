"""One run of ``cachebench run``: data, origin, step, contenders, result.

Order: demo data (made once, reused), the OSS stand-in, the step of the accelerator (measured on
local files), then every contender in a process of its own, interleaved when repeated. gpufeed's
contenders get a fresh daemon with an empty cache each time.

Whatever happens, `run` leaves no process, socket or temporary file: children belong to a `Family`,
directories to a `workplace`, and a signal becomes an exception (`interrupts`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpufeed.bench import contenders, demodata, report, services
from gpufeed.bench.accelerator import STEP_S_MAX
from gpufeed.bench.children import Family, stream
from gpufeed.bench.contender import write_spec
from gpufeed.bench.contenders import ContenderSpec
from gpufeed.bench.demodata import DataSpec, DemoData
from gpufeed.bench.fingerprint import fingerprint
from gpufeed.bench.interrupts import interruptible
from gpufeed.bench.progress import Progress
from gpufeed.bench.sharedmemory import PIDS_SUFFIX
from gpufeed.bench.stepchoice import OriginShape, StepChoice, choose_step
from gpufeed.bench.workplace import PARTIAL_SUFFIX, Workplace, require_free, workplace
from gpufeed.cachefs.errors import IntegrityError, UsageError, WorkerError
from gpufeed.cachefs.units import MB, MIB

SILENCE_S = 90.0
REPEATS_MAX = 100
BATCH_SIZE_MAX = 65_536
WORKERS_MAX = 256
CALIBRATION_STEPS = 32
ARENA_BYTES = 512 * MIB
# Tars are 3 % larger than their images; the rest is room for whole extents and metadata.
_CACHE_BYTES_PER_DATA_BYTE = 1.5
_IMAGE_BYTES = 115_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Everything a run can be told. `step_ms` None means: choose it."""

    work_dir: Path
    names: tuple[str, ...] = tuple(contenders.KINDS)
    data: DataSpec = field(default_factory=DataSpec)
    slow_samples: int = 960
    batch_size: int = 64
    workers: int = 2
    step_ms: float | None = None
    first_byte_ms: float = 20.0
    mb_per_s: float = 80.0
    repeats: int = 1
    compute: str = "sleep"
    price: report.Price = field(default_factory=lambda: report.Price(3.0, 8))
    keep: bool = False

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: out of range.
        """
        for name in self.names:
            contenders.kind_of(name)
        if not self.names:
            raise UsageError("--contenders names nobody")
        for value, low, high, what in (
            (self.batch_size, 1, BATCH_SIZE_MAX, "--batch-size"),
            (self.workers, 1, WORKERS_MAX, "--workers"),
            (self.repeats, 1, REPEATS_MAX, "--repeats"),
            (self.slow_samples, 1, demodata.SAMPLES_MAX, "--slow-samples"),
            (self.first_byte_ms, 0, 60_000, "--first-byte-ms"),
            (self.mb_per_s, 0.001, 1_000_000, "--mb-per-s"),
            (self.step_ms or 0, 0, STEP_S_MAX * 1e3, "--step-ms"),
        ):
            if not low <= value <= high:
                raise UsageError(f"{what} is {value:g}; it must be {low:g} to {high:g}")

    @property
    def origin_shape(self) -> OriginShape:
        """How the origin answers."""
        return OriginShape(first_byte_s=self.first_byte_ms / 1e3, bytes_per_s=self.mb_per_s * MB)


def run(options: RunOptions, progress: Progress) -> report.Result:
    """Run it all; see the top of the file.

    Raises:
        GpufeedError: what went wrong, after everything was ended and removed.
        Interrupted: a signal, likewise.
    """
    names, skipped = runnable(options.names)
    for entry in skipped:
        progress.say(f"skipped {entry['name']}: {entry['reason']}")
    with interruptible(), ExitStack() as stack:
        place = stack.enter_context(workplace(options.work_dir, keep=options.keep))
        family = stack.enter_context(Family(place.run_dir, child_environment()))
        data = prepare_data(options, place, family, progress)
        origin: Mapping[str, str] = {}
        if any(contenders.kind_of(name).needs_origin for name in names):
            origin = services.start_standin(family, data.objects_dir, options.origin_shape)
        bench = _Bench(options, place, family, data, origin, progress)
        step = bench.choose_step(names)
        rows = bench.run_rounds(names, step)
        settings = bench.settings(step, skipped)
    return report.assemble(rows, settings, options.price)


def runnable(names: Sequence[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Split contenders into those that can run here and those that lack a module.

    Raises:
        UsageError: torch is missing, so that none can.
    """
    able, skipped = [], []
    for name in names:
        missing = contenders.missing_modules(name)
        if "torch" in missing:
            raise UsageError("torch is not installed; pip install 'gpufeed[bench]'")
        if missing:
            reason = f"{', '.join(missing)} not installed; pip install 'gpufeed[bench]'"
            skipped.append({"name": name, "reason": reason})
        else:
            able.append(name)
    return able, skipped


def child_environment() -> dict[str, str]:
    """Our environment for children: no proxies (all traffic is local), one thread a worker."""
    lowered = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}
    environment = {name: value for name, value in os.environ.items() if name.lower() not in lowered}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment.setdefault(name, "1")
    # A run must not meet a daemon or settings that are not its own.
    return {name: value for name, value in environment.items() if not name.startswith("GPUFEED_")}


def prepare_data(
    options: RunOptions, place: Workplace, family: Family, progress: Progress
) -> DemoData:
    """Load the demo data, or make it with one process a CPU (at most one a worker)."""
    spec = options.data
    final = place.work_dir / spec.directory_name
    what = f"a run over {spec.sample_count} images"
    cache_bytes = int(spec.sample_count * _IMAGE_BYTES * _CACHE_BYTES_PER_DATA_BYTE)
    if final.is_dir():
        require_free(place.work_dir, cache_bytes, what)
        return demodata.load(final)
    # Each image is in a tar and a loose object.
    require_free(place.work_dir, 2 * spec.sample_count * _IMAGE_BYTES + cache_bytes, what)
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    demodata.make_directories(partial / "objects")
    parts = max(1, min(len(os.sched_getaffinity(0)), spec.shard_count, 16))
    children = [
        family.start_module(
            f"demodata-{part}",
            "gpufeed.bench.demodata",
            json.dumps(asdict(spec)),
            str(partial / "objects"),
            str(part),
            str(parts),
        )
        for part in range(parts)
    ]
    progress.stage("making demo data", spec.sample_count)
    records: list[demodata.SampleRecord] = []
    for _, message in stream(children, silence_s=SILENCE_S):
        records += demodata.records_from(message)
        progress.update(len(records), f"{len(records)} images")
    for child in children:
        family.end(child)
    data = demodata.finish(partial, final, spec, records)
    progress.say(f"demo data: {len(records)} images, {data.image_bytes / MB:.0f} MB, in {final}")
    return data


class _Bench:
    """The part of a run that has data and an origin."""

    def __init__(
        self,
        options: RunOptions,
        place: Workplace,
        family: Family,
        data: DemoData,
        origin: Mapping[str, str],
        progress: Progress,
    ) -> None:
        self._options = options
        self._place = place
        self._family = family
        self._data = data
        self._origin = origin
        self._progress = progress
        self._environment = fingerprint(place.work_dir)

    def choose_step(self, names: Sequence[str]) -> StepChoice:
        """The step that was given, or one that fits two short measurements without a step."""
        options = self._options
        if options.step_ms is not None:
            return StepChoice(options.step_ms / 1e3, "given by --step-ms")
        ceiling = self._pace("ceiling", CALIBRATION_STEPS, CALIBRATION_STEPS // 4)
        loose = None
        slow = next((name for name in names if contenders.kind_of(name).slow), None)
        if slow is not None:
            loose = self._pace(slow, 4 * options.workers, options.workers)
        choice = choose_step(
            ceiling,
            loose,
            batch_size=options.batch_size,
            workers=options.workers,
            loose_steps=-(-self._sample_count("loose-http") // options.batch_size),
        )
        self._progress.say(f"step: {choice.step_s * 1e3:.0f} ms: {choice.reason}")
        return choice

    def _pace(self, name: str, steps: int, skip: int) -> float:
        """Samples per second of a contender without an accelerator, after its first batches."""
        self._progress.stage(f"measuring {name}", steps * self._options.batch_size)
        spec = self._spec(name, StepChoice(0.0, ""))
        # A whole epoch, though a short one: a loader that is cut off leaves batches in flight.
        count = min(steps * self._options.batch_size, len(self._data.samples))
        spec = replace(spec, phases=("calibration",), sample_count=count)
        return steady_samples_per_s(self._run_contender(spec)[0], skip)

    def run_rounds(self, names: Sequence[str], step: StepChoice) -> list[report.Row]:
        """Every contender once a round; the rows of all rounds."""
        rows = []
        for turn in range(self._options.repeats):
            for name in names:
                rows += self._run_one(name, step, turn)
        return rows

    def _run_one(self, name: str, step: StepChoice, turn: int) -> list[report.Row]:
        title = name if self._options.repeats == 1 else f"{name} {turn + 1}"
        spec = self._spec(name, step)
        self._progress.stage(title, spec.sample_count)
        if not contenders.kind_of(name).needs_daemon:
            return self._run_contender(spec, title)
        cache_dir = self._place.run_dir / f"cache-{name}-{turn}"
        cache_dir.mkdir()
        daemon = services.start_daemon(
            self._family,
            socket=self._place.socket_dir / "daemon.sock",
            cache_dir=cache_dir,
            sizes=(int(self._data.image_bytes * _CACHE_BYTES_PER_DATA_BYTE), ARENA_BYTES),
            origin=self._origin,
        )
        try:
            spec = replace(spec, daemon_socket=daemon.socket, daemon_pid=daemon.pid)
            return self._run_contender(spec, title)
        except WorkerError as error:
            raise WorkerError(f"{error}{daemon.child.log_tail()}") from error
        finally:
            self._family.end(daemon.child)
            if not self._options.keep:
                shutil.rmtree(cache_dir, ignore_errors=True)

    def _spec(self, name: str, step: StepChoice) -> ContenderSpec:
        options = self._options
        return ContenderSpec(
            name=name,
            phases=contenders.kind_of(name).phases,
            data_root=str(self._data.root),
            sample_count=self._sample_count(name),
            batch_size=options.batch_size,
            workers=options.workers,
            step_s=step.step_s,
            compute=options.compute,
            seed=options.data.seed,
            origin=dict(self._origin),
            pids_path=str(self._place.run_dir / f"{name}{PIDS_SUFFIX}"),
            bench_pid=os.getpid(),
        )

    def _sample_count(self, name: str) -> int:
        count = len(self._data.samples)
        slow = contenders.kind_of(name).slow
        return min(self._options.slow_samples, count) if slow else count

    def _run_contender(self, spec: ContenderSpec, title: str = "") -> list[report.Row]:
        path = self._place.run_dir / f"spec-{spec.name}.json"
        write_spec(spec, path)
        child = self._family.start_module(spec.name, "gpufeed.bench.contender", str(path))
        rows = []
        for _, message in stream([child], silence_s=SILENCE_S):
            if message["type"] == "step":
                note = f"{message['phase']}: {message['au_pct']:.1f} % utilised"
                self._progress.update(message["samples"], note)
            elif message["type"] == "row":
                rows.append(message["row"])
                if title:
                    self._progress.say(row_line(message["row"]))
        self._family.end(child)
        if len(rows) != len(spec.phases):
            raise WorkerError(f"{spec.name} reported {len(rows)} of {len(spec.phases)} epochs")
        return rows

    def settings(self, step: StepChoice, skipped: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """The fixed fields of the result."""
        options, data = self._options, self._data
        return {
            "origin": {
                "first_byte_ms": _number(options.first_byte_ms),
                "mb_per_s_per_connection": _number(options.mb_per_s),
            },
            "workers": options.workers,
            "batch_size": options.batch_size,
            "step_ms": _number(round(step.step_s * 1e3, 3)),
            "step_reason": step.reason,
            "pace_without_step": {
                "ceiling": step.ceiling_samples_per_s,
                "loose": step.loose_samples_per_s,
            },
            "demand_samples_per_s": (
                round(options.batch_size / step.step_s, 1) if step.step_s else None
            ),
            "compute": options.compute,
            "repeats": options.repeats,
            "data": {
                "samples": len(data.samples),
                "shards": data.spec.shard_count,
                "image_bytes_mean": round(data.image_bytes / len(data.samples)),
                "seed": data.spec.seed,
                "version": demodata.VERSION,
            },
            "contenders": {name: kind.summary for name, kind in contenders.KINDS.items()},
            "skipped": [dict(entry) for entry in skipped],
            "environment": self._environment,
            "made_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }


def steady_samples_per_s(row: report.Row, skip: int) -> float:
    """The pace of a run without an accelerator, its first `skip` batches left out.

    Those come out of the workers' start-up, not out of their pace; of a data set of a few batches
    they are all there is.

    Raises:
        IntegrityError: too few steps to tell.
    """
    waits = row["waits_ms"][skip:] or row["waits_ms"]
    if sum(waits) <= 0:
        raise IntegrityError(f"{row['name']}: no steps to measure its pace by; raise --samples")
    return float(1e3 * row["samples"] / row["steps"] * len(waits) / sum(waits))


def row_line(row: Mapping[str, Any]) -> str:
    """One row in one line, as it comes in."""
    return (
        f"{row['name']}, {row['phase']}: {row['au_pct']:.1f} % utilised, "
        f"{row['samples_per_s']:.0f} samples/s, first batch {row['first_batch_s']:.2f} s, "
        f"{row['origin_requests']} origin requests"
    )


def _number(value: float) -> float | int:
    """20.0 as 20: results are compared by people."""
    return int(value) if float(value).is_integer() else value
