"""Finds a shard's samples while it is filled, extent after extent, and keeps them for its readers.

Extents arrive in any order; they are indexed in the shard's order. Used by one fill; not
thread-safe, no I/O.
"""

from __future__ import annotations

from gpufeed.cachefs.sampleindex import SampleIndex, SampleIndexBuilder
from gpufeed.cachefs.sources import Indexer


class Indexing:
    """See the top of the file. Without an indexer it only counts.

    Attributes:
        chunks: ``(extent, samples)``: samples whose bytes all lie in extents up to `extent`.
        next_extent: the extent that is to be indexed next.
    """

    def __init__(self, indexer: Indexer | None) -> None:
        self._indexer = indexer
        self._builder = SampleIndexBuilder()
        self.chunks: list[tuple[int, SampleIndex]] = []
        self.next_extent = 0

    def feed(self, view: memoryview) -> None:
        """The bytes of `next_extent`.

        Raises:
            CorruptSampleError: the shard's format is broken; further extents are only counted.
        """
        extent = self.next_extent
        self.next_extent += 1
        indexer, self._indexer = self._indexer, None
        if indexer is None:
            return
        indexer.feed(view)
        self._indexer = indexer
        self._keep(extent, indexer.take())

    def finish(self) -> None:
        """The shard is over: the last sample is complete.

        Raises:
            CorruptSampleError: the shard was cut off.
        """
        indexer, self._indexer = self._indexer, None
        if indexer is not None:
            indexer.finish()
            self._keep(self.next_extent - 1, indexer.take())

    def _keep(self, extent: int, samples: SampleIndex | None) -> None:
        if samples is not None and len(samples):
            self.chunks.append((extent, samples))
            self._builder.extend(samples)

    @property
    def sample_index(self) -> SampleIndex:
        """All samples found so far."""
        return self._builder.build()

    def encoded(self) -> bytes | None:
        """All samples as the store keeps them; None where none were found."""
        return self.sample_index.encode() if self.chunks else None
