"""Files read through a daemon: one version of one object, copied out of the arena as asked for.

`RemoteFile` is the object behind the daemon; `ReadingFile` is what `open` returns: Python's own
buffered reader over it, so that lines and small reads cost no round trip each, while a read of more
than the buffer goes from the arena straight into the caller's memory.

Invariants:
    - all bytes are of the version that was there when the file was opened, or the read is an error,
      also over a daemon's restart and in a forked child, each of which opens that version anew;
    - extents are lent for the time of a copy, at most `READ_AHEAD_EXTENTS` of them.

A `RemoteFile` may be read by several threads; a `ReadingFile` has one position, as every file.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Callable, Mapping
from typing import Any

from gpufeed.cachefs.calls import Calls, shared
from gpufeed.cachefs.errors import DaemonUnavailableError
from gpufeed.cachefs.fserrors import as_os_errors
from gpufeed.cachefs.rangeviews import RangeView
from gpufeed.cachefs.samples import ReadStats
from gpufeed.cachefs.wire import Kind

# Neighbouring extents asked for at once, so that the origin is asked for them together.
READ_AHEAD_EXTENTS = 4
BUFFER_BYTES = 512 * 1024


class Place:
    """Where files come from: a daemon, and the storage options that it gets with each request."""

    def __init__(self, daemon: str | None, options: Mapping[str, str]) -> None:
        self._daemon = daemon
        self._options = dict(options)

    def calls(self) -> Calls:
        """The process's session."""
        return shared(self._daemon)

    def ask(self, kind: Kind, url: str, **more: object) -> dict[str, Any]:
        """One request about an address; a daemon that went away is sought once more.

        Raises:
            GpufeedError: as the daemon says, or it is gone.
        """
        try:
            return self.ask_on(self.calls(), kind, url, **more)
        except DaemonUnavailableError:
            return self.ask_on(self.calls(), kind, url, **more)

    def ask_on(self, calls: Calls, kind: Kind, url: str, **more: object) -> dict[str, Any]:
        """One request about an address, on this session."""
        return calls.ask(kind, {"url": url, "storage_options": self._options, **more})


class RemoteFile:
    """See the top of the file. Opened when made.

    Args:
        place: where it comes from.
        url: full address at the origin.
        etag: the version wanted; None takes the one that is there now.

    Raises:
        GpufeedError: it is not there, may not be read, or is of another version than wanted.
    """

    def __init__(self, place: Place, url: str, *, etag: str | None = None) -> None:
        self._place = place
        self.url = url
        calls = place.calls()
        pinned = {} if etag is None else {"etag": etag}
        try:
            told = place.ask_on(calls, Kind.FILE_OPEN, url, **pinned)
        except DaemonUnavailableError:
            calls = place.calls()
            told = place.ask_on(calls, Kind.FILE_OPEN, url, **pinned)
        self.size_bytes = int(told["size"])
        self.etag = str(told["etag"])
        # Changed as a whole, so that threads need no lock, which a fork could leave taken.
        self._handle: tuple[Calls, int] = (calls, int(told["file"]))

    def read_into(self, begin_bytes: int, view: memoryview) -> int:
        """Copy ``[begin_bytes, begin_bytes + len(view))``, less what lies behind the end.

        Returns:
            Bytes copied.

        Raises:
            ShardChangedError: the object is of another version by now.
            GpufeedError: as the daemon says, or it is gone.
        """
        end_bytes = min(self.size_bytes, begin_bytes + len(view))
        if begin_bytes >= end_bytes:
            return 0
        view = view[: end_bytes - begin_bytes]
        try:
            self._copy(*self._opened(), begin_bytes, view)
        except DaemonUnavailableError:
            self._copy(*self._opened(), begin_bytes, view)
        return len(view)

    def _opened(self) -> tuple[Calls, int]:
        """The session, and the file's number in it."""
        calls, _ = before = self._handle
        now = self._place.calls()
        if now is calls:
            return before
        told = self._place.ask_on(now, Kind.FILE_OPEN, self.url, etag=self.etag)
        opened = (now, int(told["file"]))
        if self._handle is not before:
            # Another thread was faster.
            now.close_file(opened[1])
            return self._handle
        self._handle = opened
        return opened

    def read_view(self, begin_bytes: int, end_bytes: int, stats: ReadStats) -> memoryview:
        """The bytes of a half-open range, less what lies behind the end; in place where it can be.

        Raises:
            ShardChangedError: the object is of another version by now.
            GpufeedError: as the daemon says, or it is gone.
        """
        end_bytes = min(self.size_bytes, end_bytes)
        if begin_bytes >= end_bytes:
            return memoryview(b"")
        calls, number = self._opened()
        found = RangeView(calls.leases, begin_bytes, end_bytes, stats)
        fetch(calls, number, begin_bytes, end_bytes, lambda _, lent: found.take(*_lease(lent)))
        return found.view()

    def _copy(self, calls: Calls, number: int, begin_bytes: int, view: memoryview) -> None:
        def take(place: int, lent: dict[str, Any]) -> None:
            try:
                low = max(place, begin_bytes)
                high = min(place + lent["length"], end_bytes)
                into = view[low - begin_bytes : high - begin_bytes]
                calls.copy(lent, low - place, into)
            finally:
                calls.release(lent["seq"])

        end_bytes = begin_bytes + len(view)
        fetch(calls, number, begin_bytes, end_bytes, take)

    def close(self) -> None:
        """Let go of it. Never waits, so that it may be done by a finaliser."""
        calls, number = self._handle
        calls.close_file(number)


