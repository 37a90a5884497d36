"""The client's end of the socket: whole messages in and out, deadlines, and what a break means.

Knows how a message travels (one datagram, long bodies in a memfd), not what it says. `receive`
never waits; `wait` and `send` wait for the socket itself and for nothing else.

One thread receives at a time; several may send, since a datagram goes out whole or not at all.
"""

from __future__ import annotations

import os
import select
import socket
import time
from typing import Any

from gpufeed.cachefs import wire
from gpufeed.cachefs.bodies import body_to_memfd, close_all, require_whole
from gpufeed.cachefs.errors import DaemonUnavailableError
from gpufeed.cachefs.wire import Kind, Message

SEND_TIMEOUT_S = 60.0
# One recvmsg may bring the arena's descriptor or a body's, never more.
_DESCRIPTORS_MAX = 2


class Connection:
    """See the top of the file. Owns `sock`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    @classmethod
    def open(cls, socket_path: str, timeout_s: float) -> Connection:
        """Connect.

        Raises:
            DaemonUnavailableError: nobody listens there.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(timeout_s)
            sock.connect(socket_path)
            return cls(sock)
        except OSError as error:
            sock.close()
            raise DaemonUnavailableError(
                f"no gpufeed daemon answers at {socket_path} ({error.strerror or error}); "
                "start `gpufeed daemon`, or set GPUFEED_DAEMON=auto for an embedded one"
            ) from None
        except BaseException:
            sock.close()
            raise

    def fileno(self) -> int:
        """The socket, to wait on."""
        return self._sock.fileno()

    def send(
        self, data: bytes, timeout_s: float = SEND_TIMEOUT_S, descriptor: int | None = None
    ) -> None:
        """Send one packed message; the descriptor stays the caller's.

        Raises:
            DaemonUnavailableError: the daemon is gone, or takes nothing for `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self.try_send(data, descriptor):
            self._ready(select.POLLOUT, deadline_s)

    def try_send(self, data: bytes, descriptor: int | None = None) -> bool:
        """Send one packed message if the socket takes it now; False if it does not.

        Raises:
            DaemonUnavailableError: the daemon is gone.
        """
        try:
            if descriptor is None:
                self._sock.send(data)
            else:
                socket.send_fds(self._sock, [data], [descriptor])
        except BlockingIOError:
            return False
        except OSError as error:
            raise _closed(error) from None
        return True

    def send_json(self, kind: Kind, value: dict[str, Any], timeout_s: float) -> None:
        """Send a message with a JSON body, in a memfd where it is long."""
        body = wire.pack_json(value)
        if len(body) <= wire.INLINE_BODY_BYTES:
            self.send(wire.pack(kind, body), timeout_s)
            return
        descriptor = body_to_memfd(body)
        try:
            self.send(wire.pack(kind, in_memfd=True), timeout_s, descriptor)
        finally:
            os.close(descriptor)

    def receive(self) -> tuple[Message, list[int]]:
        """A message that is here now, and the descriptors that came with it: the caller's to close.

        Raises:
            BlockingIOError: none is here.
            DaemonUnavailableError: the daemon is gone.
            ProtocolError: no message of ours.
        """
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._sock, wire.MESSAGE_BYTES_MAX, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            raise
        except OSError as error:
            raise _closed(error) from None
        if not data:
            close_all(descriptors)
            raise DaemonUnavailableError("the daemon closed the session")
        try:
            require_whole(flags)
            return wire.unpack(data), descriptors
        except BaseException:
            close_all(descriptors)
            raise

    def wait(self, deadline_s: float) -> tuple[Message, list[int]]:
        """See `receive`, but wait until `deadline_s` (monotonic).

        Raises:
            DaemonUnavailableError: nothing came in time, or the daemon is gone.
        """
        while True:
            try:
                return self.receive()
            except BlockingIOError:
                self._ready(select.POLLIN, deadline_s)

    @property
    def is_cut(self) -> bool:
        """Whether either side has closed, also if messages from before wait to be received."""
        if self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock, 0)  # a hang-up is told unasked
        return bool(poll.poll(0))

    def _ready(self, what: int, deadline_s: float) -> None:
        poll = select.poll()
        poll.register(self._sock, what)
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            raise silence()

    def close(self) -> None:
        """Close the socket; the daemon takes back all that it lent."""
        self._sock.close()


def _closed(error: OSError) -> DaemonUnavailableError:
    return DaemonUnavailableError(
        f"the session with the daemon is closed ({error.strerror or error})"
    )


def silence() -> DaemonUnavailableError:
    """The daemon did not answer before a deadline."""
    return DaemonUnavailableError(
        "the daemon did not answer in time; see its log, and `gpufeed config show` for the origin "
        "that it asks"
    )
