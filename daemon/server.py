"""Accepting sessions at all doors of a daemon: one `SessionServer` a daemon.

A door is a listening socket: the daemon's own, and one for each tenant that has one
(`gpufeed.daemon.admission`). Which door a session came to is all that is known of it until it has
said HELLO.

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
from collections.abc import Callable

from gpufeed.cachefs import wire
from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.errors import CapacityError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.plan import PlanBook
from gpufeed.cachefs.wire import Kind
from gpufeed.daemon.admission import COMMON_DOOR
from gpufeed.daemon.session import ServerSession
from gpufeed.daemon.tenants import Tenants

_LOG = logging.getLogger("gpufeed.server")

ACCEPT_PAUSE_S = 0.5


class SessionServer:
    """Accepts sessions on listening sockets, which it owns from `start` on.

    Args:
        tenants: whose sessions they are.
        book: of all plans.
        metrics: of the daemon.
        clock: for rates.
        sessions_max: open at a time.
    """

    def __init__(
        self, tenants: Tenants, book: PlanBook, metrics: Metrics, *, clock: Clock,
        sessions_max: int,
    ) -> None:  # fmt: skip
        self.tenants = tenants
        self.book = book
        self.metrics = metrics
        self.clock = clock
        self._sessions_max = sessions_max
        self._sessions: dict[int, ServerSession] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self._listeners: dict[str, socket.socket] = {}
        self.on_count: Callable[[int], None] = lambda _: None

    @property
    def session_count(self) -> int:
        """Sessions open."""
        return len(self._sessions)

    def start(self, listener: socket.socket, door: str = COMMON_DOOR) -> None:
        """Accept at this door from now on."""
        listener.setblocking(False)
        self._listeners[door] = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, door)

    def stop_accepting(self) -> None:
        """Close the listeners. Open sessions go on."""
        for listener in self._listeners.values():
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()

    def _accept(self, door: str) -> None:
        listener = self._listeners[door]
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as shortage:
            # Out of descriptors: the connection stays in the queue, and we would be called at once.
            _LOG.warning("no session can be accepted for now: %s", shortage)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener.fileno())
            loop.call_later(ACCEPT_PAUSE_S, self._accept_again, door)
            return
        sock.setblocking(False)
        refusal = self._refusal(door)
        if refusal is not None:
            _turn_away(sock, refusal)
            return
        self._numbers += 1
        self._sessions[self._numbers] = ServerSession(self._numbers, sock, self, door)
        self.metrics.add("sessions_total")
        self._count()

    def _refusal(self, door: str) -> CapacityError | None:
        """Why one more connection has no place here."""
        if len(self._sessions) >= self._sessions_max:
            return CapacityError(
                f"{self._sessions_max} sessions are open already: raise daemon.sessions_max"
            )
        # Whoever says nothing has a place too: it must not be one of another tenant's.
        limit = self.tenants.door_limit(door)
        here = sum(session.door == door for session in self._sessions.values()) if limit else 0
        if limit and here >= limit:
            return CapacityError(
                f"{limit} connections are open at {door} already: raise its tenant's sessions_max"
            )
        return None

    def _accept_again(self, door: str) -> None:
        listener = self._listeners.get(door)
        if listener is not None:
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, door)

    def ending(self, task: asyncio.Task[None]) -> None:
        """Keep a session's closing task until it is done."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def ended(self, number: int) -> None:
        """A session has given everything back."""
        if self._sessions.pop(number, None) is not None:
            self._count()

    def _count(self) -> None:
        self.metrics.set("sessions", len(self._sessions))
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


def _turn_away(sock: socket.socket, refusal: CapacityError) -> None:
    """Say why, and close. What it has sent is read first, or it would see a reset instead."""
    with sock, contextlib.suppress(OSError):  # it may be gone already
        sock.shutdown(socket.SHUT_RD)
        while sock.recv(wire.MESSAGE_BYTES_MAX):
            pass
        sock.send(wire.pack(Kind.ERROR, wire.pack_json(wire.pack_error(refusal))))
