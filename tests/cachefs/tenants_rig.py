"""Tenants for tests: one store and one engine, and an arena and a cache each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpufeed.cachefs.access import Access
from gpufeed.cachefs.arena.memfd import Arena
from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.cache import ShardCache, ShardSource
from gpufeed.cachefs.config import ArenaConfig, StoreConfig
from gpufeed.cachefs.errors import AccessDeniedError, PastEndError
from gpufeed.cachefs.fills import Fills
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.inflight import InFlight
from gpufeed.cachefs.listing import tar_shards
from gpufeed.cachefs.metrics import Metrics, MetricsPart
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.tarscan import TarIndexer
from gpufeed.cachefs.testing.clock import ManualClock
from gpufeed.cachefs.testing.memory_engine import MemoryEngine

EXTENT = 64 * 1024
GAUGES = ("fills_in_flight", "store_reserved_bytes", "arena_leased_slots", "in_flight_bytes")


class KeyedEngine(MemoryEngine):
    """Refuses the keys in `denied`, and all looking up with `head_failure`."""

    def __init__(self) -> None:
        super().__init__()
        self.denied: set[str] = set()
        self.head_failure: Exception | None = None
        self.heads = 0

    def _check(self, url: str, options: Mapping[str, str] | None) -> None:
        if options and options.get("key") in self.denied:
            raise AccessDeniedError(f"{url}: the key may not")

    async def head(self, url: str, options: Mapping[str, str] | None = None) -> ObjectInfo:
        self.heads += 1
        self._check(url, options)
        if self.head_failure is not None:
            raise self.head_failure
        return await super().head(url, options)

    async def read_into(
        self, info: ObjectInfo, begin_bytes: int, targets: Sequence[memoryview],
        on_target: Callable[[int], None], options: Mapping[str, str] | None = None, *,
        demand: bool = True,
    ) -> int | None:  # fmt: skip
        self._check(info.url, options)
        return await super().read_into(
            info, begin_bytes, targets, on_target, options, demand=demand
        )


class TenantRig:
    """One tenant's side."""

    def __init__(self, name: str, node: NodeRig, slots: int) -> None:
        self.name = name
        metrics = MetricsPart(node.metrics)
        config = ArenaConfig(size_bytes=slots * EXTENT, extent_bytes=EXTENT, lock_memory=False)
        self.arena = Arena(config)
        self.pool = SlotPool(self.arena, metrics)
        self.access = Access(node.engine, node.clock, metrics)
        tools = FillTools(
            engine=node.engine, store=node.store, pool=self.pool, metrics=metrics,
            in_flight=InFlight.of_arena(config, part_bytes=2 * EXTENT, metrics=metrics),
            extent_bytes=EXTENT, part_bytes=2 * EXTENT,
            access=self.access,
        )  # fmt: skip
        self.cache = ShardCache(tools, node.neighbours)

    def wants(self, source: ShardSource) -> ShardSource:
        """The shard as this tenant asks for it, with a key of its own name."""
        return replace(source, options={"key": self.name}, tenant=self.name)

    async def read(
        self, source: ShardSource, *, before: Callable[[int], object] | None = None
    ) -> bytes:
        """All bytes, asking for permission first; `before` is called ahead of each extent."""
        source = self.wants(source)
        await self.cache.permit(source)
        reader = self.cache.open(source)
        data, extent = b"", 0
        try:
            with contextlib.suppress(PastEndError):
                while True:
                    if before is not None:
                        waits = before(extent)
                        if waits is not None:
                            await waits
                    slot, _ = await reader.extent(extent)
                    data += bytes(self.pool.view(slot)[: reader.length(extent)])
                    self.pool.drop(slot)
                    extent += 1
            await reader.finish()
        finally:
            reader.close()
        return data


class NodeRig:
    """Two tenants, ``a`` and ``b``."""

    def __init__(self, path: Path | None, *, slots: int = 16) -> None:
        self.metrics = Metrics()
        self.engine = KeyedEngine()
        self.clock = ManualClock()
        self.neighbours: list[Fills] = []
        self.store = ShardStore.open(
            StoreConfig(path=str(path or ""), capacity_bytes=64 << 20, free_floor_ratio=0.0),
            extent_bytes=EXTENT, metrics=self.metrics, clock=self.clock,
        )  # fmt: skip
        self.a, self.b = TenantRig("a", self, slots), TenantRig("b", self, slots)

    def put(self, name: str, data: bytes) -> ShardSource:
        """An object, and a shard of it."""
        self.engine.objects[f"mem://{name}"] = data
        (spec,) = tar_shards([self.engine.info(f"mem://{name}")])
        is_tar = ".tar" in name
        return ShardSource(spec=spec, make_indexer=lambda s: TarIndexer(s.name) if is_tar else None)

    async def close(self) -> None:
        for tenant in (self.a, self.b):
            await tenant.cache.close()
        for tenant in (self.a, self.b):
            tenant.pool.table.check()
            assert tenant.pool.table.held_count == 0
            tenant.arena.close()
        for gauge in GAUGES:
            assert self.metrics.get(gauge) == 0, gauge
        await self.store.close()
