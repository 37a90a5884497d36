"""Heads of the index: pinned, checked, and bound to their keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs.store import heads
from gpufeed.cachefs.store.heads import HEAD_BYTES, HEAD_DTYPE, Head

DIGEST = "23e84a9b948c2eb19df82e6a20ddbb7b"
KEY = bytes.fromhex(DIGEST)
HEAD = Head(4096, 5000, 16384, None, 258)
PINNED = (
    "0200" "0000" "bc8604a7" "0010000000000000" "8813000000000000" "0040000000000000"
    "ffffffffffffffff" "0201000000000000"
)  # fmt: skip


def unpack(data: bytes) -> np.ndarray:
    return heads.unpack_heads(data)


def test_a_head_is_pinned() -> None:
    assert HEAD_BYTES == 48
    assert heads.pack_head(DIGEST, HEAD).hex() == PINNED


def test_any_flipped_bit_of_head_or_key_is_noticed() -> None:
    packed = heads.pack_head(DIGEST, HEAD)
    assert heads.sound(KEY, unpack(packed)).all()
    for bit in range(8 * HEAD_BYTES):
        wrong = bytearray(packed)
        wrong[bit // 8] ^= 1 << bit % 8
        assert not heads.sound(KEY, unpack(bytes(wrong))).any(), bit
    for bit in range(8 * len(KEY)):
        other = bytearray(KEY)
        other[bit // 8] ^= 1 << bit % 8
        assert not heads.sound(bytes(other), unpack(packed)).any(), bit


@given(
    rows=st.lists(
        st.tuples(
            st.binary(min_size=16, max_size=16), st.integers(0, 1 << 40), st.integers(-1, 1 << 40)
        ),
        max_size=8,
    )
)
def test_many_at_once_are_as_each_alone(rows: list[tuple[bytes, int, int]]) -> None:
    columns = np.zeros(len(rows), dtype=HEAD_DTYPE)
    for column, (_, size, samples) in zip(columns, rows, strict=True):
        column["extent_bytes"], column["size_bytes"] = 4096, size
        column["sample_count"] = samples
    keys = b"".join(key for key, _, _ in rows)

    packed = heads.pack_heads(keys, columns)

    alone = b"".join(
        heads.pack_head(key.hex(), Head(4096, size, 0, None if samples < 0 else samples))
        for key, size, samples in rows
    )
    assert packed.tobytes() == alone
    assert heads.sound(keys, packed).all()
