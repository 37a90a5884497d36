"""Which shards are stored compressed at their origin, and how. Pure.

A compressed shard is decompressed once, as it streams in: what is cached and served is what it
holds, so that no epoch pays for it twice. How long that is, is known when the stream ends.
"""

from __future__ import annotations

GZIP = "gzip"
ZSTD = "zstd"
CODECS = (GZIP, ZSTD)

_SUFFIXES = ((".gz", GZIP), (".tgz", GZIP), (".zst", ZSTD), (".tzst", ZSTD))


def codec_of(url: str) -> str:
    """The codec that an address's name tells; empty: the object is served as it is."""
    name = url.lower()
    return next((codec for suffix, codec in _SUFFIXES if name.endswith(suffix)), "")
