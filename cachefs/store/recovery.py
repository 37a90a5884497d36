"""What a start finds in a cache directory, and how index and files are made to agree.

A file without a record is adopted if its self-description is right, and removed if not; a record
without a file is dropped; interrupted fills are removed. A million shards take seconds: names come
from 256 directory scans, and known files are not opened. Blocking; runs before the loop does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from gpufeed.cachefs import layout
from gpufeed.cachefs.errors import IntegrityError, StorageError
from gpufeed.cachefs.layout import Record
from gpufeed.cachefs.store.directory import CacheDirectory
from gpufeed.cachefs.store.files import AlignedBuffer, Files, is_shortage
from gpufeed.cachefs.store.index import Index

# Shards adopted in one transaction.
ADOPT_BATCH_COUNT = 1024
_LOG = logging.getLogger("gpufeed.store")


@dataclass(frozen=True, slots=True)
class Found:
    """A committed shard. `record` is without checksums; `last_use` orders, 0 is unknown."""

    digest: str
    record: Record
    last_use: int


def reconcile(directory: CacheDirectory, index: Index, files: Files) -> list[Found]:
    """Make index and files agree; returns what is committed, oldest last use first.

    Raises:
        StorageError: the disk or the index refused.
    """
    on_disk = set(directory.scan())
    found: list[Found] = []
    dropped: list[str] = []
    for digest, packed, last_use in index.digests():
        try:
            record = layout.unpack_record(packed, with_crcs=False)
        except IntegrityError:
            dropped.append(digest)
            continue
        if digest in on_disk:
            on_disk.remove(digest)
            found.append(Found(digest, record, last_use))
        else:
            dropped.append(digest)
    if dropped:
        _LOG.warning("%d shards in the index have no file, or no sound record", len(dropped))
        index.delete(dropped)
    found.extend(_adopt(directory, index, files, sorted(on_disk)))
    found.sort(key=lambda shard: shard.last_use)
    return found


def _adopt(
    directory: CacheDirectory, index: Index, files: Files, digests: list[str]
) -> Iterator[Found]:
    for begin in range(0, len(digests), ADOPT_BATCH_COUNT):
        entries: list[tuple[str, Record, bytes | None, int]] = []
        for digest in digests[begin : begin + ADOPT_BATCH_COUNT]:
            path = directory.shard_path(digest)
            try:
                record, samples = read_self_description(files, path, digest)
            except (IntegrityError, StorageError) as error:
                if isinstance(error, StorageError) and is_shortage(error):
                    raise
                _LOG.warning("%s is removed: %s", path, error)
                files.remove(path)
                continue
            entries.append((digest, record, samples, 0))
            yield Found(digest, record, 0)
        _LOG.info("%d shards without a record were adopted", len(entries))
        index.put(entries)


def read_self_description(files: Files, path: str, digest: str) -> tuple[Record, bytes | None]:
    """What a shard's file says of itself: its record and its packed sample index.

    Raises:
        IntegrityError: it is damaged, or another shard's.
        StorageError: it cannot be read.
    """
    descriptor = files.open(path)
    try:
        header = layout.unpack_header(_read(files, descriptor, 0, layout.HEADER_BYTES))
        if header.digest != digest:
            raise IntegrityError(f"{path} holds the shard {header.digest}")
        trailer = _read(files, descriptor, header.trailer_offset, header.trailer_bytes)
        return layout.unpack_trailer(header, trailer)
    finally:
        files.close(descriptor)


def _read(files: Files, descriptor: int, offset: int, size_bytes: int) -> bytes:
    buffer = AlignedBuffer.empty(size_bytes)
    try:
        found = files.read(descriptor, buffer.view, offset)
        return bytes(buffer.view[:found])
    finally:
        buffer.close()
