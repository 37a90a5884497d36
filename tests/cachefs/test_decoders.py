"""Decompression: right bytes in any pieces, and every wrong or shortened stream refused."""

from __future__ import annotations

import contextlib
import gzip
import random

import pytest
import zstandard

from gpufeed.cachefs.codec import GZIP, ZSTD, codec_of
from gpufeed.cachefs.decoders import ZSTD_WINDOW_BYTES_MAX, decoder_of
from gpufeed.cachefs.errors import IntegrityError
from gpufeed.cachefs.zstdframes import ZstdFrames

RANDOM = random.Random(3)
DATA = RANDOM.randbytes(300_000) + b"much of the same " * 30_000


class Pieces:
    """Gives its bytes in pieces of random lengths."""

    def __init__(self, data: bytes, piece_max: int = 50_000) -> None:
        self._data = memoryview(data)
        self._piece_max = piece_max

    def read(self, size: int) -> memoryview:
        size = min(size, RANDOM.randint(1, self._piece_max))
        piece, self._data = self._data[:size], self._data[size:]
        return piece


def compress(codec: str, data: bytes) -> bytes:
    if codec == GZIP:
        return gzip.compress(data, 1)
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def decode(codec: str, data: bytes, step: int = 70_001, piece_max: int = 50_000) -> bytes:
    decoder = decoder_of(codec, Pieces(data, piece_max))
    target = memoryview(bytearray(step))
    found = b""
    while made := decoder.readinto(target):
        found += target[:made]
        if made < step:
            break
    return found


@pytest.mark.parametrize("codec", [GZIP, ZSTD])
@pytest.mark.parametrize(("step", "piece_max"), [(70_001, 50_000), (4096, 3), (1 << 20, 1 << 20)])
def test_one_or_many_frames_give_the_same_bytes(codec: str, step: int, piece_max: int) -> None:
    data = DATA if piece_max > 3 else DATA[290_000:310_000]
    many = b"".join(compress(codec, data[i : i + 9_999]) for i in range(0, len(data), 9_999))

    assert decode(codec, compress(codec, data), step, piece_max) == data
    assert decode(codec, many, step, piece_max) == data


@pytest.mark.parametrize("codec", [GZIP, ZSTD])
def test_what_fills_the_target_exactly_is_followed_by_nothing(codec: str) -> None:
    decoder = decoder_of(codec, Pieces(compress(codec, b"x" * 1000)))
    target = memoryview(bytearray(1000))

    assert decoder.readinto(target) == 1000
    assert decoder.readinto(target) == 0


@pytest.mark.parametrize("codec", [GZIP, ZSTD])
def test_a_stream_cut_off_anywhere_is_refused(codec: str) -> None:
    packed = compress(codec, DATA[:5000]) + compress(codec, DATA[-3000:])
    whole_frame = len(compress(codec, DATA[:5000]))

    for length in range(len(packed)):
        if length == whole_frame:
            continue
        with pytest.raises(IntegrityError, match=codec):
            decode(codec, packed[:length], 1 << 20)


@pytest.mark.parametrize("codec", [GZIP, ZSTD])
@pytest.mark.parametrize("tail", [b"trailing garbage", b"\x28\xb5\x2f\xfd", b"\x1f\x8b\x08"])
def test_garbage_is_refused(codec: str, tail: bytes) -> None:
    with pytest.raises(IntegrityError, match=codec):
        decode(codec, compress(codec, DATA) + tail)
    with pytest.raises(IntegrityError, match=codec):
        decode(codec, b"no stream at all" + tail)


@pytest.mark.parametrize("codec", [GZIP, ZSTD])
def test_a_wrong_byte_never_passes(codec: str) -> None:
    packed = bytearray(compress(codec, DATA[250_000:350_000]))
    for at in RANDOM.sample(range(len(packed)), 300):
        packed[at] ^= 0x55
        # A few bytes of the headers (time, name, operating system) carry no content.
        with contextlib.suppress(IntegrityError):
            assert decode(codec, bytes(packed)) == DATA[250_000:350_000]
        packed[at] ^= 0x55


def test_zeros_after_the_last_gzip_member_are_padding() -> None:
    packed = compress(GZIP, DATA)

    assert decode(GZIP, packed + bytes(100_000)) == DATA
    assert decode(GZIP, packed + bytes(512) + packed) == DATA + DATA


def test_skippable_zstd_frames_are_skipped() -> None:
    skippable = b"\x5a\x2a\x4d\x18" + (7).to_bytes(4, "little") + b"ignored"

    assert decode(ZSTD, skippable + compress(ZSTD, DATA) + skippable) == DATA


def test_a_window_that_would_take_too_much_memory_is_refused() -> None:
    window_log = ZSTD_WINDOW_BYTES_MAX.bit_length()
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=0)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = compressor.compress(DATA) + compressor.flush()

    with pytest.raises(IntegrityError, match="window"):
        decode(ZSTD, packed)


@pytest.mark.parametrize("content_size", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("size", [0, 1, 200, 70_000, 400_000])
def test_frames_are_followed_to_their_last_byte(
    content_size: bool, checksum: bool, size: int
) -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=content_size, write_checksum=checksum)
    packed = compressor.compress(DATA[-size:] if size else b"") * 2
    half = len(packed) // 2

    frames = ZstdFrames()
    complete = []
    for at in range(len(packed)):
        frames.feed(memoryview(packed)[at : at + 1])
        if frames.is_complete:
            complete.append(at + 1)

    assert complete == [half, len(packed)]
    assert not frames.is_foreign


@pytest.mark.parametrize(
    ("url", "codec"),
    [
        ("oss://b/a.tar", ""),
        ("oss://b/a.tar.gz", GZIP),
        ("oss://b/A.TGZ", GZIP),
        ("oss://b/a.tar.zst", ZSTD),
        ("oss://b/a.json.gz", GZIP),
        ("oss://b.gz/a", ""),
    ],
)
def test_codecs_are_told_by_name(url: str, codec: str) -> None:
    assert codec_of(url) == codec