def fetch(
    calls: Calls,
    number: int,
    begin_bytes: int,
    end_bytes: int,
    take: Callable[[int, dict[str, Any]], None],
) -> None:
    """Ask for a file's extents that hold a range, several at a time.

    Args:
        calls: the session.
        number: the file's, in it.
        begin_bytes: of the range.
        end_bytes: of the range; it is not empty.
        take: gets where an extent begins in the file, and what was lent, in ascending order; the
            lease is its own from then on.

    Raises:
        GpufeedError: as the daemon says, or it is gone.
    """
    extent_bytes = calls.extent_bytes
    following, last = begin_bytes // extent_bytes, (end_bytes - 1) // extent_bytes
    asked: collections.deque[tuple[int, int]] = collections.deque()
    with calls.leases.pinned():
        try:
            while following <= last or asked:
                while following <= last and len(asked) < READ_AHEAD_EXTENTS:
                    body = {"file": number, "extent": following}
                    call = calls.begin(Kind.FILE_READ, body, wait=not asked)
                    if call is None:
                        break
                    asked.append((following * extent_bytes, call))
                    following += 1
                place, call = asked.popleft()
                take(place, calls.finish(call))
        finally:
            for _, call in asked:
                calls.forget(call)


def _lease(lent: dict[str, Any]) -> tuple[int, int, int]:
    return int(lent["seq"]), int(lent["slot"]), int(lent["length"])


class _Raw(io.RawIOBase):
    """A `RemoteFile` with a position."""

    mode = "rb"

    def __init__(self, remote: RemoteFile, *, closes: bool = True) -> None:
        self.remote = remote
        self._closes = closes
        self._at_bytes = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at_bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at_bytes, io.SEEK_END: self.remote.size_bytes}
        if whence not in base:
            raise ValueError(f"whence is {whence}; it must be 0, 1 or 2")
        at_bytes = base[whence] + offset
        if at_bytes < 0:
            raise ValueError(f"a position of {at_bytes} lies before the file's start")
        self._at_bytes = at_bytes
        return at_bytes

    def readinto(self, buffer: Any) -> int:
        with as_os_errors():
            count = self.remote.read_into(self._at_bytes, memoryview(buffer).cast("B"))
        self._at_bytes += count
        return count

    def readall(self) -> bytes:
        data = read_range(self.remote, self._at_bytes, self.remote.size_bytes)
        self._at_bytes += len(data)
        return data

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._closes:
                self.remote.close()


class ReadingFile(io.BufferedReader):
    """What `open(path, "rb")` returns.

    Attributes:
        fs: the filesystem that it is of.
        path: its path there.
        size: bytes.
        blocksize: bytes of the buffer.
        details: as `fs.info` tells them, of the version that is read.
    """

    def __init__(self, fs: Any, path: str, remote: RemoteFile, buffer_bytes: int) -> None:
        super().__init__(_Raw(remote), buffer_bytes)
        self.fs = fs
        self.path = path
        self.size = remote.size_bytes
        self.blocksize = buffer_bytes
        self.details = {
            "name": path, "type": "file", "size": self.size, "etag": remote.etag,
            "ETag": remote.etag,
        }  # fmt: skip

    def info(self) -> dict[str, Any]:
        """See `details`."""
        return self.details

    @property
    def full_name(self) -> str:
        """The path with its protocol."""
        return str(self.fs.unstrip_protocol(self.path))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Elsewhere, it is opened again: the same version, at the same position, or an error."""
        return _reopen, (self.fs, self.path, self.blocksize, self.details["etag"], self.tell())


def _reopen(fs: Any, path: str, buffer_bytes: int, etag: str, at_bytes: int) -> Any:
    file = fs.open(path, "rb", block_size=buffer_bytes, etag=etag)
    file.seek(at_bytes)
    return file


def read_range(remote: RemoteFile, begin_bytes: int, end_bytes: int) -> bytes:
    """The bytes of a half-open range, less what lies behind the end.

    Raises:
        OSError: as of `fserrors`.
    """
    size_bytes = min(end_bytes, remote.size_bytes) - begin_bytes
    if size_bytes <= 0:
        return b""
    raw = _Raw(remote, closes=False)
    raw.seek(begin_bytes)
    # Python's reader alone fills a `bytes` in place; with no buffer to speak of, by one call.
    return io.BufferedReader(raw, 1).read(size_bytes)
