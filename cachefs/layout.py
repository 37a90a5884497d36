"""The persisted form of a shard: its file. Pure; pinned by tests.

A shard's file describes and checks itself, so that the index can be rebuilt from the files alone::

    header block (4 KiB)   magic "GFSH", version, CRC, digest, sizes, place and CRC of the trailer
    data                   the shard's bytes, padded to 4 KiB (padding is not checksummed)
    trailer                CRC-64/XZ of each extent, identity (JSON), sample index (zstd), padded

The header is written last, before the file is synced and renamed to its name: a file without a
valid header holds nothing. What the index keeps beside it is in `gpufeed.cachefs.store.heads`.
All numbers are little-endian.
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
from gpufeed.cachefs.model import ObjectInfo, ShardSpec, Source
from gpufeed.cachefs.units import BLOCK_BYTES, round_up

MAGIC = b"GFSH"
VERSION = 1
HEADER_BYTES = BLOCK_BYTES
DATA_OFFSET = HEADER_BYTES
# magic, version, reserved, header CRC-32 (of the block with this field zero), extent bytes,
# data bytes, trailer offset, trailer bytes, trailer CRC-64, sample count (-1: none), digest
_HEADER = struct.Struct("<4sHHIIQQQQq16s")
_CRC_AT = 8
# extent count, identity bytes, sample index bytes
_TRAILER = struct.Struct("<III")
TRAILER_BYTES_MAX = 1 << 30
_ZSTD_LEVEL = 3

# Room for a trailer before its sample index is known: about 200 bytes a 100 kB sample.
_SAMPLES_RESERVE_RATIO = 1 / 512
_TRAILER_RESERVE_BYTES = 64 * 1024
_SOURCE_RESERVE_BYTES = 48


@dataclass(frozen=True, slots=True)
class Record:
    """What a shard's file says of itself. `file_bytes` is the whole file, a multiple of 4 KiB."""

    extent_bytes: int
    size_bytes: int
    file_bytes: int
    sample_count: int | None
    extent_crcs: tuple[int, ...]

    def extent_length(self, extent: int) -> int:
        """Bytes of the shard in this extent."""
        return min(self.extent_bytes, self.size_bytes - extent * self.extent_bytes)


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


# --- places and sizes -------------------------------------------------------------------------


def data_bytes_on_disk(size_bytes: int) -> int:
    """Bytes of the data region, padded."""
    return round_up(size_bytes, BLOCK_BYTES)


def extent_offset(extent: int, extent_bytes: int) -> int:
    """Where an extent begins in the file."""
    return DATA_OFFSET + extent * extent_bytes


def trailer_offset(size_bytes: int) -> int:
    """Where the trailer begins in the file."""
    return DATA_OFFSET + data_bytes_on_disk(size_bytes)


def reserve_bytes(spec: ShardSpec, extent_bytes: int) -> int:
    """What to reserve for the whole file, before its trailer is known. Rarely too little."""
    names_bytes = sum(len(s.info.url) + len(s.info.etag) for s in spec.sources)
    trailer_bytes = (
        _TRAILER_RESERVE_BYTES
        + int(spec.size_bytes * _SAMPLES_RESERVE_RATIO)
        + names_bytes
        + len(spec.origin)
        + len(spec.grouping)
        + _SOURCE_RESERVE_BYTES * len(spec.sources)
        + 8 * -(-spec.size_bytes // extent_bytes)
    )
    return trailer_offset(spec.size_bytes) + round_up(trailer_bytes, BLOCK_BYTES)


# --- the file ---------------------------------------------------------------------------------


def pack_samples(sample_index: bytes) -> bytes:
    """An encoded `SampleIndex` as file and index keep it."""
    return zstandard.compress(sample_index, _ZSTD_LEVEL)


def unpack_samples(packed: bytes) -> bytes:
    """See `pack_samples`.

    Raises:
        IntegrityError: damaged.
    """
    try:
        return zstandard.decompress(packed)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"a stored sample index of {len(packed)} bytes: {error}") from None


