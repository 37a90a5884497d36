"""The result on a terminal: one table, the promises that were not kept, the verdict, the cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpufeed.bench import report

# Header, and the terminal width from which on the column is shown.
_COLUMNS = (
    ("loader", 0), ("epoch", 0), ("utilised", 0), ("samples\n/s", 0), ("stall", 0),
    ("first\nbatch", 0), ("p95\nwait", 100), ("CPU s\nper 1k", 100), ("origin\nGETs", 0),
    ("origin\nMB", 0), ("samples", 100),
)  # fmt: skip
_PIPED_WIDTH = 120


def print_result(result: report.Result) -> None:
    """Print a validated result to standard output."""
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
    shown = [number for number, (_, width) in enumerate(_COLUMNS) if console.width >= width]
    for number in shown:
        justify: Any = "left" if number < 2 else "right"
        table.add_column(_COLUMNS[number][0], justify=justify, no_wrap=True)
    for row in result["rows"]:
        style = "bold" if str(row["name"]).startswith("gpufeed") else ""
        cells = _cells(row)
        table.add_row(*(cells[number] for number in shown), style=style)
    console.print(table)
    for line in closing_lines(result):
        console.print(line, markup=False)


def _title(result: report.Result) -> str:
    origin = result["origin"]
    return (
        f"step {result['step_ms']} ms, batch {result.get('batch_size', '?')}, "
        f"{result['workers']} workers; origin {origin['first_byte_ms']} ms to the first byte, "
        f"{origin['mb_per_s_per_connection']} MB/s a connection"
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    def maybe(name: str, form: str) -> str:
        return form.format(row[name]) if row.get(name) is not None else "-"

    return [
        str(row["name"]),
        str(row["phase"]),
        f"{row['au_pct']:.1f} %",
        f"{row['samples_per_s']:,.0f}",
        f"{row['stall_s']:.2f} s",
        f"{row['first_batch_s']:.2f} s",
        maybe("wait_p95_ms", "{:,.1f} ms"),
        maybe("cpu_s_per_1k", "{:.2f}"),
        f"{row['origin_requests']:,}",
        f"{row['origin_bytes'] / 1e6:,.0f}",
        maybe("samples", "{:,}"),
    ]


def closing_lines(result: report.Result) -> list[str]:
    """What follows the table: failed checks, missed targets, verdict, cost."""
    lines = [f"FAILED CHECK: {name}" for name in failed_checks(result)]
    missed = [target for target in result.get("targets", []) if not target["passed"]]
    kept = len(result.get("targets", [])) - len(missed)
    if result.get("targets"):
        lines.append(f"{kept} of {len(result['targets'])} targets met on this machine")
    lines += [f"  missed: {target['target']} ({target['got']})" for target in missed]
    if rows := report.disturbed(result["rows"]):
        lines.append(f"other programs were using the CPUs: do not trust {', '.join(rows)}")
    lines += ["", str(result.get("verdict") or report.verdict(result["rows"]))]
    if sentence := report.cost_sentence(result.get("cost")):
        lines.append(sentence)
    return lines


def failed_checks(result: report.Result) -> list[str]:
    """Names of the correctness checks that failed."""
    return [name for name, passed in result.get("checks", {}).items() if not passed]
