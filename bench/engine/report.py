"""What the rounds of ``cachebench engine`` say together: medians, spread, targets, a table.

Pure, but for `print_result`.

Targets compare CPU seconds a gigabyte, the steadier figure: on a machine with other work the
gigabytes a second are whatever was left over. A ratio is taken within each round, and the median of
the rounds counts, so that a slow minute falls on both sides of it.

``GB`` is 10^9 bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpufeed.cachefs.units import GB, MB

Result = dict[str, Any]
Runs = Mapping[str, Sequence[Mapping[str, Any]]]
VERSION = 1
# From here on other programs had a say in the result.
DISTURBED_PCT = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """`engine` must cost at most `ratio_max` times the CPU of `against`."""

    engine: str
    against: str
    ratio_max: float


TARGETS = (
    Target("gpufeed", "raw", 1.25),
    Target("gpufeed", "aiohttp", 0.5),
    Target("gpufeed-fill", "raw", 1.8),
)


def cpu_s_per_gb(run: Mapping[str, Any]) -> float:
    """CPU seconds of the engine's process for each gigabyte."""
    return float((run["user_s"] + run["system_s"]) / run["bytes"] * GB)


def gb_per_s(run: Mapping[str, Any]) -> float:
    """Gigabytes received each second."""
    return float(run["bytes"] / run["wall_s"] / GB)


def run_line(name: str, turn: int, run: Mapping[str, Any]) -> str:
    """One engine's round in one line, as it comes in."""
    return f"{name}, round {turn + 1}: {gb_per_s(run):.2f} GB/s, {cpu_s_per_gb(run):.3f} CPU-s/GB"


def assemble(
    runs: Runs, settings: Mapping[str, Any], skipped: Sequence[Mapping[str, str]]
) -> Result:
    """The result of all rounds."""
    cpu_count = settings["environment"]["cpus_online"]
    return {
        "kind": "engine",
        "version": VERSION,
        **settings,
        "rows": [_row(name, found, cpu_count) for name, found in runs.items()],
        "targets": [
            judged(target, runs)
            for target in TARGETS
            if target.engine in runs and target.against in runs
        ],
        "skipped": [dict(entry) for entry in skipped],
    }


def _row(name: str, runs: Sequence[Mapping[str, Any]], cpu_count: int) -> dict[str, Any]:
    row: dict[str, Any] = {"engine": name, "repeats": len(runs)}
    for field, of in (("gb_per_s", gb_per_s), ("cpu_s_per_gb", cpu_s_per_gb)):
        values = [of(run) for run in runs]
        row[field] = round(statistics.median(values), 4)
        row[f"{field}_min"] = round(min(values), 4)
        row[f"{field}_max"] = round(max(values), 4)
    for field in ("user_s", "system_s", "server_s"):
        each = [run[field] / run["bytes"] * GB for run in runs if run[field] is not None]
        row[f"{field}_per_gb"] = round(statistics.median(each), 4) if each else None
    row["peak_rss_bytes"] = max(run["peak_rss_bytes"] for run in runs)
    row["others_cpu_pct"] = round(
        max(100 * run["others_s"] / (run["wall_s"] * cpu_count) for run in runs), 1
    )
    for note in sorted({note for run in runs for note in run["notes"]}):
        row[note] = round(statistics.median(run["notes"][note] for run in runs), 3)
    return row


def judged(target: Target, runs: Runs) -> dict[str, Any]:
    """A target and what became of it."""
    ratios = [
        cpu_s_per_gb(one) / cpu_s_per_gb(other)
        for one, other in zip(runs[target.engine], runs[target.against], strict=True)
    ]
    got = statistics.median(ratios)
    return {
        "target": f"CPU of {target.engine} <= {target.ratio_max:g} x {target.against}",
        "got": round(got, 3),
        "got_min": round(min(ratios), 3),
        "got_max": round(max(ratios), 3),
        "passed": got <= target.ratio_max,
    }


def missed(result: Result) -> list[dict[str, Any]]:
    """The targets that were not met."""
    return [target for target in result["targets"] if not target["passed"]]


def closing_lines(result: Result) -> list[str]:
    """What follows the table."""
    lines = [f"skipped {entry['engine']}: {entry['reason']}" for entry in result["skipped"]]
    for target in result["targets"]:
        word = "met" if target["passed"] else "MISSED"
        lines.append(
            f"{word}: {target['target']}: {target['got']:.2f} "
            f"({target['got_min']:.2f} to {target['got_max']:.2f})"
        )
    disturbed = [row["engine"] for row in result["rows"] if row["others_cpu_pct"] > DISTURBED_PCT]
    if disturbed:
        lines.append(
            "other programs were using the CPUs: GB/s and lateness are too bad, CPU-s/GB somewhat "
            f"too high, of {', '.join(disturbed)}"
        )
    return lines


_HEADERS = (
    "engine", "GB/s", "min-max", "CPU-s/GB", "min-max", "user", "system", "server",
    "timer late\np50 / p99 / max ms", "peak\nMB",
)  # fmt: skip
_PIPED_WIDTH = 120


def print_result(result: Result) -> None:
    """Print a result to standard output."""
    from rich import box  # noqa: PLC0415 only where something is shown
    from rich.table import Table  # noqa: PLC0415 likewise

    from gpufeed.bench.progress import table_console  # noqa: PLC0415 likewise

    console = table_console(_PIPED_WIDTH)
    table = Table(
        title=_title(result),
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for number, header in enumerate(_HEADERS):
        table.add_column(header, justify="left" if number == 0 else "right", no_wrap=True)
    for row in result["rows"]:
        style = "bold" if row["engine"].startswith("gpufeed") else ""
        table.add_row(*_cells(row), style=style)
    console.print(table)
    for line in closing_lines(result):
        console.print(line, markup=False)


def _title(result: Result) -> str:
    server, client = result["server_cpus"], result["client_cpus"]
    pinned = f"server on CPU {server[0]}, engine on {', '.join(map(str, client))}"
    return (
        f"{result['size_bytes'] / GB:.2f} GB in {result['objects']} objects, requests of "
        f"{result['part_bytes'] / MB:.1f} MB, {result['connections']} connections; {pinned}\n"
        f"{result['source']}"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    def spread(name: str, form: str) -> str:
        return f"{row[f'{name}_min']:{form}}-{row[f'{name}_max']:{form}}"

    late = "-"
    if "lateness_ms_p50" in row:
        late = " / ".join(f"{row[f'lateness_ms_{name}']:.1f}" for name in ("p50", "p99", "max"))
    server = row["server_s_per_gb"]
    return [
        row["engine"],
        f"{row['gb_per_s']:.2f}",
        spread("gb_per_s", ".2f"),
        f"{row['cpu_s_per_gb']:.3f}",
        spread("cpu_s_per_gb", ".2f"),
        f"{row['user_s_per_gb']:.2f}",
        f"{row['system_s_per_gb']:.2f}",
        "-" if server is None else f"{server:.2f}",
        late,
        f"{row['peak_rss_bytes'] / MB:.0f}",
    ]
