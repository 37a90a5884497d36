"""The daemon's Unix socket and the lock that guards it.

Next to the socket lies ``<socket>.lock``. Whoever holds its `flock` may bind the socket, replace a
stale one or remove it: so a crash leaves nothing that has to be cleaned by hand, and two daemons
never fight over one path. An embedded daemon and the loaders that start it use the same lock to
agree on who starts one and when it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

from gpufeed.cachefs.errors import OperatorError
from gpufeed.cachefs.paths import ensure_private_directory

BACKLOG = 128
# sun_path, less the final zero.
SOCKET_PATH_BYTES_MAX = 107


class SocketLock:
    """Holds ``<socket>.lock``. The file stays, empty: removing it would break the lock."""

    def __init__(self, socket_path: str) -> None:
        self.path = socket_path + ".lock"
        self._descriptor = -1

    def acquire(self, *, wait: bool) -> bool:
        """Take the lock; False if somebody has it and `wait` is not set.

        Raises:
            OperatorError: the directory cannot be written.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OperatorError(f"cannot lock {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Let go."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_taken(socket_path: str) -> bool:
    """Whether a daemon listens there, or is about to; nothing is made."""
    try:
        descriptor = os.open(socket_path + ".lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def bind(socket_path: str, mode: int = 0o600) -> socket.socket:
    """Bind and listen. The caller holds the socket's lock.

    Args:
        socket_path: where.
        mode: who may connect, as far as permissions say.

    Raises:
        OperatorError: the path is too long, or the directory is not ours.
    """
    if len(os.fsencode(socket_path)) > SOCKET_PATH_BYTES_MAX:
        raise OperatorError(
            f"the socket path {socket_path} is longer than {SOCKET_PATH_BYTES_MAX} bytes; choose a "
            "shorter one with --socket"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket_path)
        sock.bind(socket_path)
        os.chmod(socket_path, mode)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise OperatorError(f"cannot listen at {socket_path}: {error.strerror}") from None
    return sock


@contextlib.contextmanager
def listening(
    socket_path: str, *, wait: bool = False, mode: int = 0o600
) -> Iterator[socket.socket]:
    """A listening socket for the life of a daemon; the path is removed afterwards.

    Args:
        socket_path: where to listen; its directory is made, private, if missing.
        mode: of the socket, see `bind`.
        wait: let a daemon that is ending finish first, instead of refusing.

    Raises:
        OperatorError: another daemon has it.
    """
    directory = os.path.dirname(socket_path) or "."
    if not os.path.isdir(directory):
        ensure_private_directory(directory)
    lock = SocketLock(socket_path)
    if not lock.acquire(wait=wait):
        raise OperatorError(
            f"another gpufeed daemon listens at {socket_path}; stop it, or choose another path "
            "with --socket"
        )
    try:
        sock = bind(socket_path, mode)
        try:
            yield sock
        finally:
            sock.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(socket_path)
    finally:
        lock.release()
