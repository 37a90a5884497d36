"""A session server in the test's own loop, without datasets."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace

from gpufeed.cachefs import wire
from gpufeed.cachefs.arena.ledger import ArenaLedger
from gpufeed.cachefs.arena.memfd import Arena
from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.clock import SystemClock
from gpufeed.cachefs.config import ArenaConfig
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.nextuse import NextUses
from gpufeed.cachefs.plan import PlanBook
from gpufeed.cachefs.wire import Kind, Message
from gpufeed.daemon.server import SessionServer
from gpufeed.daemon.tenants import Tenants

EXTENT = 64 * 1024
HELLO = wire.pack(Kind.HELLO, wire.pack_json({"window_bytes": 0}))
SESSIONS_MAX = 2


class House:
    """A server without datasets, and what came to the loop's last resort."""

    def __init__(self, path: Path) -> None:
        self.escaped: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self.escaped.append(context.get("exception"))
        )
        metrics = Metrics()
        self.arena = Arena(ArenaConfig(size_bytes=64 * EXTENT, extent_bytes=EXTENT))
        self.pool = SlotPool(self.arena, metrics)
        tools = SimpleNamespace(pool=self.pool, metrics=metrics, extent_bytes=EXTENT)
        cache = SimpleNamespace(tools=tools)
        clock = SystemClock()
        ledger = ArenaLedger(str(path / "socket"))
        self.tenants = Tenants.alone(cache, SimpleNamespace(), ledger=ledger, clock=clock)
        self.server = SessionServer(
            self.tenants, PlanBook(NextUses()), metrics, clock=clock, sessions_max=SESSIONS_MAX
        )
        self.counts: asyncio.Queue[int] = asyncio.Queue()
        self.server.on_count = self.counts.put_nowait
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.path = str(path / "socket")
        listener.bind(self.path)
        listener.listen()
        self.server.start(listener)

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.connect(self.path)
        client.setblocking(False)
        return client

    async def until(self, count: int) -> None:
        while await self.counts.get() != count:
            pass


async def answer(client: socket.socket) -> Message:
    data = await asyncio.get_running_loop().sock_recv(client, wire.MESSAGE_BYTES_MAX)
    return wire.unpack(data)
