"""Which arenas there are at one socket: this daemon's, and those of daemons before it in use still.

An arena lives as long as anybody maps it, also after a kill -9 of its daemon, and its memory stays
charged to the daemon's container. Nobody needs to tell of it: each arena has a small file beside
the socket, locked by `flock`, and whoever gets the arena gets the locked descriptor with it and
keeps it (as a mapping, see `gpufeed.cachefs.session`) exactly as long. The kernel gives the lock up
with the last of them, however they end. So a file that can be locked is of an arena that is gone.

The file, all numbers little-endian::

    0     magic "GFAL", version, reserved, CRC-32 of the first 64 bytes (with this field zero)
    12    arena id (32 hex digits), size in bytes
    64    bytes that were touched, and so have memory; grows only

It appears under its name, ``<arena id>.<tenant>``, whole and locked. Clients get it open for
reading, and one that is root may open it for writing: what is written there is never mapped, it
says nothing of any tenant but the one that it is named after, and nothing of an arena of ours that
is alive. So a client that forges it, or breaks its lock, hides or inflates its own tenant's old
memory. Whoever sees the folder and may open the files could keep a lock for ever: it is the
daemon's user's alone.

Owned by the daemon's loop; a look takes some 20 us a file, of which there is one an arena.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpufeed.cachefs.errors import OperatorError

MAGIC = b"GFAL"
VERSION = 1
_HEAD = struct.Struct("<4sHHI32sQ")
_CRC_AT = 8
_TOUCHED = struct.Struct("<Q")
TOUCHED_OFFSET = 64
ENTRY_BYTES = TOUCHED_OFFSET + _TOUCHED.size
FOLDER_SUFFIX = ".arenas"
_UNFINISHED = "new-"
# Gone meanwhile; a link or a socket, which we do not make.
_NOT_OURS = frozenset({errno.ENOENT, errno.ELOOP, errno.ENXIO})


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """An arena that is mapped still: its id, and the bytes that have memory."""

    arena_id: str
    touched_bytes: int


def pack_entry(arena_id: str, size_bytes: int) -> bytes:
    """A file whose arena was not touched yet."""
    fields = (arena_id.encode("ascii"), size_bytes)
    block = bytearray(_HEAD.pack(MAGIC, VERSION, 0, 0, *fields).ljust(TOUCHED_OFFSET, b"\0"))
    struct.pack_into("<I", block, _CRC_AT, zlib.crc32(block))
    return bytes(block) + _TOUCHED.pack(0)


def unpack_entry(data: bytes) -> Elsewhere | None:
    """What a file says; None: it is not one of ours, or damaged."""
    if len(data) < ENTRY_BYTES:
        return None
    magic, version, _, crc, arena_id, size_bytes = _HEAD.unpack_from(data)
    clean = bytearray(data[:TOUCHED_OFFSET])
    clean[_CRC_AT : _CRC_AT + 4] = bytes(4)
    if magic != MAGIC or version != VERSION or zlib.crc32(clean) != crc:
        return None
    (touched_bytes,) = _TOUCHED.unpack_from(data, TOUCHED_OFFSET)
    return Elsewhere(arena_id.decode("ascii", "replace"), min(touched_bytes, size_bytes))


class ArenaEntry:
    """The file of one arena of ours. `fd` is locked, and goes to whoever gets the arena."""

    def __init__(self, folder: str, arena_id: str, size_bytes: int, tenant: str) -> None:
        self._path = os.path.join(folder, f"{arena_id}.{tenant}")
        unfinished = os.path.join(folder, _UNFINISHED + arena_id)
        self._writing = os.open(
            unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        self.fd = -1
        try:
            os.write(self._writing, pack_entry(arena_id, size_bytes))
            # Another open file than the one that is written to: its lock is what clients share.
            self.fd = os.open(unfinished, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(unfinished, self._path)
        except BaseException:
            self._close_all()
            os.unlink(unfinished)
            raise

    def touched(self, touched_bytes: int) -> None:
        """So much of the arena has memory now."""
        # In place; only a full file system that copies on write refuses, and keeps what was told.
        with contextlib.suppress(OSError):
            os.pwrite(self._writing, _TOUCHED.pack(touched_bytes), TOUCHED_OFFSET)

    def close(self) -> None:
        """The daemon lets go. The file goes with it, unless a client maps the arena still."""
        self._close_all()
        _clear(self._path)
        with contextlib.suppress(OSError):  # another arena's file is there
            os.rmdir(os.path.dirname(self._path))

    def _close_all(self) -> None:
        for fd in (self.fd, self._writing):
            if fd >= 0:
                os.close(fd)
        self.fd = self._writing = -1


class ArenaLedger:
    """All arenas at one socket.

    Args:
        socket_path: where the daemon listens, which is locked: one daemon writes here at a time.
        tenants: names of today's; what is left of others counts for each of these.
    """

    def __init__(self, socket_path: str, tenants: Iterable[str] = ("",)) -> None:
        self._folder = socket_path + FOLDER_SUFFIX
        self._tenants = frozenset(tenants)
        self._own_ids: set[str] = set()

    def enter(self, arena_id: str, size_bytes: int, tenant: str) -> ArenaEntry:
        """A file for a new arena.

        Raises:
            OperatorError: it cannot be made.
        """
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)
            entry = ArenaEntry(self._folder, arena_id, size_bytes, tenant)
            self._own_ids.add(arena_id)
            return entry
        except OSError as error:
            raise OperatorError(
                f"{self._folder} cannot be written ({error.strerror}): arenas in use are kept "
                "there; give the daemon write access to the directory of its socket"
            ) from None

    def bytes_elsewhere(self, tenant: str) -> int:
        """Memory of others' arenas that counts for this tenant. Files of none are removed.

        Raises:
            OSError: it cannot be looked at, for want of descriptors for example.
        """
        return sum(
            found.touched_bytes
            for whose, found in self._elsewhere()
            if whose == tenant or whose not in self._tenants
        )

    def _elsewhere(self) -> Iterator[tuple[str, Elsewhere]]:
        """Whose, and what."""
        try:
            names = sorted(os.listdir(self._folder))
        except FileNotFoundError:
            return
        for name in names:
            arena_id, _, tenant = name.partition(".")
            if arena_id not in self._own_ids:
                found = _clear(os.path.join(self._folder, name))
                if found is not None and found.arena_id == arena_id:
                    yield tenant, found


def _clear(path: str) -> Elsewhere | None:
    """Remove the file if nobody has its lock; else what it says, if it is ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _NOT_OURS:
            return None
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return unpack_entry(os.pread(fd, ENTRY_BYTES, 0))
    else:
        with contextlib.suppress(IsADirectoryError):  # not ours
            os.unlink(path)
        return None
    finally:
        os.close(fd)
