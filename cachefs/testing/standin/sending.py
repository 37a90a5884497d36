"""What is still to be sent of one reply, and the rate that all replies share.

No sockets: `server.py` asks how much may go and says how much went. A `Sending` owns the descriptor
of its file until `close`.
"""

from __future__ import annotations

import errno
import os

from gpufeed.cachefs.testing.standin.replies import FileBody, Reply
from gpufeed.cachefs.testing.standin.scenario import Effects
from gpufeed.cachefs.units import KIB

# Up to here a body is read and sent with its head in one call; above it, sendfile.
INLINE_BODY_BYTES = 16 * KIB
# The total rate is dealt out in pieces of this size at least, so that each is worth its call.
RATE_PIECE_BYTES = 16 * KIB


class TotalRate:
    """A token bucket over all connections, in bytes. Deals at most a tenth of a second ahead."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at_s = 0.0

    def take(self, wanted_bytes: int, rate: int, now_s: float) -> tuple[int, float]:
        """Returns how many bytes may go now, and if none, how long to wait."""
        self._tokens = min(rate * 0.1, self._tokens + (now_s - self._at_s) * rate)
        self._at_s = now_s
        piece = min(wanted_bytes, RATE_PIECE_BYTES, max(1, rate // 10))
        if self._tokens < piece:
            return 0, max(0.001, (piece - self._tokens) / rate)
        granted = min(wanted_bytes, int(self._tokens))
        self._tokens -= granted
        return granted, 0.0


class Sending:
    """What is still to be sent of one reply.

    The file is opened here, when its headers are made, not when the first byte leaves: an object
    that is replaced in between goes out whole, in its old version.

    Raises:
        OSError: the file is not the one that the headers describe any more.
    """

    def __init__(self, head: bytes, reply: Reply, effects: Effects, name: str) -> None:
        self.head = memoryview(head)
        self.name = name
        self.effects = effects
        self.sent_bytes = 0
        self.total_bytes = 0 if reply.is_head else reply.size_bytes
        self.body = memoryview(b"")
        self.file = -1
        self.offset = 0
        self.stalled = False
        if reply.is_head or not self.total_bytes:
            return
        if reply.file is None:
            self.body = memoryview(reply.body)
            return
        self.file = os.open(reply.file.path, os.O_RDONLY | os.O_CLOEXEC)
        self.offset = reply.file.offset_bytes
        try:
            self._check(reply.file)
            if effects.touches_body or self.total_bytes <= INLINE_BODY_BYTES:
                self._read(effects.flip_byte_at)
        except OSError:
            self.close()
            raise

    def _check(self, wanted: FileBody) -> None:
        found = os.fstat(self.file)
        if (found.st_size, found.st_mtime) != (wanted.file_bytes, wanted.modified_s):
            raise OSError(errno.ESTALE, "the object changed while it was looked up")

    def _read(self, flip_at: int | None) -> None:
        data = os.pread(self.file, self.total_bytes, self.offset)
        if len(data) < self.total_bytes:
            raise OSError(errno.ESTALE, "the object became shorter while it was read")
        self.close()
        if flip_at is not None and flip_at < len(data):
            data = data[:flip_at] + bytes([data[flip_at] ^ 0xFF]) + data[flip_at + 1 :]
        self.body = memoryview(data)

    def close(self) -> None:
        """Give the file back; may be repeated."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def limit(self) -> int | None:
        """How many more bytes may go before a fault strikes; None: no fault ahead."""
        marks = [
            mark - self.sent_bytes
            for mark in (self.effects.reset_after_bytes, self.effects.truncate_after_bytes)
            if mark is not None
        ]
        if self.effects.stall_after_bytes is not None and not self.stalled:
            marks.append(self.effects.stall_after_bytes - self.sent_bytes)
        return max(0, min(marks)) if marks else None
