"""A shard's head: the 48 bytes that the index keeps of it, and that a start reads. Pure.

::

    version u16 | reserved u16 | check u32 | extent bytes u64 | size u64 | file bytes u64
    sample count i64 (-1: none) | last use u64                               all little-endian

Heads of one length under keys of one length are read as two columns of memory and checked by numpy,
a million in milliseconds. The check binds a head to its key, so that neither a flipped bit nor a
head under another shard's key is taken for true. Everything else that serving needs (checksums of
the extents, sample index) lies in the shard's own file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEAD_VERSION = 2
KEY_BYTES = 16
# The last use of a shard once adopted: before all others, but after what a later start may find
# (0), which then is the first to go where room is short.
ADOPTED_USE = 1
HEAD_DTYPE = np.dtype(
    [
        ("version", "<u2"), ("reserved", "<u2"), ("check", "<u4"), ("extent_bytes", "<u8"),
        ("size_bytes", "<u8"), ("file_bytes", "<u8"), ("sample_count", "<i8"), ("last_use", "<u8"),
    ]
)  # fmt: skip
HEAD_BYTES = HEAD_DTYPE.itemsize
Heads = NDArray[Any]

# Odd, and their bits are even a coin's: a changed word changes the sum, and its upper half.
_WEIGHTS = np.array(
    [
        0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xFF51AFD7ED558CCD,
        0xC4CEB9FE1A85EC53, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB,
    ],
    dtype="<u8",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Head:
    """One shard's head. `file_bytes` is the whole file, a multiple of 4 KiB."""

    extent_bytes: int
    size_bytes: int
    file_bytes: int
    sample_count: int | None
    last_use: int = 0


def checks(keys: bytes, heads: Heads) -> NDArray[np.uint32]:
    """What the check of each head must be; `keys` are theirs, one after the other."""
    # Column by column: a table of all words would be written and read a second time.
    key_words = np.frombuffer(keys, dtype="<u8")
    head_words = np.frombuffer(heads.tobytes(), dtype="<u8")
    sums = key_words[0::2] * _WEIGHTS[0]
    sums += key_words[1::2] * _WEIGHTS[1]
    step = HEAD_BYTES // 8
    sums += (head_words[0::step] & np.uint64(0xFFFFFFFF)) * _WEIGHTS[2]  # without the check itself
    for i in range(1, step):
        sums += head_words[i::step] * _WEIGHTS[2 + i]
    sums ^= sums >> np.uint64(32)
    sums *= _WEIGHTS[0]
    found: NDArray[np.uint32] = (sums >> np.uint64(32)).astype("<u4")
    return found


def pack_head(digest: str, head: Head) -> bytes:
    """A head as the index stores it under the shard's key."""
    count = -1 if head.sample_count is None else head.sample_count
    row = np.zeros(1, dtype=HEAD_DTYPE)
    row[0] = (
        HEAD_VERSION, 0, 0, head.extent_bytes, head.size_bytes, head.file_bytes, count,
        head.last_use,
    )  # fmt: skip
    row["check"] = checks(bytes.fromhex(digest), row)
    return row.tobytes()


def pack_heads(keys: bytes, heads: Heads) -> Heads:
    """Many at once: sets version and check of each."""
    packed = heads.copy()
    packed["version"] = HEAD_VERSION
    packed["reserved"] = 0
    packed["check"] = checks(keys, packed)
    return packed


def sound(keys: bytes, heads: Heads) -> NDArray[np.bool_]:
    """Which of the heads are of this version, undamaged and their key's own."""
    found: NDArray[np.bool_] = (heads["version"] == HEAD_VERSION) & (
        heads["check"] == checks(keys, heads)
    )
    return found


def unpack_heads(data: bytes) -> Heads:
    """Heads that lie one after the other, unchecked (see `sound`); read-only."""
    return np.frombuffer(data, dtype=HEAD_DTYPE)
