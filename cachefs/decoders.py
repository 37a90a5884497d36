"""From a compressed stream into memory: gzip and zstd behind one `readinto`.

Pull-driven: a decoder asks its source for more input when it needs some, in the thread that called
`readinto`. Several members of a gzip file and several frames of a zstd one are one stream. Memory:
the decoder's window, which is bounded by `ZSTD_WINDOW_BYTES_MAX`, and `_INPUT_BYTES` of input.

The interpreter's lock is not held while decompressing. One thread at a time.
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol

import zstandard

from gpufeed.cachefs.codec import CODECS, GZIP
from gpufeed.cachefs.errors import IntegrityError
from gpufeed.cachefs.units import KIB, MIB
from gpufeed.cachefs.zstdframes import ZstdFrames

_inflate: Any
try:
    from isal import isal_zlib as _inflate
except ImportError:  # no wheel for this architecture; a third as fast
    _inflate = zlib

# `zstd -19` needs 8 MiB, `--long` and `--ultra -22` 128 MiB.
ZSTD_WINDOW_BYTES_MAX = 128 * MIB
_INPUT_BYTES = 64 * KIB
_GZIP_WINDOW_BITS = 31  # 15 for the window, 16 for gzip's header and trailer


class Input(Protocol):
    """Where the compressed bytes come from."""

    def read(self, size: int) -> memoryview:
        """At least one and at most `size` bytes; empty at the end."""
        ...


class Decoder(Protocol):
    """A decompressed stream."""

    def readinto(self, target: memoryview) -> int:
        """Fill `target` from the start, as far as the stream goes; 0: it has ended.

        Raises:
            IntegrityError: the stream is wrong, or ends too soon.
        """
        ...


class GzipDecoder:
    """Satisfies `Decoder`."""

    def __init__(self, source: Input) -> None:
        self._source = source
        self._member: Any = None
        self._members_count = 0
        self._rest: Any = b""
        self._has_ended = False

    def readinto(self, target: memoryview) -> int:
        """See `Decoder`."""
        done = 0
        try:
            while done < len(target) and not self._has_ended:
                if self._member is None:
                    self._begin_member()
                else:
                    done += self._step(target[done:])
        except (zlib.error, _inflate.error) as error:
            raise IntegrityError(f"the gzip stream is wrong: {error}") from None
        return done

    def _begin_member(self) -> None:
        data = bytes(self._rest or self._source.read(_INPUT_BYTES))
        self._has_ended = not data
        if self._has_ended and not self._members_count:
            raise IntegrityError("the gzip stream is empty")
        # Tapes pad the last member with zeros.
        self._rest = data.lstrip(b"\0") if self._members_count else data
        if self._rest:
            self._member = _inflate.decompressobj(_GZIP_WINDOW_BITS)
            self._members_count += 1

    def _step(self, target: memoryview) -> int:
        data = self._rest or self._source.read(_INPUT_BYTES)
        if not data:
            raise IntegrityError("the gzip stream ends within a member: it was cut off")
        made = self._member.decompress(data, len(target))
        target[: len(made)] = made
        self._rest = self._member.unconsumed_tail
        if self._member.eof:
            self._rest = self._member.unused_data
            self._member = None
        return len(made)


class ZstdDecoder:
    """Satisfies `Decoder`."""

    def __init__(self, source: Input) -> None:
        self._source = source
        self._frames = ZstdFrames()
        self._has_begun = False
        decompressor: Any = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
        self._reader = decompressor.stream_reader(
            self, read_size=_INPUT_BYTES, read_across_frames=True
        )

    def read(self, size: int) -> memoryview:
        """The reader's own input."""
        data = self._source.read(size)
        self._frames.feed(data)
        self._has_begun = self._has_begun or bool(data)
        return data

    def readinto(self, target: memoryview) -> int:
        """See `Decoder`."""
        done = 0
        try:
            while done < len(target) and (made := self._reader.readinto(target[done:])):
                done += made
        except zstandard.ZstdError as error:
            raise IntegrityError(
                f"the zstd stream is wrong, or needs a window of over {ZSTD_WINDOW_BYTES_MAX} "
                f"bytes: {error}"
            ) from None
        if done < len(target) and not (self._has_begun and self._frames.is_complete):
            raise IntegrityError("the zstd stream ends within a frame: it was cut off")
        return done


def decoder_of(codec: str, source: Input) -> Decoder:
    """The decoder of one of `CODECS`."""
    assert codec in CODECS, codec
    return GzipDecoder(source) if codec == GZIP else ZstdDecoder(source)
