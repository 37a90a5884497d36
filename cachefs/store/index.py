"""The index: one LMDB environment, a record a shard. Transactions only, no decisions.

Three tables by digest: records, packed sample indexes (apart, so that a start reads only records),
and serial numbers of last use. One writer at a time: LMDB's own lock orders the disk threads. The
map is large and fixed (address space, not memory), so it is never resized under readers. Each
write is one synced transaction: a shard is tens of megabytes, beside which a sync is little.

The index can be rebuilt from the shards' files, so an environment that is damaged or of another
schema is thrown away at start rather than repaired.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping

import lmdb

from gpufeed.cachefs import layout
from gpufeed.cachefs.errors import StorageError
from gpufeed.cachefs.layout import Record
from gpufeed.cachefs.store.files import FILE_MODE
from gpufeed.cachefs.units import GIB

MAP_BYTES = 64 * GIB
SCHEMA_KEY = b"schema"
SCHEMA = b"2"
_FILE_NAMES = ("data.mdb", "lock.mdb")
_LOG = logging.getLogger("gpufeed.store")


class Index:
    """The environment in the directory `path`.

    Raises:
        StorageError: it cannot be opened, nor made anew.
    """

    def __init__(self, path: str) -> None:
        try:
            self._open(path)
            if self._schema() == SCHEMA:
                return
            reason = f"schema {self._schema()!r}, not {SCHEMA!r}"
            self._env.close()
        except lmdb.Error as error:
            reason = str(error)
        _LOG.warning("the cache index at %s is rebuilt from the files: %s", path, reason)
        for name in _FILE_NAMES:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(path, name))
        try:
            self._open(path)
        except lmdb.Error as error:
            raise StorageError(
                f"cannot make the cache index at {path}: {error}; check the disk and its mount"
            ) from error

    def _open(self, path: str) -> None:
        self._env = lmdb.open(path, map_size=MAP_BYTES, mode=FILE_MODE, max_dbs=4)
        try:
            # Readers of a daemon that was killed.
            self._env.reader_check()
            self._meta, self._records, self._samples, self._uses = (
                self._env.open_db(name) for name in (b"meta", b"records", b"samples", b"uses")
            )
            with self._env.begin(write=True) as transaction:
                if transaction.get(SCHEMA_KEY, db=self._meta) is None:
                    transaction.put(SCHEMA_KEY, SCHEMA, db=self._meta)
        except lmdb.Error:
            self._env.close()
            raise

    def _schema(self) -> bytes | None:
        with self._env.begin() as transaction:
            value = transaction.get(SCHEMA_KEY, db=self._meta)
            return None if value is None else bytes(value)

    def digests(self) -> Iterator[tuple[str, memoryview, int]]:
        """All shards: digest, packed record (valid for this step only), last use; by digest."""
        with _translated("read the records"), self._env.begin(buffers=True) as transaction:
            for key, value in transaction.cursor(db=self._records):
                use = transaction.get(key, db=self._uses)
                yield bytes(key).hex(), value, 0 if use is None else layout.unpack_use(use)

    def get(self, digest: str) -> bytes | None:
        """One packed record."""
        with _translated("read a record"), self._env.begin(db=self._records) as transaction:
            value = transaction.get(bytes.fromhex(digest))
            return None if value is None else bytes(value)

    def samples(self, digest: str) -> bytes | None:
        """One packed sample index."""
        with _translated("read a sample index"), self._env.begin(db=self._samples) as transaction:
            value = transaction.get(bytes.fromhex(digest))
            return None if value is None else bytes(value)

    def put(self, records: Iterable[tuple[str, Record, bytes | None, int]]) -> None:
        """Write shards (digest, record, packed sample index, last use) durably, all or none."""
        with _translated("write a record"), self._env.begin(write=True) as transaction:
            for digest, record, samples, use in records:
                key = bytes.fromhex(digest)
                transaction.put(key, layout.pack_record(record), db=self._records)
                transaction.put(key, layout.pack_use(use), db=self._uses)
                if samples is None:
                    transaction.delete(key, db=self._samples)
                else:
                    transaction.put(key, samples, db=self._samples)

    def put_samples(self, digest: str, record: Record, samples: bytes) -> bool:
        """Attach a packed sample index to a shard. False: there is no such shard any more."""
        key = bytes.fromhex(digest)
        with _translated("write a sample index"), self._env.begin(write=True) as transaction:
            if transaction.get(key, db=self._records) is None:
                return False
            transaction.put(key, layout.pack_record(record), db=self._records)
            transaction.put(key, samples, db=self._samples)
            return True

    def put_uses(self, uses: Mapping[str, int]) -> None:
        """Remember last uses."""
        with _translated("write last uses"), self._env.begin(write=True) as transaction:
            for digest, use in uses.items():
                transaction.put(bytes.fromhex(digest), layout.pack_use(use), db=self._uses)

    def delete(self, digests: Iterable[str]) -> None:
        """Forget shards, in one transaction."""
        with _translated("forget shards"), self._env.begin(write=True) as transaction:
            for digest in digests:
                key = bytes.fromhex(digest)
                for table in (self._records, self._samples, self._uses):
                    transaction.delete(key, db=table)

    def close(self) -> None:
        """Close it."""
        self._env.close()


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise StorageError(
            f"the cache index refused to {what}: {error}; check the cache disk and its free space"
        ) from error
