"""CRC-64/XZ, the checksum that OSS keeps of every object (``x-oss-hash-crc64ecma``).

Pure and thread-safe. `crc64` releases the interpreter lock while it works (10 GB/s a core), so the
disk threads may run it beside the loops; no other thread may write the buffer meanwhile. Pieces
received out of order are checked apart and put together by `combine`, which costs microseconds
whatever the lengths are.
"""

from __future__ import annotations

import functools
from typing import Any

import anycrc
import fastcrc

# What the checksum of no bytes is: the neutral element of `combine`, on both sides.
CRC64_EMPTY = 0


def crc64(view: memoryview | bytes | bytearray, initial: int = CRC64_EMPTY) -> int:
    """The CRC-64/XZ of `view`, which is contiguous.

    `initial` is the checksum of the bytes before: ``crc64(b, crc64(a)) == crc64(a + b)``.
    """
    checksum: int = fastcrc.crc64.xz(view, initial)
    return checksum


def combine(crc_a: int, crc_b: int, length_b: int) -> int:
    """The checksum of ``a + b`` out of those of `a` and of `b`, which is `length_b` bytes long."""
    if length_b == 0:
        return crc_a
    checksum: int = _model().combine(crc_a, crc_b, length_b)
    return checksum


@functools.cache
def _model() -> Any:
    # Made at first use: building its tables costs a millisecond that importers need not pay.
    return anycrc.Model("CRC64-XZ")
