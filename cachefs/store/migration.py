"""How the index of the schema before this one is read, so that an upgrade loses no shard.

Schema 2 kept, by key, a record (with the checksums of all extents), the sample index and the last
use in three tables. What this schema needs of them is in the first bytes of a record; the rest is
in the shards' files as well. Older or unreadable indexes are rebuilt from the files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import lmdb

from gpufeed.cachefs.store.heads import KEY_BYTES, Head

LEGACY_SCHEMA = b"2"
LEGACY_TABLES = (b"records", b"samples", b"uses")
_RECORD_VERSION = 1
# version, reserved, extent bytes, data bytes, file bytes, sample count (-1: none), extent count
_RECORD = struct.Struct("<HHIQQqI")
_USE = struct.Struct("<Q")


def legacy_heads(
    transaction: lmdb.Transaction, tables: Mapping[bytes, Any]
) -> Iterator[tuple[bytes, Head]]:
    """Keys and heads of an index of schema 2. Damaged records are left out: their files remain."""
    for key, value in transaction.cursor(db=tables[b"records"]):
        if len(key) != KEY_BYTES or len(value) < _RECORD.size:
            continue
        number, _, extent, size, file_bytes, samples, count = _RECORD.unpack_from(value)
        if number != _RECORD_VERSION or len(value) != _RECORD.size + 8 * count:
            continue
        use = transaction.get(key, db=tables[b"uses"])
        last_use = _USE.unpack(use)[0] if use is not None and len(use) == _USE.size else 0
        yield bytes(key), Head(extent, size, file_bytes, None if samples < 0 else samples, last_use)
