"""The cache directory: its shape, its identity, its lock, and what a crash may have left in it.

::

    gpufeed.json     identity: format version and a UUID, so that nobody else's files are touched
    lock             held by `flock` while a daemon runs; a second one is refused
    index/           LMDB
    shards/00…ff/    a shard a file, named by its digest; ``*.tmp`` while it is being filled

A ``.tmp`` name is the intent record of a fill: whatever bears it at start was interrupted and goes.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterator

from gpufeed.cachefs import layout
from gpufeed.cachefs.errors import IntegrityError, OperatorError, StorageError
from gpufeed.cachefs.layout import Record
from gpufeed.cachefs.store.files import DIRECTORY_MODE, FILE_MODE, AlignedBuffer, Files
from gpufeed.cachefs.store.index import Index

FORMAT = 1
IDENTITY_NAME = "gpufeed.json"
TEMPORARY_SUFFIX = ".tmp"


class CacheDirectory:
    """An opened and locked cache directory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = -1

    def open(self) -> None:
        """Make or check the directory and take its lock.

        Raises:
            OperatorError: another daemon uses it, it is not a cache directory, or is of another
                format.
            StorageError: the disk refused.
        """
        try:
            os.makedirs(self.path, mode=DIRECTORY_MODE, exist_ok=True)
            self._check_identity()
            self._take_lock()
            for name in ("index", "shards", *(f"shards/{i:02x}" for i in range(256))):
                os.makedirs(os.path.join(self.path, name), mode=DIRECTORY_MODE, exist_ok=True)
        except OSError as error:
            self.close()
            raise StorageError(
                f"cannot use the cache directory {self.path}: {error.strerror}; choose another "
                "with --cache-path, or run without one (--memory-only)"
            ) from None

    def _check_identity(self) -> None:
        path = os.path.join(self.path, IDENTITY_NAME)
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
        except FileNotFoundError:
            found = None
        except ValueError:
            found = {}
        if found is None:
            others = sorted(set(os.listdir(self.path)) - {"lost+found", "lock"})
            if others:
                raise OperatorError(
                    f"{self.path} is not empty and no gpufeed cache (it holds {others[0]}, …); "
                    "choose an empty directory with --cache-path"
                )
            self._write_identity(path)
        elif found.get("format") != FORMAT:
            raise OperatorError(
                f"{self.path} is a gpufeed cache of format {found.get('format')}, this version "
                f"knows {FORMAT}: use the version that wrote it, or empty the directory"
            )

    @staticmethod
    def _write_identity(path: str) -> None:
        temporary = path + TEMPORARY_SUFFIX
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, "uuid": str(uuid.uuid4())}, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)

    def _take_lock(self) -> None:
        descriptor = os.open(
            os.path.join(self.path, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OperatorError(
                f"another gpufeed daemon uses the cache directory {self.path}: stop it, connect to "
                "it (GPUFEED_DAEMON), or choose another directory with --cache-path"
            ) from None
        self._lock = descriptor

    def close(self) -> None:
        """Let the lock go."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def index_path(self) -> str:
        """Where the index lies."""
        return os.path.join(self.path, "index")

    def shard_path(self, digest: str) -> str:
        """Where a committed shard lies."""
        return os.path.join(self.path, "shards", digest[:2], digest)

    def temporary_path(self, digest: str, number: int) -> str:
        """Where a shard lies while fill `number` writes it."""
        return f"{self.shard_path(digest)}.{number}{TEMPORARY_SUFFIX}"

    def scan(self) -> Iterator[str]:
        """Digests of all files that bear a committed shard's name. Removes interrupted fills."""
        for i in range(256):
            with os.scandir(os.path.join(self.path, "shards", f"{i:02x}")) as entries:
                for entry in entries:
                    if entry.name.endswith(TEMPORARY_SUFFIX):
                        os.unlink(entry.path)
                    elif len(entry.name) == 32:
                        yield entry.name


def read_self_description(files: Files, path: str, digest: str) -> Record:
    """What a shard's file says of itself.

    Raises:
        IntegrityError: it is damaged, or another shard's.
        StorageError: it cannot be read.
    """
    descriptor = files.open(path)
    try:
        header = layout.unpack_header(_read(files, descriptor, 0, layout.HEADER_BYTES))
        if header.digest != digest:
            raise IntegrityError(f"{path} holds the shard {header.digest}")
        trailer = _read(files, descriptor, header.trailer_offset, header.trailer_bytes)
        return layout.unpack_trailer(header, trailer)
    finally:
        files.close(descriptor)


def _read(files: Files, descriptor: int, offset: int, size_bytes: int) -> bytes:
    buffer = AlignedBuffer.empty(size_bytes)
    try:
        found = files.read(descriptor, buffer.view, offset)
        return bytes(buffer.view[:found])
    finally:
        buffer.close()


def reconcile(directory: CacheDirectory, index: Index, files: Files) -> dict[str, Record]:
    """Make index and files agree; returns what is committed (without sample indexes).

    A file without a record is adopted if its self-description is right, and removed if not; a
    record without a file is dropped.
    """
    on_disk = set(directory.scan())
    records: dict[str, Record] = {}
    dropped = []
    for digest, value in index.items():
        try:
            record = layout.unpack_record(value, with_index=False)
        except IntegrityError:
            dropped.append(digest)
            continue
        if digest in on_disk:
            records[digest] = record
        else:
            dropped.append(digest)
    if dropped:
        index.delete(dropped)
    for digest in on_disk - records.keys():
        path = directory.shard_path(digest)
        try:
            record = read_self_description(files, path, digest)
        except (IntegrityError, StorageError):
            files.remove(path)
            continue
        index.put(digest, layout.pack_record(record))
        records[digest] = record
    return records
