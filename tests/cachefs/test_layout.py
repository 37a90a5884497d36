"""The persisted forms, pinned: a change here is a new version."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs import layout
from gpufeed.cachefs.errors import IntegrityError
from gpufeed.cachefs.layout import Record
from gpufeed.cachefs.model import ObjectInfo, ShardSpec, Source

SPEC = ShardSpec("s", 5000, (Source(ObjectInfo("oss://b/k", 5000, "ETAG"), 0),))
PINNED_HEADER = (
    "474653480100000028eb915e0010000088130000000000000030000000000000"
    "00100000000000001920fc894885b321ffffffffffffffff23e84a9b948c2eb1"
    "9df82e6a20ddbb7b"
)


def test_the_digest_of_a_shard_is_pinned() -> None:
    assert SPEC.digest == "23e84a9b948c2eb19df82e6a20ddbb7b"


def test_header_and_trailer_are_pinned() -> None:
    trailer = layout.pack_trailer(SPEC, [1, 2], b"SAMPLES")
    header = layout.pack_header(SPEC, 4096, trailer, None)

    assert len(header) == len(trailer) == 4096
    assert trailer.rstrip(b"\0") == bytes.fromhex(
        "02000000" "34000000" "07000000" "0100000000000000" "0200000000000000"
    ) + (b'{"name":"s","sources":[["oss://b/k","ETAG",5000,0]]}' b"SAMPLES")  # fmt: skip
    assert header.rstrip(b"\0").hex() == PINNED_HEADER


def test_a_file_describes_itself() -> None:
    trailer = layout.pack_trailer(SPEC, [7, 9], b"packed" * 100)
    header = layout.unpack_header(layout.pack_header(SPEC, 4096, trailer, 3))

    record, packed = layout.unpack_trailer(header, trailer)

    assert header.digest == SPEC.digest
    assert packed == b"packed" * 100
    assert record == Record(4096, 5000, 4096 + 8192 + len(trailer), 3, (7, 9))
    assert layout.unpack_checksums(header, trailer) == (record, packed)
    assert [record.extent_length(extent) for extent in range(2)] == [4096, 904]


def test_names_in_any_script_come_back() -> None:
    info = ObjectInfo('oss://b/数据 "\\.tar', 1, "é")
    spec = ShardSpec(info.url, 1, (Source(info, 0),))
    trailer = layout.pack_trailer(spec, [1], None)

    record, packed = layout.unpack_trailer(
        layout.unpack_header(layout.pack_header(spec, 4096, trailer, None)), trailer
    )

    assert (record.size_bytes, packed) == (1, None)


def test_a_file_whose_sources_are_not_those_of_its_digest_is_refused() -> None:
    other = ShardSpec("s", 5000, (Source(ObjectInfo("oss://b/k", 5000, "NEWER"), 0),))
    trailer = layout.pack_trailer(other, [1, 2], None)
    header = layout.unpack_header(layout.pack_header(SPEC, 4096, trailer, None))

    with pytest.raises(IntegrityError, match=SPEC.digest):
        layout.unpack_trailer(header, trailer)


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


@given(
    size=st.integers(0, 1 << 20),
    urls=st.lists(st.text(st.characters(codec="utf-8"), max_size=40), max_size=20),
    sample_bytes=st.integers(0, 60_000),
)
def test_what_is_reserved_holds_the_whole_file(
    size: int, urls: list[str], sample_bytes: int
) -> None:
    sources = tuple(Source(ObjectInfo(url, 0, "e"), 0) for url in urls)
    spec = ShardSpec("n", size, sources)
    trailer = layout.pack_trailer(spec, [0] * spec.extent_count(4096), bytes(sample_bytes))

    assert layout.trailer_offset(size) + len(trailer) <= layout.reserve_bytes(spec, 4096)


@given(data=st.binary(max_size=200))
def test_garbage_is_refused_and_never_crashes(data: bytes) -> None:
    for function in (layout.unpack_header, layout.unpack_samples):
        with pytest.raises(IntegrityError):
            function(data)


def test_a_sample_index_survives_packing() -> None:
    for encoded in (b"", b"x" * 100_000):
        assert layout.unpack_samples(layout.pack_samples(encoded)) == encoded


@pytest.mark.parametrize(
    "kept_for",
    [
        {"is_plain": True},
        {"codec": "gzip"},
        {"origin": "elsewhere:80"},
        {"grouping": "oss://b/"},
        {},
    ],
    ids=str,
)
def test_what_a_shard_is_kept_for_is_part_of_its_identity_and_of_its_file(kept_for) -> None:
    spec = ShardSpec(SPEC.name, SPEC.size_bytes, SPEC.sources, **kept_for)
    trailer = layout.pack_trailer(spec, [1, 2], None)
    header = layout.unpack_header(layout.pack_header(spec, 4096, trailer, None))

    layout.unpack_trailer(header, trailer)  # it compares the digest of what it unpacked

    assert header.digest == spec.digest
    assert (spec.digest == SPEC.digest) == (not kept_for)
