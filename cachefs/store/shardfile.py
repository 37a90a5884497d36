"""A shard's file, opened: its own description, verified. Blocking; called from disk threads."""

from __future__ import annotations

from dataclasses import dataclass

from gpufeed.cachefs import layout
from gpufeed.cachefs.errors import IntegrityError
from gpufeed.cachefs.layout import Header, Record
from gpufeed.cachefs.store.files import AlignedBuffer, Files


@dataclass(frozen=True, slots=True)
class Opened:
    """An open file whose header and trailer were found right."""

    descriptor: int
    header: Header
    record: Record

    def check(self, size_bytes: int, file_bytes: int) -> None:
        """Compare it with what the store believes of it.

        Raises:
            IntegrityError: the file is another one.
        """
        found = (self.record.size_bytes, self.record.file_bytes)
        if found != (size_bytes, file_bytes):
            raise IntegrityError(
                f"the shard {self.header.digest} is {found[0]} bytes in a file of {found[1]}, the "
                f"index says {size_bytes} in {file_bytes}; it is fetched again"
            )


def open_shard(files: Files, path: str, digest: str) -> Opened:
    """Open a shard to read.

    Raises:
        IntegrityError: it is damaged, or another shard's.
        StorageError: it cannot be read.
    """
    descriptor = files.open(path)
    try:
        header = _header(files, descriptor, path, digest)
        record, _ = layout.unpack_checksums(header, _trailer(files, descriptor, header))
    except BaseException:
        files.close(descriptor)
        raise
    return Opened(descriptor, header, record)


def read_samples(files: Files, opened: Opened) -> bytes | None:
    """The encoded sample index out of an open shard's trailer.

    Raises:
        IntegrityError: it is damaged.
        StorageError: it cannot be read.
    """
    trailer = _trailer(files, opened.descriptor, opened.header)
    _, packed = layout.unpack_checksums(opened.header, trailer)
    return None if packed is None else layout.unpack_samples(packed)


def read_self_description(files: Files, path: str, digest: str) -> Record:
    """What a file that no index knows says of itself, its sources compared with its name.

    Raises:
        IntegrityError: it is damaged, or another shard's.
        StorageError: it cannot be read.
    """
    descriptor = files.open(path)
    try:
        header = _header(files, descriptor, path, digest)
        record, _ = layout.unpack_trailer(header, _trailer(files, descriptor, header))
        return record
    finally:
        files.close(descriptor)


def _header(files: Files, descriptor: int, path: str, digest: str) -> Header:
    header = layout.unpack_header(_read(files, descriptor, 0, layout.HEADER_BYTES))
    if header.digest != digest:
        raise IntegrityError(f"{path} holds the shard {header.digest}")
    return header


def _trailer(files: Files, descriptor: int, header: Header) -> bytes:
    return _read(files, descriptor, header.trailer_offset, header.trailer_bytes)


def _read(files: Files, descriptor: int, offset: int, size_bytes: int) -> bytes:
    buffer = AlignedBuffer.empty(size_bytes)
    try:
        found = files.read(descriptor, buffer.view, offset)
        return bytes(buffer.view[:found])
    finally:
        buffer.close()
