"""`gpufeed daemon`: builds the parts from the settings, runs them, and ends them in order.

Order of starting: store (recovers, locks its directory), origin engine (own threads), the tenants'
arenas and caches, sessions, HTTP. Ending is the reverse, and every part waits for what it started:
after a SIGTERM or Ctrl-C no process, thread, socket or temporary file is left. A kill -9 leaves a
cache directory that the next daemon serves and a socket path that it replaces.

An **embedded** daemon was started by a loader for itself. It ends `linger_s` after its last session
closed, holding the socket's lock while it looks for the last time and closes its listener, so that
no client connects to a daemon that is about to leave.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import uvloop

from gpufeed.cachefs import wire
from gpufeed.cachefs.cache import ShardCache
from gpufeed.cachefs.clock import SystemClock
from gpufeed.cachefs.errors import GpufeedError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.nextuse import NextUses
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.plan import PlanBook
from gpufeed.cachefs.policy import PlanPolicy
from gpufeed.cachefs.shares import Shares
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.units import format_bytes
from gpufeed.daemon import http
from gpufeed.daemon.admission import Admission
from gpufeed.daemon.config import Settings, add_config_flags, load_settings
from gpufeed.daemon.listen import listening
from gpufeed.daemon.server import SessionServer
from gpufeed.daemon.startchecks import excess, require_startable
from gpufeed.daemon.tenantparts import TenantParts
from gpufeed.daemon.tenants import Tenants

_LOG = logging.getLogger("gpufeed.daemon")
# How long an embedded daemon waits for whoever started it.
FIRST_SESSION_S = 15.0
# Shards that expire together leave together.
EXPIRY_PAUSE_S = 1.0


class Daemon:
    """The running parts, for whoever embeds or tests a daemon in its own loop.

    Attributes:
        cache: of the only tenant, or the first one.
    """

    def __init__(self, server: SessionServer, cache: ShardCache, metrics: Metrics) -> None:
        self.server = server
        self.cache = cache
        self.metrics = metrics
        self.http_port = -1


@asynccontextmanager
async def running(
    settings: Settings, listener: socket.socket, *, embedded: bool,
    doors: Mapping[str, socket.socket] | None = None,
) -> AsyncIterator[Daemon]:  # fmt: skip
    """A daemon that serves `listener` until the block ends.

    Args:
        settings: all of them.
        listener: the common door.
        embedded: started by a loader for itself: it reads what its user may.
        doors: of tenants, by their paths.

    Raises:
        GpufeedError: a part could not start; those before it are ended.
    """
    metrics = Metrics()
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        closers: list[Callable[[], None]] = []
        stack.callback(_call_all, closers)
        uses = NextUses()
        store = ShardStore.open(
            settings.store, extent_bytes=settings.arena.extent_bytes, metrics=metrics, clock=clock,
            policy=PlanPolicy(
                uses, _shares_of(settings), ttl_s=settings.policy.ttl_s,
            ),
        )  # fmt: skip
        stack.push_async_callback(store.close)
        engine = OriginEngine(settings.origin, metrics)
        engine.start()
        stack.push_async_callback(engine.close)
        book = PlanBook(uses)
        parts = TenantParts(
            settings, engine, store, metrics=metrics, clock=clock, book=book, embedded=embedded
        )
        made = parts.make_all(closers)
        memory_bytes = settings.daemon.memory_bytes
        admission = Admission(settings.tenants, settings.daemon.uids)
        server = SessionServer(
            Tenants(made, admission, memory_bytes=memory_bytes), book, metrics, clock=clock,
            sessions_max=settings.daemon.sessions_max,
        )  # fmt: skip
        # Read upwards. Slots that clients hold go back only when nothing can be written into them.
        stack.push_async_callback(server.close)
        for tenant in made:
            stack.push_async_callback(tenant.cache.close)
            stack.push_async_callback(tenant.datasets.close)
        stack.push_async_callback(server.stop)
        daemon = Daemon(server, made[0].cache, metrics)
        if settings.daemon.http_port >= 0:
            runner, daemon.http_port = await http.start(
                http.make_app(metrics), settings.daemon.http_host, settings.daemon.http_port
            )
            stack.push_async_callback(runner.cleanup)
        server.start(listener)
        for path, door in (doors or {}).items():
            server.start(door, path)
        for tenant in made:
            arena = tenant.cache.tools.pool.arena
            whose = f"tenant {tenant.name}: " if tenant.name else ""
            _LOG.info("%sarena %s, %s", whose, format_bytes(arena.size_bytes), arena.lock_note)
        _LOG.info(
            "store %s of %s", settings.store.path or "in memory only",
            format_bytes(store.capacity_bytes),
        )  # fmt: skip
        expiry = asyncio.create_task(_expire(store), name="expiry")
        stack.push_async_callback(_cancelled, expiry)
        yield daemon


def _call_all(closers: list[Callable[[], None]]) -> None:
    for close in closers:
        close()


def _shares_of(settings: Settings) -> Shares:
    tenants = {tenant.name: tenant.share for tenant in settings.tenants}
    return Shares(settings.policy, settings.store.capacity_bytes, tenants)


async def _expire(store: ShardStore) -> None:
    """Evict what expires, when it does."""
    while (wait_s := store.expire()) != math.inf:  # noqa: ASYNC110 it sleeps until one is due
        await asyncio.sleep(max(wait_s, EXPIRY_PAUSE_S))


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def serve(settings: Settings, *, embedded: bool, ready_fd: int) -> None:
    """Run until SIGTERM or SIGINT, or, embedded, until nobody has been there for a while."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    path = settings.daemon.socket_path
    mode = 0o600 if embedded else int(settings.daemon.socket_mode, 8)
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(listening(path, wait=embedded, mode=mode))
        doors = {
            tenant.socket_path: sockets.enter_context(listening(tenant.socket_path, mode=mode))
            for tenant in settings.tenants
            if tenant.socket_path
        }
        async with running(settings, listener, embedded=embedded, doors=doors) as daemon:
            _announce(ready_fd, {"socket": path, "http_port": daemon.http_port, "pid": os.getpid()})
            if embedded:
                linger = Linger(settings.daemon.linger_s, stop)
                daemon.server.on_count = linger.on_count
                linger.on_count(daemon.server.session_count)
            await stop.wait()
            _LOG.info("ending")


