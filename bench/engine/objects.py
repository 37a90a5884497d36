"""The objects that every engine receives, and how to reach them.

They are tars of incompressible samples, each different from the others, so that a fill indexes them
as it would a training shard and a byte from the wrong object is seen. The first object is for
warming up (connections, memory); it is received and not measured.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpufeed.cachefs.checksum import crc64
from gpufeed.cachefs.errors import StorageError, UsageError
from gpufeed.cachefs.units import GIB, MIB, TIB, format_bytes, round_up

BUCKET = "cachebench"
# Servers that check nothing take any signature; those that check know these.
REGION = "cn-hangzhou"
ACCESS_KEY = "cachebench-key"
ACCESS_SECRET = "cachebench-secret"  # noqa: S105 a stand-in's
OBJECT_BYTES_MAX = 64 * MIB
SIZE_BYTES_MIN = MIB
SIZE_BYTES_MAX = TIB
# About the mean of a photograph in a training set.
SAMPLE_BYTES = 110_000
_TAR_BLOCK_BYTES = 512
_TAR_END = bytes(2 * _TAR_BLOCK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object at the server."""

    key: str
    size_bytes: int
    crc64: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A server and the objects at it. The first one is for warming up."""

    endpoint: str
    objects: tuple[StoredObject, ...]

    @property
    def port(self) -> int:
        """The server's port on loopback."""
        return int(self.endpoint.rpartition(":")[2])

    @property
    def measured(self) -> tuple[StoredObject, ...]:
        """The objects that are measured."""
        return self.objects[1:]


def object_count(size_bytes: int) -> int:
    """Objects of which `size_bytes` are made, the one for warming up not among them.

    Raises:
        UsageError: out of range.
    """
    if not SIZE_BYTES_MIN <= size_bytes <= SIZE_BYTES_MAX:
        raise UsageError(
            f"--size is {format_bytes(size_bytes)}; it must be from {format_bytes(SIZE_BYTES_MIN)} "
            f"to {format_bytes(SIZE_BYTES_MAX)}"
        )
    return -(-size_bytes // OBJECT_BYTES_MAX)


def make_objects(directory: Path, size_bytes: int, *, seed: int) -> Iterator[StoredObject]:
    """Write the objects under ``directory/BUCKET``, durable, one after the other.

    Synced so that writing them back to disk does not fall into what is measured; their pages stay
    in the page cache, where the server takes them from.

    Raises:
        UsageError: see `object_count`.
        StorageError: the disk refused.
    """
    count = object_count(size_bytes)
    each_bytes = size_bytes // count
    try:
        (directory / BUCKET).mkdir(parents=True)
        for number in range(count + 1):
            data = _tar(number, each_bytes, np.random.default_rng((seed, number)))
            key = f"shard-{number:06d}.tar"
            _write(directory / BUCKET / key, data)
            yield StoredObject(key=key, size_bytes=len(data), crc64=crc64(data))
    except OSError as error:
        raise StorageError(
            f"{directory}: {error.strerror}; free space, or choose another --work-dir"
        ) from error


def _tar(number: int, size_bytes: int, rng: np.random.Generator) -> bytearray:
    """A tar of about `size_bytes`, of at least one sample."""
    sample_bytes = min(SAMPLE_BYTES, size_bytes // 2)
    place_bytes = _TAR_BLOCK_BYTES + round_up(sample_bytes, _TAR_BLOCK_BYTES)
    data = bytearray()
    for sample in range(max(1, (size_bytes - len(_TAR_END)) // place_bytes)):
        header = tarfile.TarInfo(f"{number:06d}-{sample:06d}.jpg")
        header.size = sample_bytes
        data += header.tobuf(tarfile.USTAR_FORMAT)
        data += rng.bytes(sample_bytes)
        data += bytes(-len(data) % _TAR_BLOCK_BYTES)
    data += _TAR_END
    return data


def _write(path: Path, data: bytearray) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fdatasync(file.fileno())


def room_needed(size_bytes: int) -> int:
    """Bytes of disk for the objects, the one for warming up included."""
    return size_bytes + size_bytes // object_count(size_bytes) + GIB // 16
