"""One thread's connections to one origin: how many, which to use again, who waits for what.

A request waits, in this order: for the pace of prefetch, if it is one; for a place among the
connections that are allowed at this moment (`places`: demand first); for its turn by the limits on
requests and bytes a second. Only then does it count as under way.

Prefetch is paced by admission, not by reading slowly: a connection that we do not read from goes on
receiving until its window is full, megabytes later, so for parts of megabytes pausing saves nothing
over asking later, and each pause would cost a timer. A burst is one part long.

The connection used last is used first: it is the likeliest to be alive, and has the widest
congestion window. A kept connection that the peer closed meanwhile costs one try on a fresh one,
which is not counted: nobody can tell it from a request that arrived as the door closed. Kept
connections to different endpoints (buckets) and those in use together never exceed the thread's
share of `connections_max`; one is closed to make room for another endpoint's.

Lives on one engine thread's loop.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.account import Account, Times, share
from gpufeed.cachefs.origin.dial import Dialling, Endpoint, connect
from gpufeed.cachefs.origin.exchange import Answer, Exchange
from gpufeed.cachefs.origin.failure import AttemptFailedError, FailureKind
from gpufeed.cachefs.origin.http1 import Connection
from gpufeed.cachefs.origin.places import Places
from gpufeed.cachefs.origin.tls import client_context

_NO_TIMES = Times(0.0, 0.0)


@dataclass(slots=True)
class Ticket:
    """One request's way through the pool.

    Attributes:
        size_bytes: of the body that is asked for, as far as that is known.
        demand: somebody waits for it.
        probe: how it ends decides whether its origin is back.
        began: called when it has got its place.
        sent: called each time that it goes out on a connection.
        connection: where it is under way, as long as it is.
        has_begun: the account counts it as under way.
        sent_at_s: when it went out last, by `time.monotonic`.
        times: of its answer, once there is one.
    """

    size_bytes: int
    demand: bool = True
    probe: bool = False
    began: Callable[[], None] | None = None
    sent: Callable[[], None] | None = None
    connection: Connection | None = None
    has_begun: bool = False
    sent_at_s: float = 0.0
    times: Times = _NO_TIMES


class ConnectionPool:
    """See the top of the file.

    Args:
        config: timeouts, TLS, network.
        account: the limits, shared by all threads.
        thread_index: whose share of the connections this is.
        threads_count: of how many.
        metrics: for the gauges.
    """

    def __init__(
        self,
        config: OriginConfig,
        account: Account,
        metrics: Metrics,
        *,
        thread_index: int = 0,
        threads_count: int = 1,
    ) -> None:
        self.account = account
        self._metrics = metrics
        self._ca_file = config.ca_file
        self._dialling = Dialling(
            connect_timeout_s=config.connect_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            interface=config.bind_interface,
            address=config.bind_address,
        )
        self._open_max = share(config.connections_max, threads_count, thread_index)
        self._places = Places(lambda: account.connections_count(thread_index))
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._idle_count = 0
        self._under_way_count = 0
        self._tls: ssl.SSLContext | None = None

    async def exchange(
        self, endpoint: Endpoint, make: Callable[[], Awaitable[Exchange]], ticket: Ticket
    ) -> Answer:
        """One request and its answer on some connection; `make` gives it when its turn has come.

        Raises:
            AttemptFailedError: no complete answer.
        """
        if self.account.paces_prefetch and not ticket.demand:
            await self._pace(ticket)
        if not self._places.try_take(demand=ticket.demand):
            await self._waiting(self._places.take(demand=ticket.demand))
        try:
            if ticket.began is not None:
                ticket.began()
            wait_s = self.account.begin(ticket.size_bytes)
            ticket.has_begun = True
            if wait_s > 0:
                await self._turn(ticket, wait_s)
            return await self._send(endpoint, await make(), ticket)
        finally:
            self._places.give()

    # --- waiting ------------------------------------------------------------------------------

    async def _pace(self, ticket: Ticket) -> None:
        wait_s = self.account.prefetch_turn_s(ticket.size_bytes)
        if wait_s > 0:
            try:
                await self._waiting(asyncio.sleep(wait_s))
            except asyncio.CancelledError:
                self.account.prefetch_missed(ticket.size_bytes)
                raise

    async def _turn(self, ticket: Ticket, wait_s: float) -> None:
        try:
            await self._waiting(asyncio.sleep(wait_s))
        except asyncio.CancelledError:
            self.account.missed(ticket.size_bytes)
            raise

    async def _waiting(self, wait: Coroutine[Any, Any, None]) -> None:
        self._metrics.add("origin_waiting")
        try:
            await wait
        finally:
            self._metrics.add("origin_waiting", -1)

    # --- under way ----------------------------------------------------------------------------

    async def _send(self, endpoint: Endpoint, exchange: Exchange, ticket: Ticket) -> Answer:
        self._metrics.add("origin_in_flight")
        self._under_way_count += 1
        fresh = False
        try:
            while True:
                connection, fresh = await self._take(endpoint, fresh=fresh)
                ticket.connection, ticket.sent_at_s = connection, time.monotonic()
                if ticket.sent is not None:
                    ticket.sent()
                try:
                    answer = await connection.exchange(exchange)
                except AttemptFailedError as error:
                    if fresh or error.failure.kind is not FailureKind.IDLE_CLOSED:
                        raise
                    fresh = True
                else:
                    first_s = connection.first_byte_s
                    ticket.times = Times(first_s - ticket.sent_at_s, time.monotonic() - first_s)
                    return answer
                finally:
                    ticket.connection = None
                    self._give_back(endpoint, connection)
        finally:
            self._under_way_count -= 1
            self._metrics.add("origin_in_flight", -1)

    async def _take(self, endpoint: Endpoint, *, fresh: bool) -> tuple[Connection, bool]:
        """A kept connection, or a new one (then True) if there is none or `fresh` asks for it."""
        shelf = self._idle.get(endpoint, [])
        while shelf and not fresh:
            connection = shelf.pop()
            self._idle_count -= 1
            if connection.reusable:
                return connection, False
        self._make_room()
        tls = self._tls_context() if endpoint.tls else None
        return await connect(endpoint, self._dialling, tls), True

    def _make_room(self) -> None:
        """The new connection will be that of a request that counts as under way already."""
        for shelf in self._idle.values():
            while shelf and self._idle_count + self._under_way_count > self._open_max:
                shelf.pop(0).abort()
                self._idle_count -= 1

    def _give_back(self, endpoint: Endpoint, connection: Connection) -> None:
        if connection.reusable:
            self._idle.setdefault(endpoint, []).append(connection)
            self._idle_count += 1

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = client_context(self._ca_file)
        return self._tls

    async def close(self) -> None:
        """Close every connection; no request is under way."""
        connections = [connection for shelf in self._idle.values() for connection in shelf]
        self._idle.clear()
        self._idle_count = 0
        for connection in connections:
            connection.abort()
        for connection in connections:
            await connection.wait_lost()
