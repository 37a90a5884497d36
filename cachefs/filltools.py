"""What every fill of a daemon shares, and what it asks of the origin engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.inflight import InFlight
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.store.store import ShardStore


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FillTools:
    """What every fill of a daemon shares."""

    engine: Engine
    store: ShardStore
    pool: SlotPool
    in_flight: InFlight
    metrics: Metrics
    extent_bytes: int
    part_bytes: int
    pending: Callable[[str], bool]
