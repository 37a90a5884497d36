"""Follows the frames of a zstd stream, to know whether it ends where it may. Pure.

The library's stream reader ends quietly when its input does, be that in the middle of a frame. This
reads magic numbers, frame headers and block headers (RFC 8878) and steps over everything else, a
few microseconds a block of up to 128 KiB.
"""

from __future__ import annotations

import enum

_MAGIC = 0xFD2FB528
_SKIPPABLE = 0x184D2A50
_SKIPPABLE_MASK = 0xFFFFFFF0
_RLE_BLOCK = 1
_CHECKSUM_BYTES = 4
_DICTIONARY_ID_BYTES = (0, 1, 2, 4)
_CONTENT_SIZE_BYTES = (0, 2, 4, 8)


class _Part(enum.Enum):
    """What the bytes wanted next are."""

    MAGIC = 4
    SKIP_SIZE = 4.0
    DESCRIPTOR = 1
    BLOCK = 3


class ZstdFrames:
    """Feed it all bytes in order; `is_complete` says whether the stream may end here."""

    def __init__(self) -> None:
        self._part = _Part.MAGIC
        self._field = bytearray()
        self._skip_bytes = 0
        self._after_skip = _Part.MAGIC
        self._has_checksum = False
        self.is_foreign = False

    @property
    def is_complete(self) -> bool:
        """No frame is under way."""
        return self._part is _Part.MAGIC and not self._field and not self._skip_bytes

    def feed(self, data: memoryview) -> None:
        """The next bytes. What is not zstd is noted in `is_foreign`; the decoder says it louder."""
        at = 0
        while at < len(data) and not self.is_foreign:
            if self._skip_bytes:
                step = min(self._skip_bytes, len(data) - at)
                self._skip_bytes -= step
                at += step
                continue
            want = int(self._part.value) - len(self._field)
            self._field += data[at : at + want]
            at += want
            if len(self._field) == int(self._part.value):
                value = int.from_bytes(self._field, "little")
                self._field.clear()
                self._read(value)

    def _read(self, value: int) -> None:
        if self._part is _Part.MAGIC:
            self._read_magic(value)
        elif self._part is _Part.SKIP_SIZE:
            self._part = _Part.MAGIC
            self._skip_bytes = value
        elif self._part is _Part.DESCRIPTOR:
            self._read_descriptor(value)
        else:
            self._read_block(value)

    def _read_magic(self, value: int) -> None:
        if value == _MAGIC:
            self._part = _Part.DESCRIPTOR
        elif value & _SKIPPABLE_MASK == _SKIPPABLE:
            self._part = _Part.SKIP_SIZE
        else:
            self.is_foreign = True

    def _read_descriptor(self, value: int) -> None:
        is_single_segment = bool(value & 0x20)
        self._has_checksum = bool(value & 0x04)
        size_bytes = _CONTENT_SIZE_BYTES[value >> 6]
        if is_single_segment:
            size_bytes = max(1, size_bytes)
        window_bytes = 0 if is_single_segment else 1
        self._skip_bytes = window_bytes + _DICTIONARY_ID_BYTES[value & 3] + size_bytes
        self._part = _Part.BLOCK

    def _read_block(self, value: int) -> None:
        is_last, kind, size_bytes = bool(value & 1), value >> 1 & 3, value >> 3
        self._skip_bytes = 1 if kind == _RLE_BLOCK else size_bytes
        if is_last:
            self._skip_bytes += _CHECKSUM_BYTES if self._has_checksum else 0
            self._part = _Part.MAGIC
