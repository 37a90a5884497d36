"""`gpufeed daemon`: builds the parts from the settings, runs them, and ends them in order.

Order of starting: arena, store (recovers, locks its directory), origin engine (own thread), cache,
sessions, HTTP. Ending is the reverse, and every part waits for what it started: after a SIGTERM or
Ctrl-C no process, thread, socket or temporary file is left. A kill -9 leaves a cache directory that
the next daemon serves and a socket path that it replaces.

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
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import uvloop

from gpufeed.cachefs import wire
from gpufeed.cachefs.arena.memfd import Arena
from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.cache import ShardCache
from gpufeed.cachefs.clock import SystemClock
from gpufeed.cachefs.errors import GpufeedError
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.inflight import InFlight
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.nextuse import NextUses
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.plan import PlanBook
from gpufeed.cachefs.policy import PlanPolicy
from gpufeed.cachefs.shares import Shares
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.units import format_bytes
from gpufeed.daemon import http
from gpufeed.daemon.config import Settings, add_config_flags, load_settings
from gpufeed.daemon.datasets import Datasets
from gpufeed.daemon.listen import listening
from gpufeed.daemon.server import SessionServer
from gpufeed.daemon.startchecks import excess, require_startable

_LOG = logging.getLogger("gpufeed.daemon")
ALLOW_ALL = ("",)
PARTS_PER_ARENA_MIN = 16
# How long an embedded daemon waits for whoever started it.
FIRST_SESSION_S = 15.0
# Shards that expire together leave together.
EXPIRY_PAUSE_S = 1.0


class Daemon:
    """The running parts, for whoever embeds or tests a daemon in its own loop."""

    def __init__(self, server: SessionServer, cache: ShardCache, metrics: Metrics) -> None:
        self.server = server
        self.cache = cache
        self.metrics = metrics
        self.http_port = -1


@asynccontextmanager
async def running(
    settings: Settings, listener: socket.socket, *, embedded: bool
) -> AsyncIterator[Daemon]:
    """A daemon that serves `listener` until the block ends.

    Raises:
        GpufeedError: a part could not start; those before it are ended.
    """
    metrics = Metrics()
    clock = SystemClock()
    extent_bytes = settings.arena.extent_bytes
    async with AsyncExitStack() as stack:
        arena = Arena(settings.arena)
        stack.callback(arena.close)
        metrics.set("arena_locked_bytes", arena.locked_bytes)
        uses = NextUses()
        store = ShardStore.open(
            settings.store, extent_bytes=extent_bytes, metrics=metrics, clock=clock,
            policy=PlanPolicy(
                uses, Shares(settings.policy, settings.store.capacity_bytes),
                ttl_s=settings.policy.ttl_s,
            ),
        )  # fmt: skip
        stack.push_async_callback(store.close)
        engine = OriginEngine(settings.origin, metrics)
        engine.start()
        stack.push_async_callback(engine.close)
        book = PlanBook(uses)
        part_bytes = part_bytes_of(settings)
        tools = FillTools(
            engine=engine, store=store, pool=SlotPool(arena, metrics), metrics=metrics,
            in_flight=InFlight.of_arena(settings.arena, part_bytes=part_bytes, metrics=metrics),
            extent_bytes=extent_bytes, part_bytes=part_bytes, pending=book.pending,
            expansion_ratio_max=settings.store.expansion_ratio_max,
        )  # fmt: skip
        cache = ShardCache(tools)
        datasets = Datasets(
            engine, store, extent_bytes=extent_bytes,
            allow=ALLOW_ALL if embedded else settings.daemon.allow,
            decompress=settings.store.decompress, endpoint=settings.origin.endpoint,
        )  # fmt: skip
        server = SessionServer(
            cache, datasets, book, clock=clock, sessions_max=settings.daemon.sessions_max,
            memory_bytes=settings.daemon.memory_bytes,
        )  # fmt: skip
        # Read upwards. Slots that clients hold go back only when nothing can be written into them.
        stack.push_async_callback(server.close)
        stack.push_async_callback(cache.close)
        stack.push_async_callback(datasets.close)
        stack.push_async_callback(server.stop)
        daemon = Daemon(server, cache, metrics)
        if settings.daemon.http_port >= 0:
            runner, daemon.http_port = await http.start(
                http.make_app(metrics), settings.daemon.http_host, settings.daemon.http_port
            )
            stack.push_async_callback(runner.cleanup)
        server.start(listener)
        _LOG.info(
            "arena %s, %s; store %s of %s", format_bytes(arena.size_bytes), arena.lock_note,
            settings.store.path or "in memory only", format_bytes(store.capacity_bytes),
        )  # fmt: skip
        expiry = asyncio.create_task(_expire(store), name="expiry")
        stack.push_async_callback(_cancelled, expiry)
        yield daemon


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
    with listening(path, wait=embedded) as listener:
        async with running(settings, listener, embedded=embedded) as daemon:
            _announce(ready_fd, {"socket": path, "http_port": daemon.http_port, "pid": os.getpid()})
            if embedded:
                linger = Linger(settings.daemon.linger_s, stop)
                daemon.server.on_count = linger.on_count
                linger.on_count(daemon.server.session_count)
            await stop.wait()
            _LOG.info("ending")


def part_bytes_of(settings: Settings) -> int:
    """The size of a request: as configured, but no more than a sixteenth of the arena.

    A part's slots are taken before its first byte; several must be under way at once.
    """
    arena = settings.arena
    whole_extents = max(1, arena.slot_count // PARTS_PER_ARENA_MIN)
    return min(settings.origin.part_bytes, whole_extents * arena.extent_bytes)


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
