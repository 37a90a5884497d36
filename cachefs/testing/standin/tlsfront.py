"""TLS before a stand-in: takes it off, and hands everything on to the plain listener and back.

The plain transport sends by `os.sendfile` and breaks connections by resetting them; neither goes
with TLS, so it keeps its socket and this stands before it. What happens behind happens in front: an
orderly end is one, a reset is one, and a slow sender is slow, since each side is read only as fast
as the other takes it (`BUFFER_BYTES` a direction).

Runs on the stand-in's loop.
"""

from __future__ import annotations

import asyncio
import ssl

from gpufeed.cachefs.errors import ConfigError, OperatorError
from gpufeed.cachefs.units import KIB

BUFFER_BYTES = 256 * KIB


def server_context(certificate_path: str, key_path: str) -> ssl.SSLContext:
    """Of a certificate chain and its key, PEM.

    Raises:
        ConfigError: they cannot be read, or do not belong together.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate_path, key_path)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"{certificate_path} and {key_path} are no certificate and key in PEM: {error}"
        ) from None
    return context


class TlsFront:
    """See the top of the file. `port` is set once it listens."""

    def __init__(self, host: str, inner_port: int, context: ssl.SSLContext) -> None:
        self._host = host
        self._inner_port = inner_port
        self._context = context
        self._server: asyncio.Server | None = None
        # Those who serve a connection, and what ends them.
        self._tasks: dict[asyncio.Task[None], asyncio.WriteTransport] = {}
        self.port = 0

    async def start(self, port: int) -> None:
        """Listen on `port`; 0 = any free one.

        Raises:
            OperatorError: the port is taken.
        """
        try:
            server = await asyncio.start_server(
                self._serve, self._host, port, ssl=self._context, limit=BUFFER_BYTES
            )
        except OSError as error:
            raise OperatorError(
                f"cannot listen on {self._host}:{port} ({error.strerror or error}); choose another "
                "with --port, or 0 for any free one"
            ) from None
        self._server = server
        self.port = server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Drop every connection."""
        if self._server is None:
            return
        self._server.close()
        # Not cancelled: what asyncio calls when they end takes that for a mistake.
        for transport in self._tasks.values():
            transport.abort()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "not in a task"
        self._tasks[task] = writer.transport
        try:
            inner_reader, inner_writer = await asyncio.open_connection(
                self._host, self._inner_port, limit=BUFFER_BYTES
            )
        except OSError:
            writer.transport.abort()
            del self._tasks[task]
            return
        there = asyncio.create_task(_pump(reader, inner_writer))
        back = asyncio.create_task(_pump(inner_reader, writer))
        try:
            # Either side's end is the end: nobody half-closes.
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
            if back.done() and back.result():
                writer.close()
        finally:
            for pump in (there, back):
                pump.cancel()
            await asyncio.wait((there, back))
            inner_writer.transport.abort()
            if not writer.is_closing():
                writer.transport.abort()
            del self._tasks[task]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Hand on until the end; True if that was orderly."""
    try:
        while piece := await reader.read(BUFFER_BYTES):
            writer.write(piece)
            await writer.drain()
    except OSError:  # a reset; ssl.SSLError is one too
        return False
    return True