def pack_trailer(spec: ShardSpec, crcs: Sequence[int], packed_samples: bytes | None) -> bytes:
    """The trailer, padded to whole blocks."""
    identity = json.dumps(
        {
            "name": spec.name,
            "sources": [
                [s.info.url, s.info.etag, s.info.size_bytes, s.offset_bytes] for s in spec.sources
            ],
            **({"codec": spec.codec} if spec.codec else {}),
            **({"plain": True} if spec.is_plain else {}),
            **({"origin": spec.origin} if spec.origin else {}),
            **({"grouping": spec.grouping} if spec.grouping else {}),
        },
        separators=(",", ":"),
        ensure_ascii=False,
    ).encode("utf-8", "surrogatepass")
    samples = packed_samples or b""
    head = _TRAILER.pack(len(crcs), len(identity), len(samples))
    body = head + struct.pack(f"<{len(crcs)}Q", *crcs) + identity + samples
    return body.ljust(round_up(len(body), BLOCK_BYTES), b"\0")


def pack_header(
    spec: ShardSpec, extent_bytes: int, trailer: bytes, sample_count: int | None
) -> bytes:
    """The header block of a shard whose trailer is `trailer`."""
    count = -1 if sample_count is None else sample_count
    fields = (
        extent_bytes, spec.size_bytes, trailer_offset(spec.size_bytes), len(trailer),
        checksum.crc64(trailer), count, bytes.fromhex(spec.digest),
    )  # fmt: skip
    block = bytearray(_HEADER.pack(MAGIC, VERSION, 0, 0, *fields).ljust(HEADER_BYTES, b"\0"))
    struct.pack_into("<I", block, _CRC_AT, zlib.crc32(block))
    return bytes(block)


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
    if zlib.crc32(clean) != crc:
        raise IntegrityError("a shard file whose header does not match its checksum")
    aligned = extent > 0 and extent % BLOCK_BYTES == 0 and length % BLOCK_BYTES == 0
    if not aligned or length > TRAILER_BYTES_MAX or offset != trailer_offset(size):
        raise IntegrityError("a shard file whose header describes an impossible layout")
    return Header(
        digest.hex(), extent, size, offset, length, trailer_crc, None if count < 0 else count
    )


def unpack_checksums(header: Header, trailer: bytes) -> tuple[Record, bytes | None]:
    """Verify a trailer against its header; returns the record, and the packed sample index if any.

    What the sources are is not looked at: header and trailer, both checksummed, name one digest.

    Raises:
        IntegrityError: damaged.
    """
    if len(trailer) != header.trailer_bytes or checksum.crc64(trailer) != header.trailer_crc:
        raise IntegrityError("a shard file whose trailer does not match its checksum")
    count, identity_bytes, samples_bytes = _TRAILER.unpack_from(trailer)
    crcs = struct.unpack_from(f"<{count}Q", trailer, _TRAILER.size)
    at = _TRAILER.size + 8 * count + identity_bytes
    if count != -(-header.size_bytes // header.extent_bytes):
        raise IntegrityError(f"a shard file of {header.size_bytes} bytes with {count} checksums")
    file_bytes = header.trailer_offset + header.trailer_bytes
    record = Record(
        header.extent_bytes, header.size_bytes, file_bytes, header.sample_count, crcs
    )  # fmt: skip
    return record, trailer[at : at + samples_bytes] or None


def unpack_trailer(header: Header, trailer: bytes) -> tuple[Record, bytes | None]:
    """As `unpack_checksums`, and the sources are compared with the header's digest.

    Raises:
        IntegrityError: damaged, or its sources are not those of the header's digest.
    """
    record, samples = unpack_checksums(header, trailer)
    count, identity_bytes, _ = _TRAILER.unpack_from(trailer)
    at = _TRAILER.size + 8 * count
    spec = _unpack_identity(trailer[at : at + identity_bytes], header.size_bytes)
    if spec.digest != header.digest:
        raise IntegrityError(f"a shard file that says {header.digest} but holds {spec.name}")
    return record, samples


def _unpack_identity(data: bytes, size_bytes: int) -> ShardSpec:
    try:
        fields = json.loads(data.decode("utf-8", "surrogatepass"))
        sources = tuple(
            Source(ObjectInfo(url, size, etag), offset)
            for url, etag, size, offset in fields["sources"]
        )
        codec, is_plain = fields.get("codec", ""), fields.get("plain", False)
        origin, grouping = fields.get("origin", ""), fields.get("grouping", "")
        return ShardSpec(
            fields["name"], size_bytes, sources, codec,
            is_plain=is_plain, origin=origin, grouping=grouping,
        )  # fmt: skip
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"a shard file whose identity cannot be read: {error}") from None
