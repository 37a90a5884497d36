"""Made-up shards, and the usual moves of a store with them. For tests and chaos children.

A shard's bytes follow from its digest alone, so that any process can tell what they should be.
"""

from __future__ import annotations

import mmap
import random

from gpufeed.cachefs import checksum
from gpufeed.cachefs.errors import GpufeedError
from gpufeed.cachefs.model import ObjectInfo, ShardSpec, Source
from gpufeed.cachefs.store.store import ShardStore, StoredShard
from gpufeed.cachefs.units import KIB

EXTENT_BYTES = 64 * KIB


def make_spec(number: int, size_bytes: int = 2 * EXTENT_BYTES + 5000) -> ShardSpec:
    """The shard of this number: one object."""
    info = ObjectInfo(f"oss://bucket/{number}", size_bytes, f"etag-{number}")
    return ShardSpec(info.url, size_bytes, (Source(info, 0),))


def content(spec: ShardSpec) -> bytes:
    """What the shard holds."""
    # Made-up bytes that anybody can make again, nothing secret.
    return random.Random(spec.digest).randbytes(spec.size_bytes)  # noqa: S311 see above


def slot(data: bytes = b"") -> memoryview:
    """A page-aligned slot that begins with `data`."""
    memory = mmap.mmap(-1, EXTENT_BYTES)
    memory.write(data)
    return memoryview(memory)


async def fill(
    store: ShardStore, spec: ShardSpec, *, sample_index: bytes | None = None
) -> StoredShard | None:
    """Put a shard in, as a fill does; None: the store had no room.

    Raises:
        StorageError: as the store raised it; the reservation was aborted.
    """
    reservation = store.reserve(spec)
    if reservation is None:
        return None
    data = content(spec)
    checksums = []
    try:
        for extent in range(spec.extent_count(EXTENT_BYTES)):
            piece = data[extent * EXTENT_BYTES : (extent + 1) * EXTENT_BYTES]
            checksums.append(checksum.crc64(piece))
            await store.write_extent(reservation, extent, slot(piece), len(piece))
        return await store.commit(reservation, checksums, sample_index)
    except GpufeedError:
        await store.abort(reservation)
        raise


async def read(store: ShardStore, spec: ShardSpec) -> bytes:
    """The shard's bytes out of the store, under a lease.

    Raises:
        IntegrityError: as the store raised it.
    """
    store.lease(spec.digest)
    try:
        data = b""
        for extent in range(spec.extent_count(EXTENT_BYTES)):
            target = slot()
            length = await store.read_extent(spec.digest, extent, target)
            data += bytes(target[:length])
        return data
    finally:
        store.release(spec.digest)
