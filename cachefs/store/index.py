"""The index: one LMDB environment, a record a shard. Transactions only, no decisions.

One writer: the store's index thread. The map is large and fixed (address space, not memory), so it
is never resized under readers. Each write is one synced transaction: a shard is tens of megabytes,
beside which a sync is nothing, and what the index says survives a power loss. It can be rebuilt
from the files all the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import lmdb

from gpufeed.cachefs.errors import OperatorError, StorageError
from gpufeed.cachefs.units import GIB

MAP_BYTES = 64 * GIB
SCHEMA_KEY = b"\0schema"
SCHEMA = b"1"


class Index:
    """The environment at `path`.

    Raises:
        OperatorError: it is of a schema that this version does not know.
    """

    def __init__(self, path: str) -> None:
        try:
            self._env = lmdb.open(path, map_size=MAP_BYTES, mode=0o600, max_spare_txns=4)
            with self._env.begin(write=True) as transaction:
                schema = transaction.get(SCHEMA_KEY)
                if schema is None:
                    transaction.put(SCHEMA_KEY, SCHEMA)
        except lmdb.Error as error:
            raise StorageError(f"cannot open the cache index at {path}: {error}") from None
        if schema not in (None, SCHEMA):
            self._env.close()
            raise OperatorError(
                f"the cache index at {path} has schema {schema!r}, this version knows {SCHEMA!r}: "
                "use the version that wrote it, or empty the cache directory"
            )

    def items(self) -> Iterator[tuple[str, bytes]]:
        """All records, by digest. Values are copies."""
        with self._env.begin() as transaction:
            for key, value in transaction.cursor():
                if key != SCHEMA_KEY:
                    yield bytes(key).hex(), bytes(value)

    def get(self, digest: str) -> bytes | None:
        """One record."""
        with self._env.begin() as transaction:
            value = transaction.get(bytes.fromhex(digest))
            return None if value is None else bytes(value)

    def put(self, digest: str, record: bytes) -> None:
        """Write one record, durably."""
        try:
            with self._env.begin(write=True) as transaction:
                transaction.put(bytes.fromhex(digest), record)
        except lmdb.Error as error:
            raise StorageError(f"the cache index refused a record: {error}") from None

    def delete(self, digests: list[str]) -> None:
        """Forget records, in one transaction."""
        try:
            with self._env.begin(write=True) as transaction:
                for digest in digests:
                    transaction.delete(bytes.fromhex(digest))
        except lmdb.Error as error:
            raise StorageError(f"the cache index refused to forget: {error}") from None

    def close(self) -> None:
        """Close it."""
        self._env.close()
