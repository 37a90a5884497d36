"""The report's plots as SVG text: bars, step timelines, cumulative distributions. Pure.

Colours are classes that the page's style sheet defines for light and dark; a chart never relies on
colour alone, every mark is labelled. Each ``<svg>`` has a title that says what it shows. Text that
comes from data is escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 920
LABEL_WIDTH = 190
_VALUE_WIDTH = 120
_ROW_HEIGHT = 30
_BAR_HEIGHT = 18
_AXIS_HEIGHT = 34
_CDF_HEIGHT = 300
_CDF_LEFT = 48
_CDF_RIGHT = 200
_STRIP_HEIGHT = 16
_LABEL_GAP = 15


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: what it is called, its value, how that is written, and its colour class."""

    label: str
    value: float
    text: str
    colour: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line across a bar chart."""

    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Strip:
    """The first seconds of one epoch, step by step: seconds of wait and of compute in turn."""

    label: str
    waits_s: Sequence[float]
    computes_s: Sequence[float]
    text: str


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a distribution: its values in milliseconds."""

    label: str
    values_ms: Sequence[float]
    colour: str


def _svg(height: float, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(title)}">'
        f"<title>{html.escape(title)}</title>{''.join(body)}</svg>"
    )


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{html.escape(text)}</text>'


def bar_chart(bars: Sequence[Bar], *, title: str, most: float, marks: Sequence[Mark] = ()) -> str:
    """Horizontal bars on a scale from 0 to `most`, with labelled lines across them."""
    left, right = LABEL_WIDTH, WIDTH - _VALUE_WIDTH
    scale = (right - left) / most if most > 0 else 0.0
    top = 24 if marks else 4
    bottom = top + _ROW_HEIGHT * len(bars)
    body = [f'<line class="axis" x1="{left}" x2="{left}" y1="{top}" y2="{bottom}"/>']
    for number, bar in enumerate(bars):
        y = top + _ROW_HEIGHT * number + (_ROW_HEIGHT - _BAR_HEIGHT) / 2
        width = min(max(bar.value, 0.0), most) * scale
        base = y + _BAR_HEIGHT - 4.5
        body.append(_text(left - 10, base, bar.label, ' class="label" text-anchor="end"'))
        if bar.value > 0:
            body.append(
                f'<rect class="{bar.colour}" x="{left}" y="{y:.1f}" width="{max(width, 1.0):.1f}" '
                f'height="{_BAR_HEIGHT}" rx="2"/>'
            )
        # Beside the bar, or in a column of their own where a line could run through them.
        beside = right if marks else left + width
        body.append(_text(beside + 10, base, bar.text, ' class="value"'))
    for mark in marks:
        if 0 <= mark.value <= most:
            x = left + mark.value * scale
            body.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="18" y2="{bottom}"/>')
            body.append(_text(x, 12, mark.text, ' class="note" text-anchor="middle"'))
    return _svg(bottom + 4, title, body)


def timeline(strips: Sequence[Strip], *, title: str, span_s: float) -> str:
    """Wait and compute of each epoch's first `span_s` seconds, all on one time axis."""
    left, right = LABEL_WIDTH, WIDTH - _VALUE_WIDTH
    scale = (right - left) / span_s
    bottom = 4 + _ROW_HEIGHT * len(strips)
    body = []
    for number, strip in enumerate(strips):
        y = 4 + _ROW_HEIGHT * number + (_ROW_HEIGHT - _STRIP_HEIGHT) / 2
        waits, computes = _strip_paths(strip, left, y, scale, span_s)
        base = y + _STRIP_HEIGHT - 3.5
        body.append(_text(left - 10, base, strip.label, ' class="label" text-anchor="end"'))
        body.append(f'<path class="wait" d="{waits}"/><path class="compute" d="{computes}"/>')
        body.append(_text(right + 8, base, strip.text, ' class="value"'))
    body += _seconds_axis(left, bottom, scale, span_s)
    return _svg(bottom + _AXIS_HEIGHT, title, body)


