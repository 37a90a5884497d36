"""The values that every layer talks about. Frozen, comparable, free of I/O.

An **object** is what an origin stores. A **shard** is what we cache: one object (a tar), or many
small objects laid side by side (a virtual shard). Its identity contains the etag of every source,
so an overwritten object is another shard and never a stale one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object at an origin, as listed or headed.

    Attributes:
        url: full address, for example ``oss://bucket/key`` or ``file:///path``.
        size_bytes: length of the object.
        etag: version identity, without quotes; never empty.
        crc64: CRC-64/XZ of the whole object where the origin told it, else None.
    """

    url: str
    size_bytes: int
    etag: str
    crc64: int | None = None


def folder_info(url: str) -> ObjectInfo:
    """A folder in a listing of folders: its address ends with ``/``, and it holds no bytes."""
    assert url.endswith("/"), url
    return ObjectInfo(url, 0, "folder")


@dataclass(frozen=True, slots=True)
class Source:
    """One object's place inside a shard: bytes ``[offset_bytes, offset_bytes + size)``."""

    info: ObjectInfo
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A shard: its name, its length and the objects that it is made of.

    Sources are in ascending, non-overlapping order. Gaps between them read as zero bytes. A shard
    with a codec has one source, which holds it compressed (`gpufeed.cachefs.codec`).

    Attributes:
        name: what people call it.
        size_bytes: its length as it is served; while `is_sized` is false, a guess at that.
        sources: the objects.
        codec: how its source is compressed; empty: not at all.
        is_sized: the length is known. No part of the identity.
        origin: the endpoint it is of, where that is not the configured one: the same address and
            etag may be other bytes elsewhere.
        grouping: of a virtual shard, what its samples' keys leave out of their addresses. Another
            identity than one object as a shard of its own, whose samples lie within it.
        is_plain: read as a file, so nobody looks for samples in it. Another identity than the same
            bytes as a dataset's shard, whose readers must find its samples with it.
    """

    name: str
    size_bytes: int
    sources: tuple[Source, ...]
    codec: str = ""
    is_sized: bool = True
    is_plain: bool = False
    origin: str = ""
    grouping: str = ""
    # Asked for many times while a shard is filled and read, and dear for what it is.
    _digest: str = field(default="", init=False, repr=False, compare=False)

    @property
    def digest(self) -> str:
        """32 hex digits that identify these exact bytes: addresses, etags, sizes and places."""
        if not self._digest:
            object.__setattr__(self, "_digest", self._hash())
        return self._digest

    def _hash(self) -> str:
        state = hashlib.blake2b(b"gpufeed-shard-1\0", digest_size=16)
        for source in self.sources:
            info = source.info
            line = f"{info.url}\0{info.etag}\0{info.size_bytes}\0{source.offset_bytes}\n"
            state.update(line.encode())
        if self.codec:
            state.update(f"codec\0{self.codec}\n".encode())
        if self.is_plain:
            state.update(b"plain\n")
        if self.origin:
            state.update(f"origin\0{self.origin}\n".encode())
        if self.grouping:
            state.update(f"grouping\0{self.grouping}\n".encode())
        return state.hexdigest()

    def sized(self, size_bytes: int) -> ShardSpec:
        """The same shard, whose length is known by now."""
        return replace(self, size_bytes=size_bytes, is_sized=True)

    def extent_count(self, extent_bytes: int) -> int:
        """How many extents of `extent_bytes` hold the shard."""
        assert self.is_sized, f"the length of {self.name} is not known yet"
        return -(-self.size_bytes // extent_bytes)
