"""How late a timer of the loop that serves sessions is, while bytes are received beside it.

A timer is set every `PERIOD_S`; its lateness is how long after its time it ran. A loop that never
waits for disk or network is late by what the machine takes away from it, and no more.
"""

from __future__ import annotations

import asyncio
import time

from gpufeed.bench.measure import quantile

PERIOD_S = 0.010
SAMPLES_MAX = 1_000_000


class TimerLateness:
    """Measures the running loop between `start` and `stop`; may be started again."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; on the loop."""
        self._set(asyncio.get_running_loop())

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not the loop's own clock: uvloop's counts in whole milliseconds.
        due_s = time.monotonic() + PERIOD_S
        self._timer = loop.call_later(PERIOD_S, self._ran, loop, due_s)

    def _ran(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        if len(self._late_s) < SAMPLES_MAX:
            self._late_s.append(max(0.0, time.monotonic() - due_s))
        self._set(loop)

    def stop(self) -> None:
        """End."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def milliseconds(self) -> dict[str, float]:
        """Median, 99th percentile and maximum; empty if no timer ever ran."""
        if not self._late_s:
            return {}
        return {
            "lateness_ms_p50": round(1e3 * quantile(self._late_s, 0.50), 3),
            "lateness_ms_p99": round(1e3 * quantile(self._late_s, 0.99), 3),
            "lateness_ms_max": round(1e3 * max(self._late_s), 3),
        }
