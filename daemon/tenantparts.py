"""Builds what each tenant has of its own, over the store and the engine that all of them share.

An arena each, of its share of `arena.size_bytes`; slots, budget, fills and datasets over it. With
one tenant, whoever reads a cached shard has the rights that it was fetched with, so that no proof
of access is kept, and no other tenant's fills are looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from gpufeed.cachefs.access import Access
from gpufeed.cachefs.arena.ledger import ArenaLedger
from gpufeed.cachefs.arena.memfd import Arena
from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.cache import ShardCache
from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.config import ArenaConfig
from gpufeed.cachefs.fills import Fills
from gpufeed.cachefs.filltools import FillTools
from gpufeed.cachefs.inflight import InFlight
from gpufeed.cachefs.metrics import Metrics, MetricsPart
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.plan import PlanBook
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.daemon.config import Settings
from gpufeed.daemon.datasets import Datasets, Rights
from gpufeed.daemon.tenantconfig import ALONE, TenantConfig, arena_of, arena_ratios
from gpufeed.daemon.tenants import Tenant, make_tenant

ALLOW_ALL = ("",)
PARTS_PER_ARENA_MIN = 16


def part_bytes_of(part_bytes: int, arena: ArenaConfig) -> int:
    """The size of a request: as configured, but no more than a sixteenth of the arena.

    A part's slots are taken before its first byte; several must be under way at once.
    """
    whole_extents = max(1, arena.slot_count // PARTS_PER_ARENA_MIN)
    return min(part_bytes, whole_extents * arena.extent_bytes)


class TenantParts:
    """See the top of the file."""

    def __init__(
        self, settings: Settings, engine: OriginEngine, store: ShardStore, *, metrics: Metrics,
        clock: Clock, book: PlanBook, embedded: bool,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._engine = engine
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._book = book
        self._embedded = embedded
        self._dataset_ids = itertools.count(1)
        self._neighbours: list[Fills] = []
        names = [tenant.name for tenant in settings.tenants] or [ALONE.name]
        self._ledger = ArenaLedger(settings.daemon.socket_path, names)

    def make_all(self, closers: list[Callable[[], None]]) -> list[Tenant]:
        """Every tenant that is configured, or the one that there is.

        Args:
            closers: gets what closes each arena as it is made, to be called in this order, last of
                all: a disk that hangs may write into one for as long as the store is open.

        Raises:
            CapacityError: there is no memory for an arena.
            OperatorError: nothing can be written beside the socket.
        """
        tenants = self._settings.tenants
        if not tenants:
            return [self._make(ALONE, 1.0, closers)]
        shares = zip(tenants, arena_ratios(tenants), strict=True)
        return [self._make(tenant, ratio, closers) for tenant, ratio in shares]

    def _make(
        self, config: TenantConfig, ratio: float, closers: list[Callable[[], None]]
    ) -> Tenant:
        settings, metrics = self._settings, MetricsPart(self._metrics)
        arena_config = arena_of(settings.arena, ratio)
        arena = Arena(arena_config)
        closers.append(arena.close)
        metrics.set("arena_locked_bytes", arena.locked_bytes)
        part_bytes = part_bytes_of(settings.origin.part_bytes, arena_config)
        access = None if config is ALONE else Access(self._engine, self._clock, self._metrics)
        tools = FillTools(
            engine=self._engine, store=self._store, metrics=metrics,
            pool=SlotPool(arena, metrics, self._book.wait_s),
            in_flight=InFlight.of_arena(arena_config, part_bytes=part_bytes, metrics=metrics),
            extent_bytes=arena_config.extent_bytes, part_bytes=part_bytes,
            access=access,
            expansion_ratio_max=settings.store.expansion_ratio_max,
        )  # fmt: skip
        cache = ShardCache(tools, None if access is None else self._neighbours)
        datasets = Datasets(
            self._engine, self._store, self._rights(config), extent_bytes=arena_config.extent_bytes,
            decompress=settings.store.decompress, access=access, ids=self._dataset_ids,
        )  # fmt: skip
        tenant = make_tenant(
            config, cache, datasets, memory_bytes=settings.daemon.memory_bytes, ratio=ratio,
            ledger=self._ledger, clock=self._clock,
        )  # fmt: skip
        closers.append(tenant.memory.close)
        return tenant

    def _rights(self, config: TenantConfig) -> Rights:
        daemon, endpoint = self._settings.daemon, self._settings.origin.endpoint
        if self._embedded:
            return Rights(allow=ALLOW_ALL, endpoint=endpoint)
        return Rights(
            tenant=config.name, allow=config.allow or daemon.allow, endpoint=endpoint,
            endpoints=daemon.endpoints, options=config.origin_options,
        )  # fmt: skip
