"""Framed messages over a socket pair between the feeder and one worker.

A frame is its length (u64, little-endian) and its bytes. The feeder's end never blocks, in either
direction: a worker that is stopped, slow or dead in the middle of a frame cannot hold it up. The
worker's end blocks. Each worker has a pair of its own, so no lock is shared that a killed process
could hold.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

from gpufeed.cachefs.errors import ProtocolError
from gpufeed.cachefs.units import GIB, format_bytes

FRAME_BYTES_MAX = 4 * GIB
_LENGTH = struct.Struct("<Q")


def _check(length: int) -> int:
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(
            f"a message of {format_bytes(length)} between feeder and worker; the limit is "
            f"{format_bytes(FRAME_BYTES_MAX)}"
        )
    return length


class Channel:
    """The feeder's end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._out: deque[memoryview] = deque()
        self._head = bytearray(_LENGTH.size)
        self._body: bytearray | None = None
        self._have_bytes = 0

    def fileno(self) -> int:
        """For epoll."""
        return self._socket.fileno()

    @property
    def blocked(self) -> bool:
        """True while bytes wait for the worker to read; then wait for EPOLLOUT and `flush`."""
        return bool(self._out)

    def send(self, data: bytes) -> None:
        """Queue a frame and write what the socket takes.

        Raises:
            OSError: the worker is gone.
        """
        self._out.append(memoryview(_LENGTH.pack(_check(len(data))) + data))
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes.

        Raises:
            OSError: the worker is gone.
        """
        while self._out:
            data = self._out[0]
            try:
                sent = self._socket.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            if sent < len(data):
                self._out[0] = data[sent:]
            else:
                self._out.popleft()

    def receive(self) -> list[bytearray]:
        """The frames that are complete now; possibly none.

        Raises:
            EOFError: the worker closed its end, after its last whole frame was returned.
            OSError: the worker is gone.
        """
        frames: list[bytearray] = []
        while True:
            target = self._head if self._body is None else self._body
            try:
                got = self._socket.recv_into(memoryview(target)[self._have_bytes :])
            except BlockingIOError:
                return frames
            except ConnectionError:
                got = 0
            if got == 0:
                if frames:
                    return frames
                raise EOFError
            self._have_bytes += got
            if self._have_bytes < len(target):
                continue
            self._have_bytes = 0
            if self._body is None:
                self._body = bytearray(_check(_LENGTH.unpack(self._head)[0]))
                assert self._body, "frames are never empty"
            else:
                frames.append(self._body)
                self._body = None

    def close(self) -> None:
        """Close the feeder's end; the worker ends by it."""
        self._socket.close()


class WorkerChannel:
    """The worker's end."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock

    def fileno(self) -> int:
        """For the lifeline."""
        return self._socket.fileno()

    def receive(self) -> bytearray | None:
        """The next frame; None when the feeder closed its end or is gone."""
        head = self._exactly(_LENGTH.size)
        return None if head is None else self._exactly(_check(_LENGTH.unpack(head)[0]))

    def send(self, data: bytes) -> None:
        """Write a frame.

        Raises:
            OSError: the feeder is gone.
        """
        self._socket.sendall(_LENGTH.pack(_check(len(data))))
        self._socket.sendall(data)

    def _exactly(self, size: int) -> bytearray | None:
        data = bytearray(size)
        have = 0
        while have < size:
            try:
                got = self._socket.recv_into(memoryview(data)[have:])
            except ConnectionError:
                return None
            if got == 0:
                return None
            have += got
        return data