class Linger:
    """Sets `stop` when no session has been open for `linger_s`; the first one gets more time."""

    def __init__(self, linger_s: float, stop: asyncio.Event) -> None:
        self._linger_s = max(linger_s, FIRST_SESSION_S)
        self._later_s = linger_s
        self._stop = stop
        self._timer: asyncio.TimerHandle | None = None

    def on_count(self, count: int) -> None:
        """The number of sessions changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if count:
            self._linger_s = self._later_s
        else:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._linger_s, self._stop.set)


def _announce(ready_fd: int, value: Mapping[str, object]) -> None:
    if ready_fd >= 0:
        # Nobody reads any more: then nobody needs to know.
        with contextlib.suppress(OSError):
            os.write(ready_fd, json.dumps(value).encode() + b"\n")
            os.close(ready_fd)


def command(argv: list[str]) -> int:
    """``gpufeed daemon``.

    Raises:
        GpufeedError: it could not start.
    """
    parser = argparse.ArgumentParser(
        prog="gpufeed daemon",
        description="Serve shards of object storage to the training processes of this node.",
        epilog="example: gpufeed daemon --cache-path /mnt/nvme/gpufeed --capacity 2TB "
        "--endpoint https://oss-cn-hangzhou-internal.aliyuncs.com --region cn-hangzhou",
    )
    add_config_flags(parser)
    parser.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--ready-fd", type=int, default=-1, metavar="N",
        help="write one JSON line to this descriptor when sessions are accepted",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.embedded:
        _detach()
    loaded = load_settings(arguments)
    settings = loaded.settings
    logging.basicConfig(
        level=settings.daemon.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        require_startable(loaded)
        for warning in excess(loaded):
            _LOG.warning("%s", warning)
        uvloop.run(serve(settings, embedded=arguments.embedded, ready_fd=arguments.ready_fd))
    except GpufeedError as error:
        # Whoever waits for the ready line learns why there will be none.
        _announce(arguments.ready_fd, wire.pack_error(error))
        raise
    return 0


def _detach() -> None:
    """Become nobody's child, in a session of our own, while no thread runs yet."""
    if os.fork():
        os._exit(0)
    os.setsid()
