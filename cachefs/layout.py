"""The persisted forms: a shard's file and its record in the index. Pure; pinned by tests.

A shard's file describes and checks itself, so that the index can be rebuilt from the files alone::

    header block (4 KiB)   magic "GFSH", version, CRC, digest, sizes, place and CRC of the trailer
    data                   the shard's bytes, padded to 4 KiB (padding is not checksummed)
    trailer                CRC-64/XZ of each extent, identity (JSON), sample index (zstd), padded

The header is written last, before the file is synced and renamed to its name: a file without a
valid header holds nothing. A record in the index repeats what serving needs: sizes, checksums,
sample count and sample index. All numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import zstandard

from gpufeed.cachefs import checksum
from gpufeed.cachefs.errors import IntegrityError
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.units import BLOCK_BYTES, round_up

MAGIC = b"GFSH"
VERSION = 1
RECORD_VERSION = 1
HEADER_BYTES = BLOCK_BYTES
DATA_OFFSET = HEADER_BYTES
# magic, version, reserved, header CRC-32 (of the block with this field zero), extent bytes,
# data bytes, trailer offset, trailer bytes, trailer CRC-64, sample count (-1: none), digest
_HEADER = struct.Struct("<4sHHIIQQQQq16s")
_CRC_AT = 8
# extent count, identity bytes, sample index bytes
_TRAILER = struct.Struct("<III")
# version, reserved, extent bytes, data bytes, file bytes, sample count, extent count, index bytes
_RECORD = struct.Struct("<HHIQQqII")
TRAILER_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True)
class Record:
    """What the index keeps of a shard. `sample_index` is the encoded `SampleIndex`, or None."""

    extent_bytes: int
    size_bytes: int
    file_bytes: int
    sample_count: int | None
    extent_crcs: tuple[int, ...]
    sample_index: bytes | None


def data_bytes_on_disk(size_bytes: int) -> int:
    """Bytes of the data region, padded."""
    return round_up(size_bytes, BLOCK_BYTES)


def extent_offset(extent: int, extent_bytes: int) -> int:
    """Where an extent begins in the file."""
    return DATA_OFFSET + extent * extent_bytes


def pack_trailer(spec: ShardSpec, crcs: Sequence[int], sample_index: bytes | None) -> bytes:
    """The trailer, padded to whole blocks."""
    identity = json.dumps(
        {
            "name": spec.name,
            "sources": [
                [s.info.url, s.info.etag, s.info.size_bytes, s.offset_bytes] for s in spec.sources
            ],
        },
        separators=(",", ":"),
    ).encode()
    index = zstandard.compress(sample_index, 3) if sample_index is not None else b""
    head = _TRAILER.pack(len(crcs), len(identity), len(index))
    body = head + struct.pack(f"<{len(crcs)}Q", *crcs) + identity + index
    return body.ljust(round_up(len(body), BLOCK_BYTES), b"\0")


def pack_header(
    spec: ShardSpec, extent_bytes: int, trailer: bytes, sample_count: int | None
) -> bytes:
    """The header block of a shard whose trailer is `trailer`."""
    offset = DATA_OFFSET + data_bytes_on_disk(spec.size_bytes)
    count = -1 if sample_count is None else sample_count
    fields = (
        extent_bytes, spec.size_bytes, offset, len(trailer), checksum.crc64(trailer), count,
        bytes.fromhex(spec.digest),
    )  # fmt: skip
    block = bytearray(_HEADER.pack(MAGIC, VERSION, 0, 0, *fields).ljust(HEADER_BYTES, b"\0"))
    struct.pack_into("<I", block, _CRC_AT, zlib.crc32(block))
    return bytes(block)


@dataclass(frozen=True, slots=True)
class Header:
    """A verified header block."""

    digest: str
    extent_bytes: int
    size_bytes: int
    trailer_offset: int
    trailer_bytes: int
    trailer_crc: int
    sample_count: int | None


def unpack_header(block: bytes) -> Header:
    """Verify and read a header block.

    Raises:
        IntegrityError: not a header, another version, or damaged.
    """
    if len(block) != HEADER_BYTES:
        raise IntegrityError(f"a shard file's header of {len(block)} bytes, want {HEADER_BYTES}")
    magic, version, _, crc, extent, size, offset, length, trailer_crc, count, digest = (
        _HEADER.unpack_from(block)
    )
    if magic != MAGIC or version != VERSION:
        raise IntegrityError(f"a shard file of magic {magic!r}, version {version}; want {VERSION}")
    clean = bytearray(block)
    clean[_CRC_AT : _CRC_AT + 4] = bytes(4)
    if zlib.crc32(clean) != crc or length > TRAILER_BYTES_MAX:
        raise IntegrityError("a shard file whose header does not match its checksum")
    return Header(
        digest.hex(), extent, size, offset, length, trailer_crc, None if count < 0 else count
    )


def unpack_trailer(header: Header, trailer: bytes) -> Record:
    """Verify and read a trailer.

    Raises:
        IntegrityError: damaged.
    """
    if len(trailer) != header.trailer_bytes or checksum.crc64(trailer) != header.trailer_crc:
        raise IntegrityError("a shard file whose trailer does not match its checksum")
    count, identity_bytes, index_bytes = _TRAILER.unpack_from(trailer)
    at = _TRAILER.size
    crcs = struct.unpack_from(f"<{count}Q", trailer, at)
    at += 8 * count + identity_bytes
    packed = trailer[at : at + index_bytes]
    return Record(
        header.extent_bytes,
        header.size_bytes,
        header.trailer_offset + header.trailer_bytes,
        header.sample_count,
        crcs,
        zstandard.decompress(packed) if packed else None,
    )


def pack_record(record: Record) -> bytes:
    """A record as the index stores it."""
    index = zstandard.compress(record.sample_index, 3) if record.sample_index is not None else b""
    count = -1 if record.sample_count is None else record.sample_count
    head = _RECORD.pack(
        RECORD_VERSION, 0, record.extent_bytes, record.size_bytes, record.file_bytes, count,
        len(record.extent_crcs), len(index),
    )  # fmt: skip
    return head + struct.pack(f"<{len(record.extent_crcs)}Q", *record.extent_crcs) + index


def unpack_record(data: bytes, *, with_index: bool = True) -> Record:
    """See `pack_record`. `with_index=False` leaves the sample index compressed and out.

    Raises:
        IntegrityError: another version, or of a wrong length.
    """
    if len(data) < _RECORD.size:
        raise IntegrityError(f"an index record of {len(data)} bytes")
    version, _, extent, size, file_bytes, samples, count, index_bytes = _RECORD.unpack_from(data)
    if version != RECORD_VERSION or len(data) != _RECORD.size + 8 * count + index_bytes:
        raise IntegrityError(f"an index record of version {version} and {len(data)} bytes")
    crcs = struct.unpack_from(f"<{count}Q", data, _RECORD.size)
    packed = data[_RECORD.size + 8 * count :]
    index = zstandard.decompress(packed) if packed and with_index else None
    return Record(extent, size, file_bytes, None if samples < 0 else samples, crcs, index)
