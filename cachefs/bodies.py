"""Bodies of messages that are too long for a datagram travel in a memfd; both sides need the same.

And whether a datagram came whole.

The sender makes one and passes its descriptor; the receiver reads it once and closes it. Nothing is
mapped, so a sender that changes or shrinks its memfd meanwhile can only spoil its own message.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterable

from gpufeed.cachefs import wire
from gpufeed.cachefs.errors import ProtocolError
from gpufeed.cachefs.wire import Message


def body_to_memfd(body: bytes) -> int:
    """A memfd with `body`; the caller closes it."""
    descriptor = os.memfd_create("gpufeed-body", os.MFD_CLOEXEC)
    view = memoryview(body)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor


def body_from_memfd(descriptor: int, limit_bytes: int = wire.MEMFD_BODY_BYTES_MAX) -> bytes:
    """The body in a memfd that came with a message, at most `limit_bytes` of it.

    Raises:
        ProtocolError: no regular, bounded memory behind it.
    """
    try:
        # Memory alone has seals. A file's disk or server may hang, and whoever reads it with it.
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
        if size > limit_bytes:
            raise ProtocolError(f"a message body of {size} bytes, over {limit_bytes}")
        return os.pread(descriptor, size, 0)
    except OSError as error:
        raise ProtocolError(f"a message body that cannot be read: {error.strerror}") from None


def with_body(
    message: Message, descriptors: list[int], limit_bytes: int = wire.MEMFD_BODY_BYTES_MAX
) -> Message:
    """The message with its body, wherever that travelled; closes the descriptors.

    Raises:
        ProtocolError: the body is missing, too long, or cannot be read.
    """
    try:
        if not message.in_memfd:
            return message
        if len(descriptors) != 1:
            raise ProtocolError(f"{message.kind.name} came without its body")
        return Message(message.kind, body_from_memfd(descriptors[0], limit_bytes))
    finally:
        close_all(descriptors)


def close_all(descriptors: Iterable[int]) -> None:
    """Close them all."""
    for descriptor in descriptors:
        os.close(descriptor)


def require_whole(flags: int) -> None:
    """A message came whole, by the flags that `recvmsg` gave with it.

    Raises:
        ProtocolError: it, or the descriptors with it, were cut.
    """
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ProtocolError(
            f"a message of more than {wire.MESSAGE_BYTES_MAX} bytes, or with more descriptors than "
            "any has"
        )
