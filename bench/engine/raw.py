"""The limit: blocking sockets, one thread a connection, `recv_into` the place where bytes belong.

Nothing in Python can receive for less. It trusts the server's headers but for the length.
"""

from __future__ import annotations

import socket

from gpufeed.bench.engine.clients import Part, ThreadClient
from gpufeed.bench.engine.objects import BUCKET
from gpufeed.cachefs.errors import IntegrityError, OriginUnavailableError

TIMEOUT_S = 60.0
_HEAD_BYTES_MAX = 16 * 1024
_BLANK_LINE = b"\r\n\r\n"


class RawClient(ThreadClient):
    """See the top of the file."""

    def get(self, part: Part) -> None:
        """See `ThreadClient`."""
        connection = self._connection()
        connection.sendall(
            f"GET /{BUCKET}/{part.item.key} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Range: bytes={part.begin_bytes}-{part.end_bytes - 1}\r\n\r\n".encode()
        )
        done = self._head(connection, part)
        while done < len(part.target):
            count = connection.recv_into(part.target[done:])
            if count == 0:
                raise OriginUnavailableError(f"{part.item.key}: the server closed the connection")
            done += count

    def _connection(self) -> socket.socket:
        connection: socket.socket | None = getattr(self.local, "connection", None)
        if connection is None:
            address = ("127.0.0.1", self.setting.source.port)
            connection = self.local.connection = socket.create_connection(address, TIMEOUT_S)
            # A timeout would make every receive two system calls.
            connection.settimeout(None)
        return connection

    @staticmethod
    def _head(connection: socket.socket, part: Part) -> int:
        """Read the answer's head; returns how many bytes of the body came with it."""
        head = bytearray()
        while (end := head.find(_BLANK_LINE)) < 0:
            chunk = connection.recv(_HEAD_BYTES_MAX)
            head += chunk
            if not chunk or len(head) > 2 * _HEAD_BYTES_MAX:
                raise OriginUnavailableError(
                    f"{part.item.key}: no answer, but {bytes(head[:80])!r}"
                )
        lines = bytes(head[:end]).lower().split(b"\r\n")
        if b" 206 " not in lines[0] or b"content-length: %d" % len(part.target) not in lines:
            raise IntegrityError(f"{part.item.key}: not the range that was asked for: {lines[:8]}")
        rest = memoryview(head)[end + len(_BLANK_LINE) :]
        part.target[: len(rest)] = rest
        return len(rest)
