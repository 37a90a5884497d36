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
import re
import uuid
from collections.abc import Iterator

from gpufeed.cachefs.errors import OperatorError, StorageError
from gpufeed.cachefs.store.files import DIRECTORY_MODE, FILE_MODE, translated

FORMAT = 1
IDENTITY_NAME = "gpufeed.json"
TEMPORARY_SUFFIX = ".tmp"
LOCK_NAME = "lock"
# What an unfinished first start, or mkfs, may have left in an otherwise empty directory.
_HARMLESS = frozenset({"lost+found", LOCK_NAME, IDENTITY_NAME + TEMPORARY_SUFFIX})
_DIGEST = re.compile(r"[0-9a-f]{32}")


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
            # Looked at before anything is made in it, and written under the lock.
            self._check_identity()
            self._take_lock()
            self._check_identity(write=True)
            for name in ("index", "shards", *(f"shards/{i:02x}" for i in range(256))):
                os.makedirs(os.path.join(self.path, name), mode=DIRECTORY_MODE, exist_ok=True)
        except OSError as error:
            self.close()
            raise StorageError(
                f"cannot use the cache directory {self.path}: {error.strerror}; choose another "
                "with --cache-path, or run without one (--memory-only)"
            ) from error
        except OperatorError:
            self.close()
            raise

    def _check_identity(self, *, write: bool = False) -> None:
        path = os.path.join(self.path, IDENTITY_NAME)
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
        except FileNotFoundError:
            found = None
        except ValueError:
            found = {}
        if found is None:
            others = sorted(set(os.listdir(self.path)) - _HARMLESS)
            if others:
                raise OperatorError(
                    f"{self.path} is not empty and no gpufeed cache (it holds {others[0]}, …); "
                    "choose an empty directory with --cache-path"
                )
            if write:
                self._write_identity(path)
            return
        version = found.get("format") if isinstance(found, dict) else None
        if version != FORMAT:
            raise OperatorError(
                f"{self.path} is a gpufeed cache of format {version}, this version "
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
            os.path.join(self.path, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE
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
        """Digests of all files that bear a committed shard's name. Removes interrupted fills.

        Raises:
            StorageError: the disk refused.
        """
        for i in range(256):
            folder = os.path.join(self.path, "shards", f"{i:02x}")
            with translated(f"list {folder}"), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith(TEMPORARY_SUFFIX):
                        os.unlink(entry.path)
                    elif _DIGEST.fullmatch(entry.name) and entry.name.startswith(f"{i:02x}"):
                        yield entry.name
