"""The index: one LMDB environment, a head a shard. Transactions only, no decisions.

One writer at a time: LMDB's own lock orders the disk threads. The map is large and fixed (address
space, not memory), so it is never resized under readers. Each write is one synced transaction: a
shard is tens of megabytes, beside which a sync is little.

LMDB reads through a memory map, where a disk that cannot read kills the process by SIGBUS. So the
index is read whole by ordinary reads first (an error there is an error, and the pages are in memory
afterwards), then once by a cursor, and never again: serving uses the catalog. Writes still
touch pages of the map; see ARCHITECTURE.md for what remains.

Whatever is damaged is dropped, and found again in the shards' own files. `is_clean` tells that
index and files agree, so that a start need not compare them: it holds from `mark_clean` to the
next `open`, and is gone from the disk before anything else is written.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import lmdb
import numpy as np

from gpufeed.cachefs.errors import OperatorError, StorageError
from gpufeed.cachefs.store.directory import writer
from gpufeed.cachefs.store.files import FILE_MODE, translated
from gpufeed.cachefs.store.heads import (
    HEAD_BYTES,
    KEY_BYTES,
    Head,
    Heads,
    pack_head,
    pack_heads,
    sound,
    unpack_heads,
)
from gpufeed.cachefs.store.migration import LEGACY_SCHEMA, LEGACY_TABLES, legacy_heads
from gpufeed.cachefs.units import GIB, MIB

MAP_BYTES = 64 * GIB
SCHEMA_KEY = b"schema"
WRITER_KEY = b"writer"
CLEAN_KEY = b"clean"
SCHEMA = 3
_DATA_NAME = "data.mdb"
_FILE_NAMES = (_DATA_NAME, "lock.mdb")
_READ_AHEAD_BYTES = 8 * MIB
_LOG = logging.getLogger("gpufeed.store")


@dataclass(frozen=True, slots=True)
class Indexed:
    """What an index holds, in the order of its keys. `damaged_count` heads were dropped."""

    digests: list[str]
    heads: Heads
    damaged_count: int


class Index:
    """The environment in the directory `path`.

    Attributes:
        is_clean: whether the last user closed it with `mark_clean`, and nothing came after.

    Raises:
        StorageError: it cannot be opened, nor made anew.
        OperatorError: a later version of gpufeed wrote it.
    """

    def __init__(self, path: str) -> None:
        self.is_clean = False
        try:
            _read_ahead(os.path.join(path, _DATA_NAME))
            self._open(path)
            reason = self._agree()
            if not reason:
                return
            self._env.close()
        except lmdb.Error as error:
            reason = str(error)
        except OperatorError:
            self._env.close()
            raise
        _LOG.warning("the cache index at %s is rebuilt from the files: %s", path, reason)
        for name in _FILE_NAMES:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(path, name))
        try:
            self._open(path)
            self._agree()
        except lmdb.Error as error:
            raise StorageError(
                f"cannot make the cache index at {path}: {error}; check the disk and its mount"
            ) from error

    def _open(self, path: str) -> None:
        self._env = lmdb.open(path, map_size=MAP_BYTES, mode=FILE_MODE, max_dbs=8)
        try:
            # Readers of a daemon that was killed.
            self._env.reader_check()
            self._meta, self._shards = (self._env.open_db(name) for name in (b"meta", b"shards"))
        except lmdb.Error:
            self._env.close()
            raise

    def _agree(self) -> str:
        """Bring the environment to this schema; returns why it cannot be, or nothing."""
        with self._env.begin(write=True) as transaction:
            found = transaction.get(SCHEMA_KEY, db=self._meta)
            if found is None:
                transaction.put(SCHEMA_KEY, b"%d" % SCHEMA, db=self._meta)
                transaction.put(WRITER_KEY, writer().encode(), db=self._meta)
                return ""
            if bytes(found) == LEGACY_SCHEMA:
                self._migrate(transaction)
                return ""
            if not bytes(found).isdigit() or int(found) < SCHEMA:
                return f"it is of schema {bytes(found)!r}"
            if int(found) > SCHEMA:
                by = bytes(transaction.get(WRITER_KEY, b"a later gpufeed", db=self._meta))
                raise OperatorError(
                    f"the cache index {self._env.path()} was written by {by.decode()} in "
                    f"schema {int(found)}; {writer()} knows {SCHEMA}: use the version that wrote "
                    "it, or empty the cache directory"
                )
            # Gone before anything is changed, or a crash later on would look like a clean end.
            self.is_clean = transaction.pop(CLEAN_KEY, db=self._meta) is not None
            return ""

    def _migrate(self, transaction: lmdb.Transaction) -> None:
        """From the schema before, in one transaction: all of it, or none."""
        tables = {name: self._env.open_db(name, txn=transaction) for name in LEGACY_TABLES}
        count = 0
        for key, head in legacy_heads(transaction, tables):
            transaction.put(key, pack_head(key.hex(), head), db=self._shards)
            count += 1
        for table in tables.values():
            transaction.drop(table)
        transaction.put(SCHEMA_KEY, b"%d" % SCHEMA, db=self._meta)
        transaction.put(WRITER_KEY, writer().encode(), db=self._meta)
        _LOG.info("the cache index was brought to schema %d: %d shards", SCHEMA, count)

    def load(self) -> Indexed:
        """All heads that are sound; the others are forgotten."""
        with _translated("read its heads"), self._env.begin(db=self._shards) as transaction:
            keys, values = _columns(transaction.cursor())
        heads = unpack_heads(values)
        good = sound(keys, heads)
        text = keys.hex()
        digests = [text[at : at + 2 * KEY_BYTES] for at in range(0, len(text), 2 * KEY_BYTES)]
        damaged = [digests[i] for i in np.flatnonzero(~good).tolist()]
        if damaged:
            self.delete(damaged)
            kept = set(damaged)
            digests = [digest for digest in digests if digest not in kept]
            heads = heads[good]
        return Indexed(digests, heads, len(damaged))

    def put(self, entries: Iterable[tuple[str, Head]]) -> None:
        """Write heads durably, all or none."""
        with _translated("write a head"), self._env.begin(write=True) as transaction:
            for digest, head in entries:
                transaction.put(bytes.fromhex(digest), pack_head(digest, head), db=self._shards)

    def put_many(self, keys: bytes, heads: Heads) -> None:
        """As `put`, for columns of heads in the order of their keys."""
        packed = pack_heads(keys, heads).tobytes()
        rows = zip(
            (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)),
            (packed[at : at + HEAD_BYTES] for at in range(0, len(packed), HEAD_BYTES)),
            strict=True,
        )
        with _translated("write heads"), self._env.begin(write=True) as transaction:
            transaction.cursor(db=self._shards).putmulti(rows)

    def put_uses(self, uses: Mapping[str, int]) -> None:
        """Remember last uses of shards that are there."""
        with _translated("write last uses"), self._env.begin(write=True) as transaction:
            for digest, use in uses.items():
                key = bytes.fromhex(digest)
                value = transaction.get(key, db=self._shards)
                if value is not None and len(value) == HEAD_BYTES:
                    head = unpack_heads(bytes(value)).copy()
                    head["last_use"] = use
                    transaction.put(key, pack_heads(key, head).tobytes(), db=self._shards)

    def delete(self, digests: Iterable[str]) -> None:
        """Forget shards, in one transaction."""
        with _translated("forget shards"), self._env.begin(write=True) as transaction:
            for digest in digests:
                transaction.delete(bytes.fromhex(digest), db=self._shards)

    def mark_clean(self) -> None:
        """The last write: index and files agree, and both are durable."""
        with _translated("mark its end"), self._env.begin(write=True) as transaction:
            transaction.put(CLEAN_KEY, b"1", db=self._meta)

    def close(self) -> None:
        """Close it."""
        self._env.close()


def _columns(cursor: lmdb.Cursor) -> tuple[bytes, bytes]:
    """Keys and values, each one after the other. Entries of other lengths count as damaged."""
    keys = b"".join(cursor.iternext(keys=True, values=False)) if cursor.first() else b""
    values = b"".join(cursor.iternext(keys=False, values=True)) if cursor.first() else b""
    count = len(keys) // KEY_BYTES
    if len(keys) % KEY_BYTES == 0 and len(values) == count * HEAD_BYTES:
        return keys, values
    rows = [(bytes(k), bytes(v)) for k, v in cursor.iternext()] if cursor.first() else []
    rows = [(key, value) for key, value in rows if len(key) == KEY_BYTES]
    blank = bytes(HEAD_BYTES)  # of no version: dropped with the damaged ones
    values = b"".join(value if len(value) == HEAD_BYTES else blank for _, value in rows)
    return b"".join(key for key, _ in rows), values


def _read_ahead(path: str) -> None:
    """Read a file from one end to the other, so that what cannot be read is an error here."""
    if not os.path.exists(path):
        return
    buffer = bytearray(_READ_AHEAD_BYTES)
    with translated(f"read {path}"), open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except lmdb.Error as error:
        raise StorageError(
            f"the cache index refused to {what}: {error}; check the cache disk and its free space"
        ) from error
