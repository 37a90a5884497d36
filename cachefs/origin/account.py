"""What all engine threads know together about one origin: limits, outage, what is usual there.

A service counts requests and bytes by account, so everything reached at one endpoint with one
access key shares one `Account`, whichever thread or bucket it is for. The decisions are made by
pure machines (`limits`, `hedge`, `rate`); this file guards them with a lock, tells them the time,
keeps the metrics and the log. The connection limit is divided among the threads, at least one each.

Threads: any. The lock is held for arithmetic only, never across an await.
"""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import dataclass

from gpufeed.cachefs.clock import Clock, SystemClock
from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.failure import Failure, FailureKind
from gpufeed.cachefs.origin.hedge import HedgePolicy, Progress
from gpufeed.cachefs.origin.limits import AdaptiveLimits, Limit, Maxima, Sign
from gpufeed.cachefs.origin.outage import Outage
from gpufeed.cachefs.origin.rate import TokenBucket

_LOG = logging.getLogger("gpufeed.origin")
# How an attempt fails at an origin that is down; an answer is judged by its status.
_DOWN_KINDS = frozenset(
    {FailureKind.CONNECT, FailureKind.LOST, FailureKind.STALL, FailureKind.MALFORMED}
)


@dataclass(frozen=True, slots=True)
class Times:
    """When an answered request's first byte came, and its last after that, in seconds."""

    first_byte_s: float
    body_s: float


