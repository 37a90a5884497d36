"""The persisted forms, pinned: a change here is a new version."""

from __future__ import annotations

import pytest

from gpufeed.cachefs import layout
from gpufeed.cachefs.errors import IntegrityError
from gpufeed.cachefs.layout import Record
from gpufeed.cachefs.model import ObjectInfo, ShardSpec, Source

SPEC = ShardSpec("s", 5000, (Source(ObjectInfo("oss://b/k", 5000, "ETAG"), 0),))


def test_the_digest_of_a_shard_is_pinned() -> None:
    assert SPEC.digest == "23e84a9b948c2eb19df82e6a20ddbb7b"


def test_the_header_and_the_record_are_pinned() -> None:
    trailer = layout.pack_trailer(SPEC, [1, 2], None)
    header = layout.pack_header(SPEC, 4096, trailer, None)
    record = layout.pack_record(Record(4096, 5000, 16384, None, (1, 2), None))

    assert len(header) == len(trailer) == 4096
    assert header[:80].rstrip(b"\0").hex() == (
        "47465348" "01000000" "5ce489fe" "00100000" "8813000000000000" "0030000000000000"
        "0010000000000000" "4ce52590dbe319fe" "ffffffffffffffff"
        "23e84a9b948c2eb19df82e6a20ddbb7b"
    )  # fmt: skip
    assert record.hex() == (
        "01000000" "00100000" "8813000000000000" "0040000000000000" "ffffffffffffffff"
        "02000000" "00000000" "0100000000000000" "0200000000000000"
    )  # fmt: skip


def test_a_file_describes_itself() -> None:
    trailer = layout.pack_trailer(SPEC, [7, 9], b"index" * 100)
    header = layout.unpack_header(layout.pack_header(SPEC, 4096, trailer, 3))

    record = layout.unpack_trailer(header, trailer)

    assert header.digest == SPEC.digest
    assert record == Record(4096, 5000, 4096 + 8192 + len(trailer), 3, (7, 9), b"index" * 100)
    assert layout.unpack_record(layout.pack_record(record)) == record


def test_any_flipped_byte_of_header_or_trailer_is_noticed() -> None:
    trailer = layout.pack_trailer(SPEC, [7, 9], b"index")
    block = layout.pack_header(SPEC, 4096, trailer, 3)
    header = layout.unpack_header(block)
    for at in range(0, 4096, 7):
        wrong = bytearray(block)
        wrong[at] ^= 1
        with pytest.raises(IntegrityError):
            layout.unpack_header(bytes(wrong))
        wrong = bytearray(trailer)
        wrong[at] ^= 1
        with pytest.raises(IntegrityError):
            layout.unpack_trailer(header, bytes(wrong))
