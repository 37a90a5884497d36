"""The cache disk: every call on a file or directory that the store makes, and nothing else.

Blocking; called from the store's disk threads. Data moves with `O_DIRECT` from page-aligned arena
slots: a tenth of the CPU of buffered writes, and the page cache stays the trainer's. Where a file
system refuses `O_DIRECT`, the same calls go through the page cache. `OSError` becomes
`StorageError` here, once; it stays the error's cause, for `is_shortage`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from gpufeed.cachefs.errors import StorageError
from gpufeed.cachefs.units import BLOCK_BYTES, format_bytes

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
# Errors of the process or the machine that say nothing about the file.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN})


@dataclass(frozen=True, slots=True)
class Space:
    """A file system's size and what of it unprivileged writers may still take.

    `total_inodes` is 0 where files are not counted.
    """

    free_bytes: int
    total_bytes: int
    free_inodes: int = 0
    total_inodes: int = 0


class Files(Protocol):
    """What the store needs of a disk. Every call raises `StorageError` when the disk refuses."""

    def create(self, path: str, size_bytes: int) -> int:
        """A new preallocated file; returns its descriptor."""
        ...

    def open(self, path: str) -> int:
        """An existing file, to read."""
        ...

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        ...

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Write all of `data`; offset and length are multiples of 4 KiB, memory page-aligned."""
        ...

    def read(self, descriptor: int, target: memoryview, offset: int) -> int:
        """Read up to ``len(target)`` bytes; fewer at the end of the file."""
        ...

    def sync(self, descriptor: int) -> None:
        """Make a file's data durable."""
        ...

    def publish(self, source: str, target: str) -> None:
        """Rename, and make the renaming durable."""
        ...

    def remove(self, path: str) -> None:
        """Unlink; a missing file is fine."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make what was made, renamed and removed in a directory durable."""
        ...

    def identity(self, path: str) -> tuple[int, int]:
        """What tells a file from every other: its device and its inode."""
        ...

    def space(self, path: str) -> Space:
        """Room on the file system that holds `path`."""
        ...


class DiskFiles:
    """Satisfies `Files` on a real directory."""

    def create(self, path: str, size_bytes: int) -> int:
        """See `Files`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with translated(f"create {path}"):
            descriptor = _open_direct(path, flags)
        try:
            with translated(f"preallocate {format_bytes(size_bytes)} for {path}"):
                _preallocate(descriptor, size_bytes)
        except StorageError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return descriptor

    def open(self, path: str) -> int:
        """See `Files`."""
        with translated(f"open {path}"):
            return _open_direct(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self, descriptor: int) -> None:
        """See `Files`."""
        os.close(descriptor)

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        """See `Files`."""
        done = 0
        while done < len(data):
            with translated(f"write {format_bytes(len(data))} at {offset}"):
                try:
                    written = os.pwrite(descriptor, data[done:], offset + done)
                except OSError as error:
                    if not _fall_back(descriptor, error):
                        raise
                    continue
            # A short direct write is followed by the error that cut it; never loop on nothing.
            if written == 0:
                raise StorageError("the cache disk wrote 0 bytes; is it full?")
            done += written

    def read(self, descriptor: int, target: memoryview, offset: int) -> int:
        """See `Files`."""
        done = 0
        while done < len(target):
            with translated(f"read {format_bytes(len(target))} at {offset}"):
                try:
                    found = os.preadv(descriptor, [target[done:]], offset + done)
                except OSError as error:
                    if not _fall_back(descriptor, error):
                        raise
                    continue
            done += found
            # Direct reads end at the end of the file; a fragment cannot be continued unaligned.
            if found == 0 or found % BLOCK_BYTES:
                break
        return done

    def sync(self, descriptor: int) -> None:
        """See `Files`."""
        with translated("sync a shard"):
            os.fdatasync(descriptor)

    def publish(self, source: str, target: str) -> None:
        """See `Files`."""
        with translated(f"rename {source}"):
            os.rename(source, target)
        self.sync_directory(os.path.dirname(target))

    def remove(self, path: str) -> None:
        """See `Files`."""
        with translated(f"remove {path}"), contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def sync_directory(self, path: str) -> None:
        """See `Files`."""
        with translated(f"sync the directory {path}"):
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def identity(self, path: str) -> tuple[int, int]:
        """See `Files`."""
        with translated(f"look at {path}"):
            found = os.stat(path)
        return found.st_dev, found.st_ino

    def space(self, path: str) -> Space:
        """See `Files`."""
        with translated(f"tell the free space of {path}"):
            found = os.statvfs(path)
        return Space(
            found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize,
            found.f_favail, found.f_files,
        )  # fmt: skip


def is_shortage(error: StorageError) -> bool:
    """Whether the machine was short of something, so that the file may be as good as ever."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _SHORTAGES


def is_missing(error: StorageError) -> bool:
    """Whether a file or directory is not there."""
    return isinstance(error.__cause__, FileNotFoundError)


def _preallocate(descriptor: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        # Not every file system can; it then finds out while writing whether there is room.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, size_bytes)


def _fall_back(descriptor: int, error: OSError) -> bool:
    """Some file systems accept `O_DIRECT` on opening and refuse it here. False: that is not it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


def _open_direct(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, FILE_MODE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The open that was refused for O_DIRECT may have made the file.
    return os.open(path, flags & ~os.O_EXCL, FILE_MODE)


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """`OSError` becomes `StorageError` that says what was refused."""
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "?")
        raise StorageError(
            f"the cache disk refused to {what}: {error.strerror} ({name}); the cache goes on "
            "without it: free space, or check the disk and its mount"
        ) from error


class AlignedBuffer:
    """Page-aligned memory for blocks that do not lie in the arena (headers, trailers)."""

    def __init__(self, data: bytes) -> None:
        assert len(data) % BLOCK_BYTES == 0, len(data)
        self._map = mmap.mmap(-1, len(data))
        self._map.write(data)
        self.view = memoryview(self._map)

    @classmethod
    def empty(cls, size_bytes: int) -> AlignedBuffer:
        """A buffer to read into."""
        return cls(bytes(size_bytes))

    def close(self) -> None:
        """Give the memory back."""
        self.view.release()
        self._map.close()
