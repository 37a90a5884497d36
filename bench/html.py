"""The report as one HTML page that needs nothing but itself: inline style, inline SVG, no script.

Verdict and money first, then the table, then the plots, then how it was measured. Everything that
comes from a result is escaped: results are files that people send each other.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

from gpufeed.bench import report
from gpufeed.bench.charts import Bar, Mark, Series, Strip, bar_chart, distribution, timeline

_COLOURS = (
    "loose-http", "loose-ossfs", "webdataset-direct", "ceiling", "gpufeed", "gpufeed-loose",
)  # fmt: skip
# The timeline shows this much of each epoch: some forty steps.
TIMELINE_SPAN_S = 6.0

Row = Mapping[str, Any]
e = html.escape


def page(result: report.Result) -> str:
    """The whole page of a validated result."""
    style = resources.files("gpufeed.bench").joinpath("page.css").read_text(encoding="utf-8")
    rows = result["rows"]
    parts = [
        _header(result),
        _section("Before and after", _TABLE_ABOUT, _table(rows)),
        _targets(result),
        _section("Accelerator utilisation", _AU_ABOUT, _utilisation(rows)),
        _section("The first seconds, step by step", _TIMELINE_ABOUT, _timeline(rows)),
        _section("How long a step waits for its input", _CDF_ABOUT, _distribution(result)),
        _section("Throughput against demand", _RATE_ABOUT, _throughput(result)),
        _section("Requests at the origin", _REQUESTS_ABOUT, _requests(rows)),
        _section("How it was measured", "", _method(result)),
    ]
    title = "cachebench: how well the accelerator was fed"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head><body><main>"
        f"{''.join(part for part in parts if part)}{_footer(result)}</main></body></html>\n"
    )


_TABLE_ABOUT = (
    "All contenders train on the same images with the same decoding, batch size, workers and step. "
    "Cold is the first epoch with nothing cached, warm the next one."
)
_AU_ABOUT = (
    "Share of the time in which the accelerator computes, from the first batch on. "
    "Cold epochs are drawn paler."
)
_TIMELINE_ABOUT = "Each epoch from its start: what the accelerator did, to scale."
_CDF_ABOUT = (
    "Share of steps that got their batch within a given time. A curve far to the left is a "
    "loader that was ready; the dashed line is the length of one step."
)
_RATE_ABOUT = (
    "Samples per second over the whole epoch, its start included. The dashed line is what the "
    "accelerator asks for; nothing can pass it."
)
_REQUESTS_ABOUT = "Requests to object storage for every 1,000 samples trained on."


def _section(title: str, about: str, body: str) -> str:
    if not body:
        return ""
    text = f'<p class="about">{e(about)}</p>' if about else ""
    return f"<section><h2>{e(title)}</h2>{text}{body}</section>"


def _label(row: Row) -> str:
    return f"{row['name']}, {row['phase']}" if row["name"].startswith("gpufeed") else row["name"]


def _colour(row: Row) -> str:
    name = row["name"] if row["name"] in _COLOURS else "other"
    faded = row["phase"] == "cold" and str(row["name"]).startswith("gpufeed")
    return f"{name} cold" if faded else str(name)


def _header(result: report.Result) -> str:
    rows, money = result["rows"], result.get("cost")
    pair = report.before_and_after(rows)
    figures = []
    if pair:
        before, after = pair
        figures = [
            (f"Utilisation with {before['name']}", f"{before['au_pct']:.0f} %", "of the time"),
            (f"Utilisation with {after['name']}", f"{after['au_pct']:.0f} %", "once warm"),
        ]
        ratio = after["samples_per_s"] / max(before["samples_per_s"], 1e-9)
        figures.append(("Training speed", f"{ratio:.1f} x", "samples per second"))
    if money:
        price = f"{money['gpus']} GPUs at {money['gpu_price_per_hour']:.2f} an hour each"
        figures.append(("Idle GPU time saved", f"{money['saved_per_hour']:.2f} / h", price))
    boxes = "".join(
        f"<div><dt>{e(name)}</dt><dd>{e(value)}<small>{e(note)}</small></dd></div>"
        for name, value, note in figures
    )
    sentence = report.cost_sentence(money)
    lead = f'<p class="lead">{e(sentence)}</p>' if sentence else ""
    return (
        '<header><p class="kicker">cachebench report</p>'
        f"<h1>{_unbroken(str(result.get('verdict') or report.verdict(rows)))}</h1>{lead}"
        f'<dl class="figures">{boxes}</dl></header>'
    )


def _unbroken(text: str) -> str:
    """Escaped, with numbers and their percent signs kept on one line."""
    return e(text).replace(" %", "&nbsp;%")


_CHECKS = {
    "exactly_once": "Every epoch of every contender had each sample exactly once",
    "bytes_equal": "The bytes of every sample equal the source (CRC-64 of each image)",
    "warm_epoch_without_origin_requests": "gpufeed's warm epochs made no request to the origin",
}


def _targets(result: report.Result) -> str:
    lines = [
        (_CHECKS.get(name, name), "", bool(passed))
        for name, passed in result.get("checks", {}).items()
    ]
    lines += [
        (str(target["target"]), str(target["got"]), bool(target["passed"]))
        for target in result.get("targets", [])
    ]
    if not lines:
        return ""
    body = "".join(
        f'<tr><td class="words">{e(text)}</td><td>{e(got)}</td>'
        f'<td class="{"yes" if passed else "no"}">{"yes" if passed else "no"}</td></tr>'
        for text, got, passed in lines
    )
    table = (
        '<div class="scroll"><table><thead><tr><th scope="col" class="words">What was promised'
        f'</th><th scope="col">measured</th><th scope="col">kept</th></tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
    return _section("Promises", "Checked by this run, on this machine.", table)


_Cell = Callable[[Row], str]
_COLUMNS: tuple[tuple[str, str | None, _Cell], ...] = (
    ("epoch", None, lambda row: str(row["phase"])),
    ("utilisation", "au_pct", lambda row: f"{row['au_pct']:.1f} %"),
    ("samples/s", "samples_per_s", lambda row: f"{row['samples_per_s']:,.0f}"),
    ("stall", "stall_s", lambda row: f"{row['stall_s']:.2f} s"),
    ("first batch", "first_batch_s", lambda row: f"{row['first_batch_s']:.2f} s"),
    ("wait p95", "wait_p95_ms", lambda row: _maybe(row, "wait_p95_ms", "{:.1f} ms")),
    ("CPU s per 1k", "cpu_s_per_1k", lambda row: _maybe(row, "cpu_s_per_1k", "{:.2f}")),
    ("origin requests", None, lambda row: f"{row['origin_requests']:,}"),
    ("origin MB", None, lambda row: f"{row['origin_bytes'] / 1e6:,.0f}"),
    ("samples", None, lambda row: _maybe(row, "samples", "{:,}")),
)


def _maybe(row: Row, name: str, form: str) -> str:
    """A field as text; a number that was not measured is a dash, not 0."""
    value = row.get(name)
    return "-" if value is None else form.format(value)


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f'<th scope="col">{e(name)}</th>' for name, _, _ in _COLUMNS)
    body = []
    for row in rows:
        cells = "".join(
            f"<td>{e(cell(row))}{_spread(row, field)}</td>" for _, field, cell in _COLUMNS
        )
        kind = ' class="after"' if str(row["name"]).startswith("gpufeed") else ""
        dot = f'<span class="dot {e(_colour(row))}"></span>'
        body.append(f'<tr{kind}><th scope="row">{dot}{e(str(row["name"]))}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col">loader</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _spread(row: Row, field: str | None) -> str:
    spread = row.get("spread", {}).get(field) if field else None
    if not spread:
        return ""
    return f'<small class="spread">{spread[0]:,.1f} to {spread[1]:,.1f}</small>'


def _utilisation(rows: Sequence[Row]) -> str:
    bars = [Bar(_label(row), row["au_pct"], f"{row['au_pct']:.1f} %", _colour(row)) for row in rows]
    return bar_chart(bars, title="Accelerator utilisation in percent by loader", most=100.0)


def _timeline(rows: Sequence[Row]) -> str:
    strips = [
        Strip(
            _label(row),
            [wait / 1e3 for wait in row["waits_ms"]],
            [compute / 1e3 for compute in row["computes_ms"]],
            f"{row['au_pct']:.0f} %",
        )
        for row in rows
        if row.get("waits_ms")
    ]
    if not strips:
        return ""
    longest = max(sum(strip.waits_s) + sum(strip.computes_s) for strip in strips)
    span = max(min(TIMELINE_SPAN_S, longest), 0.01)
    legend = (
        '<p class="legend"><i class="compute"></i><span>computes</span>'
        '<i class="wait"></i><span>waits for input</span></p>'
    )
    title = "Computing and waiting in the first seconds of each epoch"
    return legend + timeline(strips, title=title, span_s=span)


def _distribution(result: report.Result) -> str:
    series = [
        Series(_label(row), row["waits_ms"][1:], _line_colour(row))
        for row in result["rows"]
        if len(row.get("waits_ms", ())) > 1
    ]
    if not series:
        return ""
    marks = [Mark(float(result["step_ms"]), "one step")] if result["step_ms"] else []
    title = "Cumulative share of steps by input wait in milliseconds, first batch left out"
    return distribution(series, title=title, marks=marks)


def _line_colour(row: Row) -> str:
    return _colour(row).replace(" cold", " dashed")


def _throughput(result: report.Result) -> str:
    rows, demand = result["rows"], result.get("demand_samples_per_s")
    most = max([float(demand or 0), *(float(row["samples_per_s"]) for row in rows)], default=0.0)
    bars = [
        Bar(_label(row), row["samples_per_s"], f"{row['samples_per_s']:,.0f}", _colour(row))
        for row in rows
    ]
    marks = [Mark(float(demand), f"demand {demand:,.0f}")] if demand else []
    return bar_chart(bars, title="Samples per second by loader", most=most * 1.02, marks=marks)


def _requests(rows: Sequence[Row]) -> str:
    bars = []
    for row in rows:
        if row["name"] != "ceiling" and row.get("samples"):
            rate = 1e3 * row["origin_requests"] / row["samples"]
            text = f"{rate:,.1f}" if 0 < rate < 10 else f"{rate:,.0f}"
            bars.append(Bar(_label(row), rate, text, _colour(row)))
    if not bars:
        return ""
    most = max([1.0, *(bar.value for bar in bars)])
    return bar_chart(bars, title="Origin requests per 1,000 samples by loader", most=most)


def _method(result: report.Result) -> str:
    lines = [*_method_of_run(result), *_method_of_machine(result.get("environment", {}))]
    lines += [
        (f"Skipped: {entry.get('name')}", str(entry.get("reason")))
        for entry in result.get("skipped", [])
    ]
    body = "".join(f"<dt>{e(name)}</dt><dd>{e(text)}</dd>" for name, text in lines if text)
    return f'<dl class="method">{body}</dl>'


def _method_of_run(result: report.Result) -> list[tuple[str, str]]:
    origin, data = result["origin"], result.get("data", {})
    short = sorted(
        {
            f"{row['name']} {row['samples']:,}"
            for row in result["rows"]
            if row.get("samples") and row["samples"] < data.get("samples", 0)
        }
    )
    known = result.get("contenders", {})
    ran = dict.fromkeys(row["name"] for row in result["rows"])
    return [
        (
            "Window",
            "Utilisation = compute / (compute + wait), from the moment the first batch is in hand "
            "to the end of the last step. Samples/s and first batch also count the start: making "
            "the loader and starting its workers. Imports are not counted.",
        ),
        ("Accelerator", _accelerator(result)),
        ("Step", f"{result['step_ms']} ms a batch: {result.get('step_reason', '')}"),
        (
            "Origin",
            f"An OSS stand-in on this machine: {origin['first_byte_ms']} ms to the first byte, "
            f"{origin['mb_per_s_per_connection']} MB/s a connection. Requests and bytes are the "
            "stand-in's own counts.",
        ),
        (
            "Data",
            f"{data.get('samples', 0):,} JPEGs of {data.get('image_bytes_mean', 0) / 1e3:.0f} kB "
            f"on average, {data.get('shards')} tar shards and the same images as loose objects, "
            f"seed {data.get('seed')}."
            if data
            else "",
        ),
        ("Shortened epochs", ", ".join(short) and f"{', '.join(short)} samples (they are slow)"),
        (
            "Workers, batch",
            f"{result['workers']} processes, batches of {result.get('batch_size', '?')}",
        ),
        (
            "Repetitions",
            f"{result['repeats']}; medians, with lowest and highest below them"
            if result.get("repeats", 1) > 1
            else "one run of each: differences of a point or two are noise",
        ),
        ("Other programs", _others(result["rows"])),
        ("Contenders", "; ".join(f"{name}: {known[name]}" for name in ran if name in known)),
    ]


def _others(rows: Sequence[Row]) -> str:
    shares = [row["others_cpu_pct"] for row in rows if "others_cpu_pct" in row]
    if not shares:
        return "not measured"
    text = f"used at most {max(shares):.0f} % of the CPUs during an epoch"
    disturbed = report.disturbed(rows)
    return text + (f"; do not trust {', '.join(disturbed)}" if disturbed else "")


def _accelerator(result: report.Result) -> str:
    if result.get("compute") == "cuda":
        return "CUDA: the batch is copied to the device and a kernel spins for the step."
    return (
        "Emulated: a sleep to an absolute deadline that frees the CPU. The copy to a device is not "
        "included. This is not an MLPerf result."
    )


def _method_of_machine(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not machine:
        return []
    memory = machine.get("memory_bytes")
    packages = machine.get("packages", {})
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    load = machine.get("load_average") or ["unknown"]
    return [
        (
            "Machine",
            f"{machine.get('cpu') or 'unknown CPU'}, {machine.get('cpus_usable')} CPUs, "
            f"{memory / 2**30:.0f} GiB, Linux {machine.get('kernel')}, load {load[0]} at the start"
            if memory
            else "unknown",
        ),
        ("Software", f"Python {machine.get('python')}, {versions}"),
        ("LD_PRELOAD", str(machine.get("ld_preload") or "not set")),
        ("Commit", str(machine.get("git_commit") or "not a git checkout")),
        ("Page cache", str(machine.get("page_cache") or "unknown")),
    ]


def _footer(result: report.Result) -> str:
    made = result.get("made_at")
    when = f"Made {e(str(made))}. " if made else ""
    return (
        f"<footer>{when}The numbers are in the result's JSON file; this page draws them.</footer>"
    )
