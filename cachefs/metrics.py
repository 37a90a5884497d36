"""Every metric gpufeed keeps, in one file: name, kind, unit, meaning. No exporter lives here.

Counters only grow; gauges go up and down and are all back at zero when no session is open, but for
those marked resident. Names end in their unit. The daemon's exporter turns them into Prometheus
text under the prefix ``gpufeed_``.

Threads: `add` and `set` are called from the daemon's loop, the engine's thread and the disk
threads; a lock guards each update, which costs 0.1 microseconds beside calls that move megabytes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric's definition."""

    name: str
    kind: Kind
    help: str


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("origin_requests_total", "counter", "Requests sent to origins."),
        Metric("origin_bytes_total", "counter", "Body bytes received from origins."),
        Metric("origin_retries_total", "counter", "Requests repeated after a failure."),
        Metric("origin_throttled_total", "counter", "Answers by which an origin asked us to slow."),
        Metric("origin_in_flight", "gauge", "Requests under way at origins."),
        Metric(
            "origin_warnings_total", "counter", "Cautions about an origin's settings; see the log."
        ),
        Metric("credential_renewals_total", "counter", "Credentials received from a service."),
        Metric("credential_failures_total", "counter", "Times that a service gave none."),
        Metric("origin_waiting", "gauge", "Requests that wait for a connection or their turn."),
        Metric("origin_degraded", "gauge", "Origins that fail so often that they are only probed."),
        Metric(
            "origin_connections_limit",
            "gauge",
            "Connections allowed at this moment, over all origins (resident).",
        ),
        Metric(
            "origin_requests_per_s_limit",
            "gauge",
            "Requests a second allowed at this moment, over all origins (resident).",
        ),
        Metric(
            "origin_bytes_per_s_limit",
            "gauge",
            "Bytes a second allowed at this moment, over all origins with a limit (resident).",
        ),
        Metric("hedges_total", "counter", "Slow requests asked again on another connection."),
        Metric("hedges_won_total", "counter", "Those that came before the slow request."),
        Metric("hedge_spare_bytes", "gauge", "Memory that hedges receive into."),
        Metric("fills_total", "counter", "Shards fetched from an origin to the end."),
        Metric("fills_failed_total", "counter", "Fills that ended in an error."),
        Metric("fills_in_flight", "gauge", "Fills under way."),
        Metric("in_flight_bytes", "gauge", "Bytes asked of origins and not let go yet."),
        Metric("coalesced_total", "counter", "Readers that joined a fill already in flight."),
        Metric("hits_total", "counter", "Shards served from the store."),
        Metric("misses_total", "counter", "Shards that had to be filled."),
        Metric("bypass_total", "counter", "Fills streamed without caching, for want of room."),
        Metric("decompressed_bytes_total", "counter", "Bytes that compressed shards expanded to."),
        Metric("range_bytes_total", "counter", "Bytes fetched as single ranges of a shard."),
        Metric("arena_hit_bytes_total", "counter", "Bytes served from slots still in the arena."),
        Metric("nvme_read_bytes_total", "counter", "Bytes read from the store."),
        Metric("nvme_written_bytes_total", "counter", "Bytes written to the store."),
        Metric("evictions_total", "counter", "Shards evicted."),
        Metric("quarantined_total", "counter", "Stored shards found wrong and set aside."),
        Metric("store_errors_total", "counter", "Errors of the cache disk."),
        Metric("write_capped_total", "counter", "Shards not cached because of the write cap."),
        Metric("store_resident_bytes", "gauge", "Bytes committed to the store (resident)."),
        Metric("store_resident_shards", "gauge", "Shards committed to the store (resident)."),
        Metric("store_reserved_bytes", "gauge", "Bytes reserved for fills under way."),
        Metric("store_capacity_bytes", "gauge", "The store's hard limit (resident)."),
        Metric("store_degraded", "gauge", "1 while the cache disk is not trusted."),
        Metric("arena_slots", "gauge", "Slots in the arena (resident)."),
        Metric("arena_leased_slots", "gauge", "Slots that a session or a fill holds."),
        Metric(
            "arena_touched_slots", "gauge", "Slots that were ever used: memory taken (resident)."
        ),
        Metric(
            "arena_locked_bytes", "gauge", "Of the arena, kept out of swap once used (resident)."
        ),
        Metric(
            "arena_elsewhere_bytes", "gauge", "Arenas of earlier daemons that clients still map."
        ),
        Metric("heap_bytes", "gauge", "The daemon's own memory, at the last session (resident)."),
        Metric("access_checks_total", "counter", "Objects looked up with a tenant's credentials."),
        Metric("access_refused_total", "counter", "Cached shards that a tenant may not read."),
        Metric("tenant_copied_bytes_total", "counter", "Bytes copied from another tenant's fill."),
        Metric("sessions", "gauge", "Sessions open."),
        Metric("sessions_total", "counter", "Sessions ever opened."),
        Metric("published_bytes_total", "counter", "Bytes published to sessions."),
        Metric(
            "stall_seconds_total", "counter", "Time that sessions had credit and nothing ready."
        ),
    )
}


class Metrics:
    """The values. One instance a daemon; its tenants keep `MetricsPart`s of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys(METRICS, 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Move a counter up or a gauge by `amount`."""
        with self._lock:
            self._values[name] += amount

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        assert METRICS[name].kind == "gauge", name
        with self._lock:
            self._values[name] = value

    def get(self, name: str) -> float:
        """The current value."""
        return self._values[name]

    def snapshot(self) -> dict[str, float]:
        """All values at one instant."""
        with self._lock:
            return dict(self._values)


class MetricsPart(Metrics):
    """What one of several keeps of the same metrics: a gauge is the sum of what its parts set.

    Counters are the whole's, and `get` tells the whole's value.
    """

    def __init__(self, whole: Metrics) -> None:
        self._lock = whole._lock
        self._values = whole._values
        self._own: dict[str, float] = {}

    def set(self, name: str, value: float) -> None:
        """Set this part of a gauge."""
        assert METRICS[name].kind == "gauge", name
        with self._lock:
            self._values[name] += value - self._own.get(name, 0.0)
            self._own[name] = value
