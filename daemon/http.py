"""The daemon's HTTP side: `/healthz`, `/metrics` and `/status`. Loopback unless configured.

Read-only and small. Prometheus text comes from `prometheus_client`, over our own counters, so that
no metric is named twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from gpufeed.cachefs.errors import OperatorError
from gpufeed.cachefs.metrics import METRICS, Metrics

PREFIX = "gpufeed_"


class _Collector:
    """Our counters as Prometheus families."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        values = self._metrics.snapshot()
        for name, metric in METRICS.items():
            if metric.kind == "counter":
                # The library adds the suffix itself.
                counter = CounterMetricFamily(PREFIX + name.removesuffix("_total"), metric.help)
                counter.add_metric([], values[name])
                yield counter
            else:
                gauge = GaugeMetricFamily(PREFIX + name, metric.help)
                gauge.add_metric([], values[name])
                yield gauge


def make_app(metrics: Metrics) -> web.Application:
    """The application."""
    registry = CollectorRegistry()
    registry.register(_Collector(metrics))

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def prometheus(_: web.Request) -> web.Response:
        text = generate_latest(registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def status(_: web.Request) -> web.Response:
        return web.json_response(metrics.snapshot())

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/metrics", prometheus)
    app.router.add_get("/status", status)
    return app


async def start(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Listen; returns the runner (clean it up) and the port.

    Raises:
        OperatorError: the port is taken or not ours to use.
    """
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise OperatorError(
            f"cannot listen on http://{host}:{port} ({error.strerror or error}): another daemon "
            "may run; choose another port with --http-port, or -1 to switch it off"
        ) from None
    found: int = runner.addresses[0][1]
    return runner, found