class Account:
    """See the top of the file.

    Args:
        name: of the origin, for the log.
        config: the hard limits.
        metrics: for the gauges.
        threads_count: among how many threads connections are divided.
        clock: monotonic seconds.

    Attributes:
        outage: whether the origin answers at all, and who waits until it does.
    """

    def __init__(
        self,
        name: str,
        config: OriginConfig,
        metrics: Metrics,
        *,
        threads_count: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.outage = Outage(name, metrics, clock)
        self._metrics = metrics
        self._threads_count = threads_count
        self._clock = clock or SystemClock()
        now_s = self._clock.monotonic_s()
        self._lock = threading.Lock()
        self._maxima = Maxima(
            connections_count=config.connections_max,
            requests_per_s=config.requests_per_s_max,
            bytes_per_s=config.bytes_per_s_max or math.inf,
        )
        self._limits = AdaptiveLimits(self._maxima, now_s)
        self._requests = TokenBucket(config.requests_per_s_max, now_s)
        self._bytes = TokenBucket(config.bytes_per_s_max, now_s) if config.bytes_per_s_max else None
        pace = config.prefetch_bytes_per_s_max
        self._prefetch = TokenBucket(pace, now_s) if pace else None
        self._hedges = HedgePolicy(config.hedge_ratio_max)
        self._in_flight_count = 0
        self._was_cut = False
        self._shown = dict.fromkeys(_GAUGES, 0)
        self._cautions: set[str] = set()
        with self._lock:
            self._apply(now_s)

    # --- limits -------------------------------------------------------------------------------

    def connections_count(self, thread_index: int) -> int:
        """How many of the connections allowed at this moment are thread number so-and-so's."""
        if not self._limits.connections.is_cut:
            allowed = self._maxima.connections_count
        else:
            with self._lock:
                allowed = int(self._limits.connections.value(self._clock.monotonic_s()))
        return share(allowed, self._threads_count, thread_index)

    def begin(self, size_bytes: int) -> float:
        """A request for so many bytes may go out in so many seconds, which is returned.

        It counts as under way from now on: `answered`, `failed` or `given_up` follows.
        """
        with self._lock:
            now_s = self._clock.monotonic_s()
            self._in_flight_count += 1
            self._limits.sent(now_s)
            if self._was_cut:
                self._apply(now_s)
            wait_s = self._requests.reserve(now_s)
            if self._bytes is not None:
                wait_s = max(wait_s, self._bytes.reserve(now_s, size_bytes))
            return wait_s

    def missed(self, size_bytes: int) -> None:
        """What `begin` gave a turn to went away before it; `given_up` follows all the same."""
        with self._lock:
            self._requests.refund(1.0)
            if self._bytes is not None:
                self._bytes.refund(size_bytes)

    @property
    def paces_prefetch(self) -> bool:
        """Whether `prefetch_turn_s` means anything."""
        return self._prefetch is not None

    def prefetch_turn_s(self, size_bytes: int) -> float:
        """How many seconds until a prefetch of so many bytes may seek its place."""
        assert self._prefetch is not None, "prefetch is not paced"
        with self._lock:
            return self._prefetch.reserve(self._clock.monotonic_s(), size_bytes)

    def prefetch_missed(self, size_bytes: int) -> None:
        """Whoever had a turn by `prefetch_turn_s` went away before it."""
        assert self._prefetch is not None, "prefetch is not paced"
        with self._lock:
            self._prefetch.refund(size_bytes)

    def _apply(self, now_s: float) -> None:
        """Deal by the limits of this moment, and show them."""
        limits = self._limits
        requests_per_s = limits.requests_per_s.value(now_s)
        self._requests.set_rate(requests_per_s, now_s)
        bytes_per_s = limits.bytes_per_s.value(now_s)
        if math.isinf(bytes_per_s):
            self._bytes = None
        elif self._bytes is None:
            self._bytes = TokenBucket(bytes_per_s, now_s)
        else:
            self._bytes.set_rate(bytes_per_s, now_s)
        self._was_cut = limits.is_cut
        self._show(
            int(limits.connections.value(now_s)),
            round(requests_per_s),
            0 if math.isinf(bytes_per_s) else round(bytes_per_s),
        )

    def _show(self, *values: int) -> None:
        # Whole numbers: sums of others would not come back to zero.
        for name, value in zip(_GAUGES, values, strict=True):
            if value != self._shown[name]:
                self._metrics.add(name, value - self._shown[name])
                self._shown[name] = value

    # --- what attempts teach ------------------------------------------------------------------

    def answered(
        self, times: Times, size_bytes: int, status: int, *, sign: Sign | None, probe: bool
    ) -> None:
        """A request was answered, with what was asked for or with an error."""
        down = status >= 500 or status == 429
        with self._lock:
            now_s = self._clock.monotonic_s()
            at_once_count = self._in_flight_count
            self._in_flight_count -= 1
            limits = self._limits
            limits.received(size_bytes, now_s)
            if limits.answered(times.first_byte_s, at_once_count, now_s):
                self._note_cut(Sign.LATENCY, now_s)
            if sign is not None and limits.told(sign, at_once_count, now_s):
                self._note_cut(sign, now_s)
            if status < 300:
                self._hedges.finished(times.first_byte_s, times.body_s, size_bytes)
        if down:
            self.outage.failed(f"HTTP {status}", probe=probe)
        else:
            self.outage.succeeded()

    def _note_cut(self, sign: Sign, now_s: float) -> None:
        limits = self._limits
        self._apply(now_s)
        cut: Limit = {
            Sign.REQUESTS: limits.requests_per_s,
            Sign.BANDWIDTH: limits.bytes_per_s,
            Sign.HELD_BACK: limits.bytes_per_s,
        }.get(sign, limits.connections)
        _LOG.info("%s: %s; the limit is %.0f for now", self.name, sign.value, cut.value(now_s))

    def failed(self, failure: Failure, *, probe: bool) -> None:
        """A request that was begun had no answer, or none that we could take."""
        if failure.kind not in _DOWN_KINDS:
            self.given_up(probe=probe, begun=True)
            return
        with self._lock:
            self._in_flight_count -= 1
        self.outage.failed(str(failure), probe=probe)

    def given_up(self, *, probe: bool, begun: bool) -> None:
        """An attempt ended without a verdict on the origin: cancelled, or no fault of its."""
        if begun:
            with self._lock:
                self._in_flight_count -= 1
        if probe:
            self.outage.probe_ended()

    # --- hedges -------------------------------------------------------------------------------

    def late_s(self, size_bytes: int) -> float | None:
        """See `HedgePolicy.late_s`."""
        with self._lock:
            return self._hedges.late_s(size_bytes)

    def judge(self, progress: Progress, checks_count: int) -> float:
        """See `HedgePolicy.judge`."""
        with self._lock:
            return self._hedges.judge(progress, checks_count)

    def hedge_unsent(self) -> None:
        """See `HedgePolicy.refund`."""
        with self._lock:
            self._hedges.refund()

    def caution(self, text: str) -> None:
        """Warn of a setting; once, however many threads and origins come upon it."""
        with self._lock:
            if text in self._cautions:
                return
            self._cautions.add(text)
        _LOG.warning("%s", text)
        self._metrics.add("origin_warnings_total")

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Take its share out of the gauges; no call is under way."""
        with self._lock:
            self._show(0, 0, 0)
        self.outage.close()


_GAUGES = ("origin_connections_limit", "origin_requests_per_s_limit", "origin_bytes_per_s_limit")


def share(total: int, parts: int, index: int) -> int:
    """Part number `index` of `total`, as even as it can be; at least one."""
    return max(1, total // parts + (1 if index < total % parts else 0))


class AccountBook:
    """The accounts of an engine, by endpoint and access key. Threads: any."""

    def __init__(self, metrics: Metrics, threads_count: int) -> None:
        self._metrics = metrics
        self._threads_count = threads_count
        self._lock = threading.Lock()
        self._accounts: dict[tuple[str, str], Account] = {}

    def account(self, config: OriginConfig) -> Account:
        """The one that this configuration belongs to."""
        key = (config.endpoint, config.key)
        with self._lock:
            found = self._accounts.get(key)
            if found is None:
                found = self._accounts[key] = Account(
                    config.endpoint, config, self._metrics, threads_count=self._threads_count
                )
            return found

    def close(self) -> None:
        """Close them all."""
        with self._lock:
            for account in self._accounts.values():
                account.close()
            self._accounts.clear()
