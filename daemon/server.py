"""Accepting sessions, and what they share: one `SessionServer` a daemon.

Sessions count until they have given everything back, those included that the daemon has ended while
their clients still look at what they hold. Ending is in two steps: `stop` serves nobody any more,
`close` takes back what was leased, once nothing can write into the arena.

Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable

from gpufeed.cachefs import wire
from gpufeed.cachefs.cache import ShardCache
from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.errors import CapacityError
from gpufeed.cachefs.plan import PlanBook
from gpufeed.cachefs.wire import Kind
from gpufeed.daemon.datasets import Datasets
from gpufeed.daemon.memory import ArenaMemory, heap_reserved_bytes
from gpufeed.daemon.session import ServerSession
from gpufeed.daemon.windows import Windows

_LOG = logging.getLogger("gpufeed.server")

ACCEPT_PAUSE_S = 0.5


class SessionServer:
    """Accepts sessions on a listening socket, which it owns from `start` on.

    Args:
        cache: of the daemon.
        datasets: of the daemon.
        book: of all plans.
        clock: for rates.
        sessions_max: open at a time.
        memory_bytes: for everything (`gpufeed.daemon.memory`); 0: no limit but the arena's size.
    """

    def __init__(
        self, cache: ShardCache, datasets: Datasets, book: PlanBook, *, clock: Clock,
        sessions_max: int, memory_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.cache = cache
        self.datasets = datasets
        self.book = book
        self.clock = clock
        arena = cache.tools.pool.arena
        self.windows = Windows(arena.slot_count, arena.extent_bytes)
        # Without a limit only the arena has one, and an earlier one may be as large.
        limit_bytes = memory_bytes or sys.maxsize
        self.heap_bytes_max = limit_bytes - arena.size_bytes
        arenas_bytes = memory_bytes - heap_reserved_bytes(memory_bytes) or 2 * arena.size_bytes
        tools = cache.tools
        self.memory = ArenaMemory(arenas_bytes, tools.pool, self.windows, tools.metrics)
        self._sessions_max = sessions_max
        self._sessions: dict[int, ServerSession] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self._listener: socket.socket | None = None
        self.on_count: Callable[[int], None] = lambda _: None

    @property
    def session_count(self) -> int:
        """Sessions open."""
        return len(self._sessions)

    def start(self, listener: socket.socket) -> None:
        """Accept from now on."""
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def stop_accepting(self) -> None:
        """Close the listener. Open sessions go on."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as shortage:
            # Out of descriptors: the connection stays in the queue, and we would be called at once.
            _LOG.warning("no session can be accepted for now: %s", shortage)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(ACCEPT_PAUSE_S, self._accept_again)
            return
        sock.setblocking(False)
        if len(self._sessions) >= self._sessions_max:
            error = CapacityError(
                f"{self._sessions_max} sessions are open already: raise daemon.sessions_max"
            )
            with sock, contextlib.suppress(OSError):  # it may be gone already
                sock.send(wire.pack(Kind.ERROR, wire.pack_json(wire.pack_error(error))))
            return
        self._numbers += 1
        self._sessions[self._numbers] = ServerSession(self._numbers, sock, self)
        self.cache.tools.metrics.add("sessions_total")
        self._count()

    def _accept_again(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def ending(self, task: asyncio.Task[None]) -> None:
        """Keep a session's closing task until it is done."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def ended(self, number: int) -> None:
        """A session has given everything back."""
        if self._sessions.pop(number, None) is not None:
            self._count()

    def _count(self) -> None:
        self.cache.tools.metrics.set("sessions", len(self._sessions))
        self.on_count(len(self._sessions))

    async def stop(self) -> None:
        """Accept and serve nobody any more; what sessions hold stays as it is until `close`."""
        self.stop_accepting()
        await asyncio.gather(*(session.stop() for session in list(self._sessions.values())))

    async def close(self) -> None:
        """End all sessions. Nothing may write into the arena any more: clients may still look."""
        self.stop_accepting()
        sessions = list(self._sessions.values())
        await asyncio.gather(*(session.close() for session in sessions))
        await asyncio.gather(*self._ending)