def _strip_paths(
    strip: Strip, left: float, y: float, scale: float, span_s: float
) -> tuple[str, str]:
    """The two paths of a strip: one rectangle a wait, one a compute, cut at the span."""
    paths: tuple[list[str], list[str]] = ([], [])
    at = 0.0
    for pair in zip(strip.waits_s, strip.computes_s, strict=True):
        for path, length in zip(paths, pair, strict=True):
            end = min(at + length, span_s)
            if end > at:
                x, width = left + at * scale, (end - at) * scale
                path.append(f"M{x:.1f} {y:.0f}h{width:.1f}v{_STRIP_HEIGHT}h-{width:.1f}z")
            at += length
        if at >= span_s:
            break
    return "".join(paths[0]), "".join(paths[1])


def _seconds_axis(left: float, top: float, scale: float, span_s: float) -> list[str]:
    step = _nice_step(span_s / 6)
    body = [
        f'<line class="axis" x1="{left}" x2="{left + span_s * scale:.1f}" y1="{top}" y2="{top}"/>'
    ]
    count = math.floor(span_s / step + 1e-9)
    for number in range(count + 1):
        x = left + number * step * scale
        body.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + 4}"/>')
        text = f"{number * step:g} s"
        body.append(_text(x, top + 18, text, ' class="note" text-anchor="middle"'))
    return body


def _nice_step(rough: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def distribution(series: Sequence[Series], *, title: str, marks: Sequence[Mark] = ()) -> str:
    """Cumulative share of steps by input wait, on a logarithmic axis from 0.1 ms."""
    low = 0.1
    high = max([1000.0, *(max(line.values_ms, default=0.0) for line in series)])
    decades = math.ceil(math.log10(high / low))
    left, right, top = _CDF_LEFT, WIDTH - _CDF_RIGHT, 22
    bottom = top + _CDF_HEIGHT
    scale = (right - left) / decades

    def x_of(value_ms: float) -> float:
        return left + scale * math.log10(max(value_ms, low) / low)

    body = _distribution_axes(left, right, top, bottom, decades)
    for mark in marks:
        x = x_of(mark.value)
        body.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        body.append(_text(x, top - 8, mark.text, ' class="note" text-anchor="middle"'))
    ends = []
    for line in series:
        if not line.values_ms:
            continue
        ordered = sorted(line.values_ms)
        points = [f"M{x_of(ordered[0]):.1f} {bottom}"]
        for number, value in enumerate(ordered, 1):
            y = bottom - _CDF_HEIGHT * number / len(ordered)
            points.append(f"H{x_of(value):.1f}V{y:.1f}")
        body.append(f'<path class="line {line.colour}" d="{"".join(points)}H{right}"/>')
        ends.append((line, ordered))
    body += _distribution_key(ends, right + 16, top)
    return _svg(bottom + _AXIS_HEIGHT, title, body)


def _distribution_axes(
    left: float, right: float, top: float, bottom: float, decades: int
) -> list[str]:
    body = []
    for percent in (0, 25, 50, 75, 100):
        y = bottom - (bottom - top) * percent / 100
        body.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y}" y2="{y}"/>')
        text = f"{percent} %"
        body.append(_text(left - 8, y + 4, text, ' class="note" text-anchor="end"'))
    for decade in range(decades + 1):
        x = left + (right - left) * decade / decades
        value = 10.0 ** (decade - 1)
        text = f"{value:g} ms" if value < 1000 else f"{value / 1000:g} s"
        body.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        body.append(_text(x, bottom + 18, text, ' class="note" text-anchor="middle"'))
    return body


def _distribution_key(
    lines: Sequence[tuple[Series, Sequence[float]]], x: float, top: float
) -> list[str]:
    body = []
    for number, (line, _) in enumerate(lines):
        y = top + 8 + number * (_LABEL_GAP + 6)
        body.append(
            f'<path class="line {line.colour}" d="M{x:.0f} {y:.0f}h22"/>'
            + _text(x + 30, y + 4, line.label, ' class="label"')
        )
    return body
