"""From measured rows to the result: medians, checks, targets, verdict, cost; and the table.

The result is one JSON object, the source of truth for the terminal table and the HTML page. Its
shape (see `SCHEMA_VERSION`; fields are only ever added)::

    {"schema": 1,
     "origin": {"first_byte_ms", "mb_per_s_per_connection"},
     "workers", "batch_size", "step_ms", "demand_samples_per_s", "step_reason", "compute", ...
     "data": {"samples", "shards", "image_bytes_mean", "seed"},
     "rows": [{"name", "phase", "samples", "au_pct", "samples_per_s", "stall_s", "first_batch_s",
               "origin_requests", "origin_bytes", ..., "spread": {"au_pct": [low, high], ...}}],
     "skipped": [{"name", "reason"}],
     "checks": {"exactly_once": true, ...},      correctness: one false fails the run
     "targets": [{"target", "got", "passed"}],   performance on this machine
     "verdict": "...", "cost": {...}, "environment": {...}}

Pure but for `print_table`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpufeed.cachefs.errors import UsageError

SCHEMA_VERSION = 1
Row = dict[str, Any]
Result = dict[str, Any]

# Medians are taken of these; the rest of a row comes from the repetition with the median au_pct.
MEASURED = (
    "au_pct", "samples_per_s", "stall_s", "first_batch_s", "open_s", "epoch_s", "wait_p50_ms",
    "wait_p95_ms", "wait_p99_ms", "step_late_ms", "cpu_s_per_1k", "others_cpu_pct",
    "origin_requests", "origin_bytes",
)  # fmt: skip
# Above this share of all CPUs used by other programs a row is called disturbed.
OTHERS_CPU_PCT_MAX = 10.0
BEFORE = ("loose-http", "loose-ossfs")
REQUIRED = ("origin", "workers", "step_ms", "rows")
_REQUIRED_IN_ROW = (
    "name", "phase", "au_pct", "samples_per_s", "stall_s", "first_batch_s", "origin_requests",
    "origin_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour of one GPU costs, and how many the job has."""

    gpu_hour: float
    gpus: int

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: out of range.
        """
        if self.gpu_hour < 0 or self.gpus < 1:
            raise UsageError("--gpu-price must not be negative and --gpus must be at least 1")


def merge_repeats(repeats: Sequence[Row]) -> Row:
    """One row of the repetitions of one contender and phase: medians, with the spread beside."""
    ordered = sorted(repeats, key=lambda row: float(row["au_pct"]))
    merged = dict(ordered[(len(ordered) - 1) // 2])
    merged["repeats"] = len(ordered)
    spread = {}
    for name in MEASURED:
        values = [row[name] for row in ordered if name in row]
        if values:
            middle = statistics.median(values)
            merged[name] = round(middle, 3) if isinstance(middle, float) else middle
            spread[name] = [min(values), max(values)]
    if len(ordered) > 1:
        merged["spread"] = spread
    for name in ("exactly_once", "bytes_equal"):
        merged[name] = all(row.get(name, False) for row in ordered)
    return merged


def merge_rows(rows: Sequence[Row]) -> list[Row]:
    """One row a contender and phase, in order of first appearance."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["phase"]), []).append(row)
    return [merge_repeats(group) for group in groups.values()]


def find(rows: Sequence[Row], name: str, phase: str) -> Row | None:
    """The row of a contender's phase, if it ran."""
    return next((row for row in rows if row["name"] == name and row["phase"] == phase), None)


def checks(rows: Sequence[Row]) -> dict[str, bool]:
    """Correctness. Every value must be true."""
    found = {
        "exactly_once": all(row["exactly_once"] for row in rows),
        "bytes_equal": all(row["bytes_equal"] for row in rows),
    }
    warm = [row for row in rows if row["name"].startswith("gpufeed") and row["phase"] == "warm"]
    if warm:
        found["warm_epoch_without_origin_requests"] = all(_most_requests(row) == 0 for row in warm)
    return found


def _most_requests(row: Row) -> int:
    """Origin requests of the repetition that made most: a median would hide one bad epoch."""
    spread = row.get("spread", {}).get("origin_requests")
    return int(spread[1] if spread else row["origin_requests"])


@dataclass(frozen=True, slots=True)
class Target:
    """A promise about performance, what came out, and whether it was kept."""

    target: str
    got: str
    passed: bool

    def as_json(self) -> dict[str, Any]:
        """For the result."""
        return {"target": self.target, "got": self.got, "passed": self.passed}


def targets(rows: Sequence[Row]) -> list[Target]:
    """The promises that the rows at hand can answer."""
    found = []
    ceiling, loose = find(rows, "ceiling", "warm"), find(rows, "loose-http", "cold")
    direct = find(rows, "webdataset-direct", "cold")
    if ceiling:
        found.append(_at_least("the ceiling feeds the accelerator at 97 % or more", ceiling, 97))
    for row in (loose, find(rows, "loose-ossfs", "cold")):
        if row:
            text = f"{row['name']} leaves it at 20 % or less"
            found.append(Target(text, _pct(row), row["au_pct"] <= 20))
    for name in ("gpufeed", "gpufeed-loose"):
        warm = find(rows, name, "warm")
        if warm:
            found.append(_at_least(f"{name}, warm epoch, 96 % or more", warm, 96))
        if warm and ceiling:
            text = f"{name}, warm epoch, within 2 points of the ceiling"
            behind = ceiling["au_pct"] - warm["au_pct"]
            got = f"{abs(behind):.1f} points {'behind' if behind > 0 else 'ahead'}"
            found.append(Target(text, got, behind <= 2))
    cold = find(rows, "gpufeed", "cold")
    if cold and direct:
        text = "gpufeed, cold epoch, at least as well fed as webdataset streaming directly"
        got = f"{_pct(cold)} against {_pct(direct)}"
        found.append(Target(text, got, cold["au_pct"] >= direct["au_pct"]))
    if cold:
        text = "gpufeed, first batch of the first epoch within 0.5 s"
        found.append(Target(text, f"{cold['first_batch_s']:.2f} s", cold["first_batch_s"] <= 0.5))
    cold_loose = find(rows, "gpufeed-loose", "cold")
    if cold_loose and loose:
        times = cold_loose["samples_per_s"] / max(loose["samples_per_s"], 1e-9)
        text = "gpufeed-loose, cold epoch, at least 5 x the samples/s of loose-http"
        found.append(Target(text, f"{times:.1f} x", times >= 5))
    return found


