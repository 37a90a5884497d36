"""What every fill of a tenant shares, and what it asks of the origin engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from gpufeed.cachefs.access import Access
from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.config import EXPANSION_RATIO_MAX
from gpufeed.cachefs.indexmemory import IndexMemory
from gpufeed.cachefs.inflight import InFlight
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.store.store import ShardStore

DECODER_THREADS_MAX = 32


class Engine(Protocol):
    """What a fill needs of the origin engine."""

    async def head(self, url: str, options: Mapping[str, str] | None = None) -> ObjectInfo:
        """See `gpufeed.cachefs.origin.engine.OriginEngine`."""
        ...

    async def read_into(
        self,
        info: ObjectInfo,
        begin_bytes: int,
        targets: Sequence[memoryview],
        on_target: Callable[[int], None],
        options: Mapping[str, str] | None = None,
        *,
        demand: bool = True,
    ) -> int | None:
        """See `gpufeed.cachefs.origin.engine.OriginEngine`."""
        ...


def _decoders() -> Executor:
    return ThreadPoolExecutor(DECODER_THREADS_MAX, "gpufeed-decoder")


@dataclass(frozen=True, slots=True, kw_only=True)
class FillTools:
    """What every fill of a tenant shares. Engine and store are those of all tenants.

    Attributes:
        access: what of the store the tenant may have; None: all of it, there is no other tenant.
        expansion_ratio_max: a compressed object that expands further is refused.
        decoders: threads of decompression, which wait in them for the network.
        indexes: of stored shards that were read lately.
    """

    engine: Engine
    store: ShardStore
    pool: SlotPool
    in_flight: InFlight
    metrics: Metrics
    extent_bytes: int
    part_bytes: int
    expansion_ratio_max: float = EXPANSION_RATIO_MAX
    decoders: Executor = field(default_factory=_decoders, repr=False)
    access: Access | None = None
    indexes: IndexMemory = field(default_factory=IndexMemory, repr=False)

    def may_share(self, digest: str) -> bool:
        """Whether what others brought of a shard may be served without asking anybody."""
        return self.access is None or self.access.is_proven(digest)
