"""A store over a directory, with a clock to turn and invariants to check."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gpufeed.cachefs.config import PolicyConfig, StoreConfig
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.nextuse import NextUses
from gpufeed.cachefs.policy import PlanPolicy
from gpufeed.cachefs.shares import Shares
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.testing import shards
from gpufeed.cachefs.testing.clock import ManualClock
from gpufeed.cachefs.testing.shards import EXTENT_BYTES
from gpufeed.cachefs.units import MIB


class Rig:
    def __init__(
        self, path: Path, capacity_bytes: int = 4 * MIB, files=None, *,
        extent_bytes: int = EXTENT_BYTES, floor_ratio: float = 0.0, writes_in_flight_max: int = 0,
    ) -> None:  # fmt: skip
        self.path = path
        self.capacity_bytes = capacity_bytes
        self.metrics = Metrics()
        self.clock = ManualClock()
        config = StoreConfig(
            path=str(path),
            capacity_bytes=capacity_bytes,
            free_floor_ratio=floor_ratio,
            writes_in_flight_max=writes_in_flight_max,
        )
        self.uses = NextUses()
        self.store = ShardStore.open(
            config, extent_bytes=extent_bytes, metrics=self.metrics, clock=self.clock, files=files,
            policy=PlanPolicy(self.uses, Shares(PolicyConfig(), capacity_bytes)),
        )  # fmt: skip

    async def fill(self, spec: ShardSpec, index=None):
        return await shards.fill(self.store, spec, sample_index=index)

    def claim(self, *specs: ShardSpec, session: int = 1) -> None:
        """A session of this number claims these shards, and tells no order."""
        self.uses.claim(session, self.uses.numbers(spec.digest for spec in specs))

    async def read(self, spec: ShardSpec) -> bytes:
        return await shards.read(self.store, spec)

    def holds(self, spec: ShardSpec) -> bool:
        return self.store.lookup(spec.digest) is not None

    def shard_file(self, spec: ShardSpec) -> Path:
        return self.path / "shards" / spec.digest[:2] / spec.digest

    def files(self) -> list[Path]:
        return [path for path in (self.path / "shards").rglob("*") if path.is_file()]

    def used_bytes(self) -> int:
        """What the disk holds, as the disk counts it."""
        used = 0
        for path in self.files():
            # The store's own threads may unlink it between the listing and the look.
            with contextlib.suppress(FileNotFoundError):
                used += path.stat().st_blocks * 512
        return used

    def check_limit(self) -> None:
        budget = self.store._budget
        assert budget.used_bytes <= budget.capacity_bytes
        assert self.used_bytes() <= self.capacity_bytes

    def check(self) -> None:
        """At rest: no temporary file; disk, accounts and metrics agree."""
        budget = self.store._budget
        assert (budget.reserved_bytes, budget.promised_bytes, budget.unlinking_bytes) == (0, 0, 0)
        self.check_limit()
        names = sorted(path.name for path in self.files())
        assert names == sorted(self.store._shards)
        sizes = sum(path.stat().st_size for path in self.files())
        assert sizes == budget.resident_bytes == self.metrics.get("store_resident_bytes")
        assert self.metrics.get("store_reserved_bytes") == 0
        assert self.metrics.get("store_resident_shards") == len(names)

    async def close(self) -> None:
        await self.store.close()
        self.check()

    async def crash(self) -> None:
        """Let go of everything as a killed process does: nothing is aborted, nothing removed."""
        disk = self.store._disk
        for reservation in self.store._intake.reserved:
            if reservation.opening is not None:
                os.close(await reservation.opening)
        await disk.descriptors.close()
        await disk.threads.close()
        disk.close()
        self.store._disk = None
