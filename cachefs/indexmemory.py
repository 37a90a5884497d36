"""Sample indexes of shards that were read lately, so that each reader of a node need not load them.

A shard's digest stands for its exact bytes, so what is remembered is never out of date. Bounded by
`INDEX_BYTES_MAX`; the least recently used goes first: any of them can be read again from the store.

Owned by the daemon's loop.
"""

from __future__ import annotations

import collections

import numpy as np
import numpy.typing as npt

from gpufeed.cachefs.sampleindex import SampleIndex
from gpufeed.cachefs.units import MIB

INDEX_BYTES_MAX = 16 * MIB

Ends = npt.NDArray[np.uint64]


class IndexMemory:
    """See the top of the file."""

    def __init__(self, limit_bytes: int = INDEX_BYTES_MAX) -> None:
        self._limit_bytes = limit_bytes
        self._entries: collections.OrderedDict[str, tuple[SampleIndex, Ends]]
        self._entries = collections.OrderedDict()
        self.used_bytes = 0

    def get(self, digest: str) -> tuple[SampleIndex, Ends] | None:
        """The index and where each of its samples ends (`SampleIndex.ends`)."""
        found = self._entries.get(digest)
        if found is not None:
            self._entries.move_to_end(digest)
        return found

    def put(self, digest: str, index: SampleIndex, ends: Ends) -> None:
        """Remember; one that is larger than the limit is not."""
        if digest in self._entries:
            return
        self._entries[digest] = (index, ends)
        self.used_bytes += _cost(index, ends)
        while self.used_bytes > self._limit_bytes:
            _, gone = self._entries.popitem(last=False)
            self.used_bytes -= _cost(*gone)


def _cost(index: SampleIndex, ends: Ends) -> int:
    return index.nbytes + ends.nbytes
