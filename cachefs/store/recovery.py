"""What a start finds in a cache directory, and how index and files are made to agree.

After a clean end they agree already: what the index says is taken as it is, and a file that
somebody removed meanwhile is found out when it is read. After any other end the folders are listed:
a file without a head is adopted if its self-description is right, and removed if not; a head
without a file is dropped; interrupted fills are removed. Known files are not opened either way, so
that a million shards take seconds. Blocking; runs before the loop does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpufeed.cachefs.errors import IntegrityError, StorageError
from gpufeed.cachefs.store.directory import CacheDirectory
from gpufeed.cachefs.store.files import Files, is_shortage
from gpufeed.cachefs.store.heads import ADOPTED_USE, HEAD_DTYPE, Head, Heads
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.store.shardfile import read_self_description

# Shards adopted in one transaction.
ADOPT_BATCH_COUNT = 1024
_LOG = logging.getLogger("gpufeed.store")


@dataclass(frozen=True, slots=True)
class Found:
    """Committed shards: digests, and a head each. A last use of 0: adopted just now."""

    digests: list[str]
    heads: Heads

    def pick(self, rows: NDArray[np.intp]) -> Found:
        """These rows, in this order."""
        digests = self.digests
        return Found([digests[row] for row in rows.tolist()], self.heads[rows])


def reconcile(directory: CacheDirectory, index: Index, files: Files) -> Found:
    """Make index and files agree; returns what is committed.

    Raises:
        StorageError: the disk or the index refused.
    """
    indexed = index.load()
    found = Found(indexed.digests, indexed.heads)
    if index.is_clean and not indexed.damaged_count:
        return found
    missing: set[str] = set()
    orphans: list[str] = []
    for gone, unknown in directory.scan(indexed.digests):
        missing |= gone
        orphans.extend(unknown)
    if missing:
        _LOG.warning("%d shards in the index have no file", len(missing))
        index.delete(missing)
        keeps = np.fromiter((d not in missing for d in found.digests), bool, len(found.digests))
        found = Found([d for d in found.digests if d not in missing], found.heads[keeps])
    adopted = _adopt(directory, index, files, sorted(orphans))
    return Found(found.digests + adopted.digests, np.concatenate([found.heads, adopted.heads]))


def _adopt(directory: CacheDirectory, index: Index, files: Files, digests: list[str]) -> Found:
    adopted: list[tuple[str, Head]] = []
    for begin in range(0, len(digests), ADOPT_BATCH_COUNT):
        entries: list[tuple[str, Head]] = []
        for digest in digests[begin : begin + ADOPT_BATCH_COUNT]:
            path = directory.shard_path(digest)
            try:
                record = read_self_description(files, path, digest)
            except (IntegrityError, StorageError) as error:
                if isinstance(error, StorageError) and is_shortage(error):
                    raise
                _LOG.warning("%s is removed: %s", path, error)
                directory.remove(path)
                continue
            head = Head(
                record.extent_bytes, record.size_bytes, record.file_bytes, record.sample_count,
                ADOPTED_USE,
            )  # fmt: skip
            entries.append((digest, head))
        _LOG.info("%d shards that the index did not know were adopted", len(entries))
        index.put(entries)
        adopted.extend(entries)
    heads = np.zeros(len(adopted), dtype=HEAD_DTYPE)
    for row, (_, head) in zip(heads, adopted, strict=True):
        for name in ("extent_bytes", "size_bytes", "file_bytes"):
            row[name] = getattr(head, name)
        row["sample_count"] = -1 if head.sample_count is None else head.sample_count
    return Found([digest for digest, _ in adopted], heads)