def _at_least(text: str, row: Row, least: float) -> Target:
    return Target(text, _pct(row), row["au_pct"] >= least)


def _pct(row: Row) -> str:
    return f"{row['au_pct']:.1f} %"


def before_and_after(rows: Sequence[Row]) -> tuple[Row, Row] | None:
    """The two rows that the verdict compares: one request an image, and gpufeed once warm."""
    before = next((row for name in BEFORE if (row := find(rows, name, "cold"))), None)
    after = find(rows, "gpufeed", "warm") or find(rows, "gpufeed-loose", "warm")
    return (before, after) if before and after else None


def disturbed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Contenders during whose epochs somebody else used much of the machine, with how much."""
    return [
        f"{row['name']} {row['phase']} ({row['others_cpu_pct']:.0f} %)"
        for row in rows
        if row.get("others_cpu_pct", 0) > OTHERS_CPU_PCT_MAX
    ]


def verdict(rows: Sequence[Row]) -> str:
    """The result in two sentences."""
    pair = before_and_after(rows)
    if pair is None:
        return "No verdict: it needs a loose contender and gpufeed in one run."
    before, after = pair
    times = after["samples_per_s"] / max(before["samples_per_s"], 1e-9)
    text = (
        f"With one request an image the accelerator computes {before['au_pct']:.0f} % of the time; "
        f"through {after['name']} {after['au_pct']:.0f} %, and training runs {times:.1f} times "
        "as fast."
    )
    ceiling = find(rows, "ceiling", "warm")
    if ceiling:
        reach = f"{ceiling['au_pct']:.0f} %"
        ahead = ceiling["au_pct"] > after["au_pct"]
        text += (
            f" Local files {'would allow' if ahead else 'through the usual loader give'} {reach}."
        )
    return text


def cost(rows: Sequence[Row], price: Price) -> dict[str, Any] | None:
    """What starving costs an hour, before and after, at a price; None without both rows."""
    pair = before_and_after(rows)
    if pair is None:
        return None
    hour = price.gpu_hour * price.gpus
    idle = [hour * (1 - row["au_pct"] / 100) for row in pair]
    million = [1e6 / max(row["samples_per_s"], 1e-9) / 3600 * price.gpu_hour for row in pair]
    return {
        "gpu_price_per_hour": price.gpu_hour,
        "gpus": price.gpus,
        "before": pair[0]["name"],
        "after": pair[1]["name"],
        "idle_per_hour_before": round(idle[0], 2),
        "idle_per_hour_after": round(idle[1], 2),
        "saved_per_hour": round(idle[0] - idle[1], 2),
        "per_million_samples_before": round(million[0], 2),
        "per_million_samples_after": round(million[1], 2),
    }


def cost_sentence(amounts: Mapping[str, Any] | None) -> str:
    """`cost` for people."""
    if not amounts:
        return ""
    gpus, price = amounts["gpus"], amounts["gpu_price_per_hour"]
    plural = "" if gpus == 1 else "s"
    verb, saved = "saves", amounts["saved_per_hour"]
    if saved < 0:
        verb, saved = "loses", -saved
    return (
        f"At {price:.2f} an hour a GPU, {gpus} GPU{plural}: idle GPU time costs "
        f"{amounts['idle_per_hour_before']:.2f} an hour with {amounts['before']} and "
        f"{amounts['idle_per_hour_after']:.2f} with {amounts['after']}, which {verb} "
        f"{saved:.2f} an hour."
    )


def assemble(raw_rows: Sequence[Row], settings: Mapping[str, Any], price: Price) -> Result:
    """The whole result of a run; `settings` are its fixed fields."""
    rows = merge_rows(raw_rows)
    return {
        "schema": SCHEMA_VERSION,
        **settings,
        "verdict": verdict(rows),
        "cost": cost(rows, price),
        "checks": checks(rows),
        "targets": [target.as_json() for target in targets(rows)],
        "rows": rows,
    }


def validate(result: Any) -> Result:
    """Check that a parsed JSON value is a result that this version can show.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(result, dict) or any(name not in result for name in REQUIRED):
        raise UsageError(f"not a cachebench result: it needs {', '.join(REQUIRED)}")
    if result.get("schema", SCHEMA_VERSION) > SCHEMA_VERSION:
        raise UsageError(
            f"a result of schema {result['schema']}; this cachebench knows {SCHEMA_VERSION}"
        )
    for number, row in enumerate(result["rows"]):
        lacking = [name for name in _REQUIRED_IN_ROW if name not in row]
        if lacking:
            raise UsageError(f"row {number} of the result lacks {', '.join(lacking)}")
    return result
