"""What the rounds of ``cachebench share`` say together: medians, spread, targets, a table.

Pure, but for `print_result`. Ratios are taken within a round, where both sides ran one right after
the other, and the median of the rounds counts. ``GB`` is 10^9 bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gpufeed.cachefs.units import GB

Result = dict[str, Any]
VERSION = 1
_PIPED_WIDTH = 120
# name in the summary, what it is, its limit, whether more is better
TARGETS = (
    ("daemon_cpu_s_per_gb", "daemon CPU for a GB of arena hits", 0.02, False),
    ("throughput_ratio", "arena hits / plain shared mapping", 0.9, True),
    ("nvme_ratio", "NVMe hits / bare O_DIRECT", 0.9, True),
    ("wakeup_ratio", "publish to wake-up / bare ping-pong", 1.5, False),
)

# In the summary without a target.
ALSO = ("throughput_mapped_ratio", "daemon_cpu_mapped_s_per_gb", "wakeup_ratio_p99")


def gb_per_s(readers: Sequence[Mapping[str, Any]], reading: str) -> float:
    """What they read together, from the first one's start to the last one's end.

    All processes have the same clock.
    """
    runs = [reader[reading] for reader in readers]
    span_s = max(run["ended_s"] for run in runs) - min(run["began_s"] for run in runs)
    return float(sum(run["bytes"] for run in runs) / span_s / GB)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies."""
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])


def assemble(rounds: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Result:
    """The result of all rounds. Each has ``hits, plain, daemon_cpu_s, nvme, bare, wake, ping``."""
    rows = []
    for one in rounds:
        hits_bytes = sum(reader["first"]["bytes"] for reader in one["hits"])
        wake, ping = one["wake"]["took_us"], one["ping"]["took_us"]
        row = {
            "hits_gb_per_s": gb_per_s(one["hits"], "first"),
            "plain_gb_per_s": gb_per_s(one["plain"], "first"),
            "hits_mapped_gb_per_s": gb_per_s(one["hits"], "again"),
            "plain_mapped_gb_per_s": gb_per_s(one["plain"], "again"),
            "nvme_gb_per_s": gb_per_s(one["nvme"], "first"),
            "bare_gb_per_s": gb_per_s(one["bare"], "first"),
            "daemon_cpu_s_per_gb": one["daemon_cpu_s"]["first"] / hits_bytes * GB,
            "daemon_cpu_mapped_s_per_gb": one["daemon_cpu_s"]["again"] / hits_bytes * GB,
            "wake_us": [statistics.median(wake), percentile(wake, 0.99)],
            "ping_us": [statistics.median(ping), percentile(ping, 0.99)],
        }
        row["throughput_ratio"] = row["hits_gb_per_s"] / row["plain_gb_per_s"]
        row["throughput_mapped_ratio"] = row["hits_mapped_gb_per_s"] / row["plain_mapped_gb_per_s"]
        row["nvme_ratio"] = row["nvme_gb_per_s"] / row["bare_gb_per_s"]
        row["wakeup_ratio"] = row["wake_us"][0] / row["ping_us"][0]
        row["wakeup_ratio_p99"] = row["wake_us"][1] / row["ping_us"][1]
        rows.append(row)
    names = [name for name, *_ in TARGETS] + list(ALSO)
    summary = {name: statistics.median(row[name] for row in rows) for name in names}
    targets = [
        {
            "name": name, "what": what, "limit": limit, "value": summary[name],
            "spread": [min(row[name] for row in rows), max(row[name] for row in rows)],
            "met": summary[name] >= limit if more else summary[name] <= limit,
        }
        for name, what, limit, more in TARGETS
    ]  # fmt: skip
    return {
        "version": VERSION, "settings": dict(settings), "summary": summary, "targets": targets,
        "rounds": rows,
    }  # fmt: skip


def print_result(result: Result) -> None:
    """The table on standard output."""
    from rich.table import Table  # noqa: PLC0415 rich only where something is shown

    from gpufeed.bench.progress import table_console  # noqa: PLC0415 likewise

    console = table_console(_PIPED_WIDTH)
    rounds = Table(title="rounds", title_justify="left")
    for heading in (
        "arena GB/s (mapped)", "plain GB/s (mapped)", "NVMe GB/s", "O_DIRECT GB/s",
        "daemon CPU-s/GB", "wake-up us (p99)", "ping-pong us (p99)",
    ):  # fmt: skip
        rounds.add_column(heading, justify="right")
    for row in result["rounds"]:
        rounds.add_row(
            f"{row['hits_gb_per_s']:.2f} ({row['hits_mapped_gb_per_s']:.1f})",
            f"{row['plain_gb_per_s']:.2f} ({row['plain_mapped_gb_per_s']:.1f})",
            f"{row['nvme_gb_per_s']:.2f}", f"{row['bare_gb_per_s']:.2f}",
            f"{row['daemon_cpu_s_per_gb']:.4f}",
            "{:.0f} ({:.0f})".format(*row["wake_us"]), "{:.0f} ({:.0f})".format(*row["ping_us"]),
        )  # fmt: skip
    console.print(rounds)
    table = Table(title="targets: median of the rounds", title_justify="left")
    for heading in ("", "median", "from", "to", "wanted", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    for (_, _, _, more), target in zip(TARGETS, result["targets"], strict=True):
        low, high = target["spread"]
        table.add_row(
            target["what"], f"{target['value']:.3f}", f"{low:.3f}", f"{high:.3f}",
            f"{'>=' if more else '<='} {target['limit']:g}", "met" if target["met"] else "missed",
        )  # fmt: skip
    console.print(table)
