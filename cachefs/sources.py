"""A shard as a reader asks for it: what it is, how to reach it, how its samples are found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.sampleindex import SampleIndex
from gpufeed.cachefs.shares import Standing


class Indexer(Protocol):
    """Finds samples in a shard's bytes as they stream by."""

    def feed(self, view: memoryview) -> None:
        """The next contiguous bytes."""
        ...

    def take(self) -> SampleIndex | None:
        """Samples completed since the last call."""
        ...

    def finish(self) -> None:
        """The shard is over."""
        ...


MakeIndexer = Callable[[ShardSpec], Indexer | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSource:
    """A shard, how to reach it, and how to find its samples.

    Attributes:
        spec: the shard.
        options: of its origin: endpoint and credentials.
        make_indexer: finds its samples.
        adhoc: it is read as a file, outside of any dataset.
        tenant: whose reader it is for.
    """

    spec: ShardSpec
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    make_indexer: MakeIndexer
    adhoc: bool = False
    tenant: str = ""

    @property
    def standing(self) -> Standing:
        """Whose the shard is, for the policy."""
        sources = self.spec.sources
        url = sources[0].info.url if sources else self.spec.name
        return Standing(url, self.tenant, self.adhoc)


class KnownIndexer:
    """Satisfies `Indexer` for shards whose samples are known before a byte has come."""

    def __init__(self, index: SampleIndex) -> None:
        self._index = index
        self._ends = index.ends()
        self._position = 0
        self._taken = 0
        self.sample_count = len(index)

    def feed(self, view: memoryview) -> None:
        """The next contiguous bytes; only their number matters."""
        self._position += len(view)

    def take(self) -> SampleIndex | None:
        """Samples completed since the last call."""
        end = int(np.searchsorted(self._ends, self._position, side="right"))
        begin, self._taken = self._taken, max(end, self._taken)
        return self._index.slice(begin, end) if end > begin else None

    def finish(self) -> None:
        """Nothing is left to find."""
