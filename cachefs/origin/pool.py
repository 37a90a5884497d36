"""The connections of one origin: how many, which to use again, who waits.

At most `connections_max` callers are inside `exchange` at a time; others wait in the order in which
they came. The connection used last is used first: it is the likeliest to be alive, and has the
widest congestion window. A kept connection that the peer closed meanwhile costs one try on a fresh
one, which is not counted: nobody can tell it from a request that arrived as the door closed.

Lives on the engine's loop only.
"""

from __future__ import annotations

import asyncio
import ssl

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.origin.dial import Endpoint, connect
from gpufeed.cachefs.origin.failure import AttemptFailedError, FailureKind
from gpufeed.cachefs.origin.http1 import Answer, Connection, Exchange
from gpufeed.cachefs.origin.rate import TokenBucket
from gpufeed.cachefs.origin.tls import client_context

# Kept connections to different endpoints (buckets) together never exceed connections_max; one is
# closed to make room for another endpoint's.


class ConnectionPool:
    """See the top of the file."""

    def __init__(self, config: OriginConfig) -> None:
        self._config = config
        self._places = asyncio.Semaphore(config.connections_max)
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._idle_count = 0
        self._busy: set[Connection] = set()
        self._tls: ssl.SSLContext | None = None
        self._bucket = TokenBucket(config.requests_per_s_max, asyncio.get_running_loop().time())

    async def exchange(self, endpoint: Endpoint, exchange: Exchange) -> Answer:
        """One request and its answer on some connection.

        Raises:
            AttemptFailedError: no complete answer.
        """
        async with self._places:
            wait_s = self._bucket.reserve(asyncio.get_running_loop().time())
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            fresh = False
            while True:
                connection, fresh = await self._take(endpoint, fresh=fresh)
                self._busy.add(connection)
                try:
                    return await connection.exchange(exchange)
                except AttemptFailedError as error:
                    if fresh or error.failure.kind is not FailureKind.IDLE_CLOSED:
                        raise
                    fresh = True
                finally:
                    self._busy.discard(connection)
                    self._give_back(endpoint, connection)

    async def _take(self, endpoint: Endpoint, *, fresh: bool) -> tuple[Connection, bool]:
        """A kept connection, or a new one (then True) if there is none or `fresh` asks for it."""
        shelf = self._idle.get(endpoint, [])
        while shelf and not fresh:
            connection = shelf.pop()
            self._idle_count -= 1
            if connection.reusable:
                return connection, False
        self._make_room()
        config = self._config
        connection = await connect(
            endpoint,
            connect_timeout_s=config.connect_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            tls=self._tls_context() if endpoint.tls else None,
        )
        return connection, True

    def _make_room(self) -> None:
        if self._idle_count + len(self._busy) < self._config.connections_max:
            return
        for shelf in self._idle.values():
            if shelf:
                shelf.pop(0).abort()
                self._idle_count -= 1
                return

    def _give_back(self, endpoint: Endpoint, connection: Connection) -> None:
        if connection.reusable:
            self._idle.setdefault(endpoint, []).append(connection)
            self._idle_count += 1

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = client_context(self._config.ca_file)
        return self._tls

    async def close(self) -> None:
        """Close every connection."""
        connections = [c for shelf in self._idle.values() for c in shelf] + list(self._busy)
        self._idle.clear()
        self._idle_count = 0
        for connection in connections:
            connection.abort()
        for connection in connections:
            await connection.wait_lost()
