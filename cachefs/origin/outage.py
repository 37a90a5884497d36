"""An origin that is down: who may ask it, who waits, and who is woken.

`gpufeed.cachefs.origin.health` decides; this file guards it with a lock, tells it the time, keeps
the metric and the log, and lets calls of any thread wait.

Invariant: where somebody waits, there is a probe under way, whose end wakes the next, or a timer
for it. One timer serves all who wait.

Threads: any with a running loop. The lock is held for arithmetic only, never across an await.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from gpufeed.cachefs.clock import Clock, SystemClock
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.health import OriginHealth

_LOG = logging.getLogger("gpufeed.origin")
# Later than the moment that it is set for, lest rounding wakes somebody too early.
PROBE_SLACK_S = 0.005


class Outage:
    """See the top of the file.

    Args:
        name: of the origin, for the log.
        metrics: for the gauges.
        clock: monotonic seconds.
    """

    def __init__(self, name: str, metrics: Metrics, clock: Clock | None = None) -> None:
        self._name = name
        self._metrics = metrics
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._health = OriginHealth(self._clock.monotonic_s())
        self._parked: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self._timer_set = False
        self._last_failure = ""

    # --- what attempts teach ------------------------------------------------------------------

    def succeeded(self) -> None:
        """An attempt was answered, be it with a refusal."""
        health = self._health
        if health.is_spotless:  # read without the lock, since it is so nearly always
            return
        with self._lock:
            now_s, since_s = self._clock.monotonic_s(), health.since_s
            if not health.succeeded(now_s):
                return
            parked, self._parked = self._parked, {}
        self._metrics.add("origin_degraded", -1)
        _LOG.warning("%s answers again, after %.1f s", self._name, now_s - since_s)
        for future, loop in parked.items():
            with contextlib.suppress(RuntimeError):  # its loop has ended, and so has who waited
                loop.call_soon_threadsafe(self._wake, future)

    def failed(self, what: str, *, probe: bool) -> None:
        """An attempt was not answered; `probe`: it was the one that `admitted` let out."""
        with self._lock:
            self._last_failure = what
            degraded = self._health.failed(self._clock.monotonic_s(), probe=probe)
            self._set_timer()
        if degraded:
            self._metrics.add("origin_degraded")
            _LOG.warning(
                "%s does not answer (last: %s); it is probed from time to time until it does",
                self._name, what,
            )  # fmt: skip

    def probe_ended(self) -> None:
        """The probe ended without a verdict; the next one's turn has come."""
        with self._lock:
            self._health.probe_ended(self._clock.monotonic_s())
        self._wake_one()

    def close(self) -> None:
        """Take it out of the gauge; nobody waits."""
        if self._health.state != "healthy":
            self._metrics.add("origin_degraded", -1)

    # --- waiting ------------------------------------------------------------------------------

    @property
    def trouble(self) -> str:
        """For messages: what is wrong with the origin at the moment; empty if nothing is."""
        with self._lock:
            if self._health.state == "healthy":
                return ""
            down_s = self._clock.monotonic_s() - self._health.since_s
            return f"it has not answered for {down_s:.0f} s, last with {self._last_failure}"

    async def admitted(self, waits: Callable[[], None]) -> bool:
        """Wait until an attempt may go out. True: it is the probe, and its end must be told.

        `waits` is called before a wait, if there is one.
        """
        # Read without the lock: who comes just as an origin fails is one attempt more, no harm.
        if self._health.state == "healthy":
            return False
        waits()
        while True:
            with self._lock:
                admission = self._health.admit(self._clock.monotonic_s())
                if admission != "wait":
                    return admission == "probe"
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._parked[future] = loop
                self._set_timer()
            await self._woken(future)

    async def _woken(self, future: asyncio.Future[None]) -> None:
        self._metrics.add("origin_waiting")
        try:
            await future
        except asyncio.CancelledError:
            with self._lock:
                self._parked.pop(future, None)
            if future.done() and not future.cancelled():
                self._wake_one()  # the turn was ours, and we do not take it
            raise
        finally:
            self._metrics.add("origin_waiting", -1)

    def _set_timer(self) -> None:
        """See to it that somebody probes when the time has come. The lock is held."""
        if self._timer_set or not self._parked or self._health.state != "degraded":
            return
        self._timer_set = True
        after_s = self._health.probe_at_s - self._clock.monotonic_s() + PROBE_SLACK_S
        asyncio.get_running_loop().call_later(max(0.0, after_s), self._probe_is_due)

    def _probe_is_due(self) -> None:
        with self._lock:
            self._timer_set = False
        self._wake_one()

    def _wake_one(self) -> None:
        """Let the one who has waited longest look again."""
        while True:
            with self._lock:
                if not self._parked:
                    return
                future = next(iter(self._parked))
                loop = self._parked.pop(future)
            try:
                loop.call_soon_threadsafe(self._wake, future)
            except RuntimeError:  # its loop has ended, and so has who waited
                continue
            return

    def _wake(self, future: asyncio.Future[None]) -> None:
        if future.done():
            self._wake_one()  # it has gone; the turn is the next one's
        else:
            future.set_result(None)
