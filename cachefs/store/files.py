"""The cache disk: every call on a file or directory that the store makes, and nothing else.

Blocking; called from the store's disk threads. Data moves with `O_DIRECT` from page-aligned arena
slots: a tenth of the CPU of buffered writes, and the page cache stays the trainer's. Where a file
system refuses `O_DIRECT`, the same calls go through the page cache. `OSError` becomes
`StorageError` here, once.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from typing import Protocol

from gpufeed.cachefs.errors import StorageError
from gpufeed.cachefs.units import BLOCK_BYTES, format_bytes

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


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


class DiskFiles:
    """Satisfies `Files` on a real directory."""

    def create(self, path: str, size_bytes: int) -> int:
        """See `Files`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _translated(f"create {path}"):
            descriptor = _open_direct(path, flags)
        try:
            with _translated(f"preallocate {format_bytes(size_bytes)} for {path}"):
                os.posix_fallocate(descriptor, 0, size_bytes)
        except StorageError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        return descriptor

    def open(self, path: str) -> int:
        """See `Files`."""
        with _translated(f"open {path}"):
            return _open_direct(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self, descriptor: int) -> None:
        """See `Files`."""
        os.close(descriptor)

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        """See `Files`."""
        done = 0
        while done < len(data):
            with _translated(f"write {format_bytes(len(data))} at {offset}"):
                written = os.pwrite(descriptor, data[done:], offset + done)
            # A short direct write is followed by the error that cut it; never loop on nothing.
            if written == 0:
                raise StorageError("the cache disk wrote 0 bytes; is it full?")
            done += written

    def read(self, descriptor: int, target: memoryview, offset: int) -> int:
        """See `Files`."""
        done = 0
        while done < len(target):
            with _translated(f"read {format_bytes(len(target))} at {offset}"):
                found = os.preadv(descriptor, [target[done:]], offset + done)
            done += found
            # Direct reads end at the end of the file; a fragment cannot be continued unaligned.
            if found == 0 or found % BLOCK_BYTES:
                break
        return done

    def sync(self, descriptor: int) -> None:
        """See `Files`."""
        with _translated("sync a shard"):
            os.fdatasync(descriptor)

    def publish(self, source: str, target: str) -> None:
        """See `Files`."""
        with _translated(f"rename {source}"):
            os.rename(source, target)
            directory = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def remove(self, path: str) -> None:
        """See `Files`."""
        with _translated(f"remove {path}"), contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _open_direct(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, FILE_MODE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # An O_CREAT that was refused for O_DIRECT may have made the file.
    return os.open(path, flags & ~os.O_EXCL, FILE_MODE)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "?")
        raise StorageError(
            f"the cache disk refused to {what}: {error.strerror} ({name}); the cache goes on "
            "without it: free space, or check the disk and its mount"
        ) from None


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
