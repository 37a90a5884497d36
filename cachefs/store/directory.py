"""The cache directory: its shape, its identity, its lock, and what a crash may have left in it.

::

    gpufeed.json     identity: format version and a UUID, so that nobody else's files are touched
    lock             held by `flock` while a daemon runs; a second one is refused
    index/           LMDB
    shards/00…ff/    a shard a file, named by its digest; ``*.tmp`` while it is being filled

A ``.tmp`` name is the intent record of a fill: whatever bears it at start was interrupted and goes.

A directory may be removed, or its disk unmounted, while the daemon runs. The same path then leads
nowhere, or to another directory below the mount, which must never be written to. So `verify` is
called before a file is made, named or removed: the identity file must be the one of the start.

Opened before the loop runs; afterwards `verify` from any disk thread, `remove` and `sync` from one
at a time.
"""

from __future__ import annotations

import bisect
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from gpufeed.cachefs.errors import OperatorError, StorageError
from gpufeed.cachefs.store.files import DIRECTORY_MODE, FILE_MODE, Files, is_missing, translated

FORMAT = 1
IDENTITY_NAME = "gpufeed.json"
TEMPORARY_SUFFIX = ".tmp"
LOCK_NAME = "lock"
FOLDERS_COUNT = 256
# What an unfinished first start, or mkfs, may have left in an otherwise empty directory.
_HARMLESS = frozenset({"lost+found", LOCK_NAME, IDENTITY_NAME + TEMPORARY_SUFFIX})
_DIGEST = re.compile(r"[0-9a-f]{32}")


class CacheDirectory:
    """An opened and locked cache directory."""

    def __init__(self, path: str, files: Files) -> None:
        self.path = path
        self._files = files
        self._lock = -1
        self._identity = (-1, -1)
        self._unsynced: set[str] = set()

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
            for name in ("index", "shards", *(f"shards/{i:02x}" for i in range(FOLDERS_COUNT))):
                os.makedirs(os.path.join(self.path, name), mode=DIRECTORY_MODE, exist_ok=True)
            self._identity = self._files.identity(self._identity_path)
        except OSError as error:
            self.close()
            raise StorageError(
                f"cannot use the cache directory {self.path}: {error.strerror}; choose another "
                "with --cache-path, or run without one (--memory-only)"
            ) from error
        except OperatorError:
            self.close()
            raise

    def check(self) -> None:
        """Check what `open` would of a directory that exists; nothing is made.

        Raises:
            OperatorError: as `open`.
            StorageError: the disk refused.
        """
        try:
            self._check_identity()
            if os.path.exists(os.path.join(self.path, LOCK_NAME)):
                self._take_lock()
        except OSError as error:
            raise StorageError(
                f"cannot use the cache directory {self.path}: {error.strerror}"
            ) from error
        finally:
            self.close()

    def _check_identity(self, *, write: bool = False) -> None:
        try:
            with open(self._identity_path, encoding="utf-8") as file:
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
                self._write_identity()
            return
        known = found if isinstance(found, dict) else {}
        if known.get("format") != FORMAT:
            raise OperatorError(
                f"{self.path} is a gpufeed cache of format {known.get('format')}, written by "
                f"{known.get('writer', 'an unknown version')}; this version knows {FORMAT}: use "
                "the version that wrote it, or empty the directory"
            )

    @property
    def _identity_path(self) -> str:
        return os.path.join(self.path, IDENTITY_NAME)

    def _write_identity(self) -> None:
        temporary = self._identity_path + TEMPORARY_SUFFIX
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        identity = {"format": FORMAT, "uuid": str(uuid.uuid4()), "writer": writer()}
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(identity, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self._identity_path)
        self._files.sync_directory(self.path)

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

    def verify(self) -> None:
        """Check that the path still leads to the directory that was opened.

        Raises:
            StorageError: it does not.
        """
        try:
            found = self._files.identity(self._identity_path)
        except StorageError as error:
            if not is_missing(error):
                raise
            found = None
        if found != self._identity:
            raise StorageError(
                f"the cache directory {self.path} is not the one that this daemon opened: it was "
                "removed, or its disk is no longer mounted there; the daemon goes on without a "
                "cache: mount the disk and restart it"
            )

    def remove(self, path: str) -> None:
        """Unlink a file; what a power loss may bring back until `sync`.

        Raises:
            StorageError: the disk refused.
        """
        self._files.remove(path)
        self._unsynced.add(os.path.dirname(path))

    def sync(self) -> None:
        """Make every removal durable.

        Raises:
            StorageError: the disk refused.
        """
        while self._unsynced:
            folder = next(iter(self._unsynced))
            self._files.sync_directory(folder)
            self._unsynced.discard(folder)

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

    def scan(self, known: Sequence[str]) -> Iterator[tuple[set[str], list[str]]]:
        """Compare the shards' folders with what should be there; removes interrupted fills.

        Foreign files are left alone.

        Args:
            known: digests, ascending.

        Yields:
            For each folder where something differs: known digests without a file, and digests that
            are not known.

        Raises:
            StorageError: the disk refused.
        """
        begin = 0
        for i in range(FOLDERS_COUNT):
            prefix = f"{i:02x}"
            folder = os.path.join(self.path, "shards", prefix)
            end = bisect.bisect_left(known, f"{i + 1:02x}", begin) if i < 0xFF else len(known)
            missing, begin = set(known[begin:end]), end
            with translated(f"list {folder}"):
                names = os.listdir(folder)
            if len(names) == len(missing) and missing.issuperset(names):
                continue
            orphans = []
            for name in names:
                if name in missing:
                    missing.remove(name)
                elif name.endswith(TEMPORARY_SUFFIX):
                    self.remove(os.path.join(folder, name))
                elif name[:2] == prefix and _DIGEST.fullmatch(name):
                    orphans.append(name)
            yield missing, orphans


def writer() -> str:
    """What this version calls itself in what it leaves on disk."""
    try:
        return f"gpufeed {version('gpufeed')}"
    except PackageNotFoundError:
        return "gpufeed (not installed)"
