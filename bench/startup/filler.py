"""A cache directory with as many committed shards as asked, made in seconds instead of days.

Heads go into the index in bulk; files are empty, but there, under their names: a start looks at
names only. One real shard, which a daemon put there by itself before, is what is read afterwards.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np

from gpufeed.cachefs.store.directory import CacheDirectory
from gpufeed.cachefs.store.files import FILE_MODE, DiskFiles
from gpufeed.cachefs.store.heads import HEAD_DTYPE, KEY_BYTES
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.units import BLOCK_BYTES

# What each made-up shard is said to take on disk: header, one block of data, trailer.
FILE_BYTES = 3 * BLOCK_BYTES
_SEED = 1


def add_shards(cache_dir: Path, count: int, extent_bytes: int) -> None:
    """Add `count` made-up shards to an existing cache that no daemon uses.

    Raises:
        GpufeedError: the directory is in use, or the disk refused.
    """
    draw = random.Random(_SEED)
    keys = sorted(draw.randbytes(KEY_BYTES) for _ in range(count))
    heads = np.zeros(count, dtype=HEAD_DTYPE)
    heads["extent_bytes"] = extent_bytes
    heads["size_bytes"] = BLOCK_BYTES
    heads["file_bytes"] = FILE_BYTES
    heads["sample_count"] = 1
    heads["last_use"] = np.random.default_rng(_SEED).permutation(count) + 1
    directory = CacheDirectory(str(cache_dir), DiskFiles())
    directory.open()
    try:
        for key in keys:
            os.mknod(directory.shard_path(key.hex()), FILE_MODE)
        index = Index(directory.index_path)
        index.put_many(b"".join(keys), heads)
        index.close()
    finally:
        directory.close()


def set_clean(cache_dir: Path, is_clean: bool) -> None:
    """Let the cache look as after a clean end, or as after a kill."""
    index = Index(str(cache_dir / "index"))  # which takes the mark away
    if is_clean:
        index.mark_clean()
    index.close()
