"""From what a user names to shards: the pure half of opening a dataset.

Tars stay as they are, one shard each; compressed ones are decompressed as they come, and their
lengths are not known before. Loose objects (one sample each) are laid side by side into
**virtual shards**: grouped by a fixed pseudo-random permutation, because a listing is sorted by
class and a shard of one class only would shuffle badly; placed so that an object rarely straddles
two extents, at a cost of at most `PADDING_RATIO_MAX` of the bytes. Grouping depends on the listing
alone, so every node and every run makes the same shards.
"""

from __future__ import annotations

import hashlib
import os.path
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpufeed.cachefs.codec import codec_of
from gpufeed.cachefs.errors import UsageError
from gpufeed.cachefs.model import ObjectInfo, ShardSpec, Source
from gpufeed.cachefs.sampleindex import Member, SampleIndex, SampleIndexBuilder

TAR_SUFFIXES = (".tar",)
PACKED_TAR_SUFFIXES = (".tar.gz", ".tgz", ".tar.zst", ".tzst")
FOREIGN_TAR_SUFFIXES = (".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".tar.lz4")
PADDING_RATIO_MAX = 0.05
# Objects begin where a SIMD load likes it.
ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class VirtualShard:
    """A virtual shard and where its samples lie."""

    spec: ShardSpec
    index: SampleIndex


def manifest_hash(specs: Sequence[ShardSpec]) -> str:
    """32 hex digits over the identities of all shards, in order."""
    state = hashlib.blake2b(b"gpufeed-manifest-1\0", digest_size=16)
    for spec in specs:
        state.update(bytes.fromhex(spec.digest))
    return state.hexdigest()


def guess_kind(infos: Sequence[ObjectInfo], *, decompress: bool = True) -> str:
    """``tar`` if every object is one, compressed or not, ``loose`` if none is.

    Raises:
        UsageError: a mixture, or tars compressed in a way that is not read.
    """
    refused = FOREIGN_TAR_SUFFIXES if decompress else FOREIGN_TAR_SUFFIXES + PACKED_TAR_SUFFIXES
    packed = [info.url for info in infos if info.url.lower().endswith(refused)]
    if packed:
        raise UsageError(
            f"{packed[0]} is a compressed tar that is not read"
            f"{'' if decompress else ' (store.decompress is off)'}: store it as .tar, .tar.gz or "
            ".tar.zst (kind='loose' would read the archive itself as one sample)"
        )
    suffixes = TAR_SUFFIXES + PACKED_TAR_SUFFIXES
    tars = sum(info.url.lower().endswith(suffixes) for info in infos)
    if tars not in (0, len(infos)):
        raise UsageError(
            f"{tars} of {len(infos)} objects are tar files: say kind='tar' or kind='loose', or "
            "name a narrower prefix"
        )
    return "tar" if tars else "loose"


def tar_shards(infos: Sequence[ObjectInfo], *, decompress: bool = True) -> list[ShardSpec]:
    """One shard a tar, in the order given."""
    return [whole_shard(info, codec_of(info.url) if decompress else "") for info in infos]


def whole_shard(info: ObjectInfo, codec: str = "") -> ShardSpec:
    """One object as a shard. With a codec, its length is a guess until it was decompressed."""
    return ShardSpec(info.url, info.size_bytes, (Source(info, 0),), codec=codec, is_sized=not codec)


def virtual_shards(
    infos: Sequence[ObjectInfo], *, prefix: str, shard_bytes: int, extent_bytes: int
) -> list[VirtualShard]:
    """Group loose objects. See the top of the file.

    Args:
        infos: the objects, sorted by address.
        prefix: what sample keys leave out of the address.
        shard_bytes: a shard is closed when the next object would make it longer.
        extent_bytes: the size of a slot.
    """
    state = hashlib.blake2b(digest_size=8)
    for info in infos:
        state.update(f"{info.url}\0{info.etag}\n".encode())
    generator = np.random.Generator(np.random.Philox(int.from_bytes(state.digest(), "little")))
    order = generator.permutation(len(infos))
    mean = sum(info.size_bytes for info in infos) / max(1, len(infos))
    # Skipping to the next extent wastes half an object on average for each extent.
    skip_bytes_max = 2 * PADDING_RATIO_MAX * extent_bytes if mean < extent_bytes / 10 else 0
    shards: list[VirtualShard] = []
    members: list[ObjectInfo] = []
    offsets: list[int] = []
    at = 0
    for i in order:
        info = infos[int(i)]
        place = _place(at, info.size_bytes, extent_bytes, skip_bytes_max)
        if members and place + info.size_bytes > shard_bytes:
            shards.append(_virtual(prefix, len(shards), members, offsets))
            members, offsets, place = [], [], 0
        members.append(info)
        offsets.append(place)
        at = place + info.size_bytes
    if members:
        shards.append(_virtual(prefix, len(shards), members, offsets))
    return shards


def _place(at: int, size: int, extent_bytes: int, skip_bytes_max: float) -> int:
    place = -(-at // ALIGN_BYTES) * ALIGN_BYTES
    room = extent_bytes - place % extent_bytes
    if size > room and size <= extent_bytes and room <= skip_bytes_max:
        return place + room
    return place


def _virtual(
    prefix: str, number: int, members: Sequence[ObjectInfo], offsets: Sequence[int]
) -> VirtualShard:
    sources = tuple(Source(i, o) for i, o in zip(members, offsets, strict=True))
    builder = SampleIndexBuilder()
    for source in sources:
        info = source.info
        name = info.url.removeprefix(prefix)
        key, ext = os.path.splitext(name)
        member = Member(ext[1:].lower() or "bin", source.offset_bytes, info.size_bytes)
        builder.add(key, (member,))
    # Nothing but empty objects still needs an extent, to be announced with.
    size = max(1, sources[-1].offset_bytes + sources[-1].info.size_bytes)
    spec = ShardSpec(f"{prefix}#virtual-{number:06d}", size, sources, grouping=prefix)
    return VirtualShard(spec, builder.build())
