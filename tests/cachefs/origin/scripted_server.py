"""A server that says exactly what a test wrote: raw bytes, request by request.

Runs on the test's loop. A script is a list of answers; each connection takes the next answers from
the one list. An answer is bytes, or a sequence of bytes and of the actions below.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
from collections.abc import AsyncIterator, Sequence


class Do(enum.Enum):
    CLOSE = "close in order"
    RESET = "reset"
    HANG = "send nothing more"


Answer = bytes | Sequence[bytes | Do]


class ScriptedServer:
    def __init__(self, script: Sequence[Answer]) -> None:
        self.script = list(script)
        self.requests: list[str] = []
        self.connections = 0
        self.hanging = asyncio.Event()
        self.gone = asyncio.Event()
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await self._talk(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            assert self.script, f"one request too many: {self.requests[-1]}"
            answer = self.script.pop(0)
            for step in [answer] if isinstance(answer, bytes) else answer:
                if step is Do.CLOSE:
                    return
                if step is Do.RESET:
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                if step is Do.HANG:
                    self.hanging.set()
                    with contextlib.suppress(OSError):
                        await reader.read()
                    self.gone.set()
                    return
                writer.write(step)
                await writer.drain()

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def scripted(*script: Answer) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(script)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        await server.stop()
        await listener.wait_closed()


def reply(status: int, body: bytes = b"", **headers: str) -> bytes:
    """An answer with its Content-Length, unless the headers give another (or "" for none)."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named.setdefault("content-length", str(len(body)))
    lines = [f"HTTP/1.1 {status} X", *(f"{n}: {v}" for n, v in named.items() if v)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def partial(data: bytes, begin: int, end: int, **headers: str) -> bytes:
    """A right 206."""
    told = f"bytes {begin}-{end - 1}/{len(data)}"
    return reply(206, data[begin:end], **{"content_range": told, **headers})


def error(status: int, code: str, **headers: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>m</Message><EC>e</EC></Error>".encode()
    return reply(status, body, **headers)
