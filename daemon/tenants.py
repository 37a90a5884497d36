"""The tenants of a running daemon: what each has of its own, and who is admitted as which.

Of its own a tenant has its arena with the slots, windows and memory accounts over it, its fills and
loads, its proofs of access, and its datasets with its list of what may be read and its credentials.
Store, origin engine, the book of plans and the metrics are the daemon's: a shard is kept once, and
fetched once. Where there is one tenant, nothing is asked or copied on account of tenants.

Owned by the daemon's loop.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gpufeed.cachefs.arena.ledger import ArenaLedger
from gpufeed.cachefs.cache import ShardCache
from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.errors import CapacityError
from gpufeed.daemon.admission import Admission
from gpufeed.daemon.datasets import Datasets
from gpufeed.daemon.memory import ArenaMemory, heap_reserved_bytes
from gpufeed.daemon.tenantconfig import ALONE, SECTION, TenantConfig
from gpufeed.daemon.windows import Windows


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant.

    Attributes:
        config: as it was configured; `ALONE` where there is only one.
        cache: with its arena.
        datasets: what it may open.
        windows: what its sessions may hold.
        memory: what of its arena may be used beside earlier ones.
        sessions_count: open as this tenant.
    """

    config: TenantConfig
    cache: ShardCache
    datasets: Datasets
    windows: Windows
    memory: ArenaMemory
    sessions_count: int = 0

    @property
    def name(self) -> str:
        """Empty where there is only one."""
        return self.config.name

    def job(self, name: str) -> str:
        """A job's name among all tenants' jobs: two that are called alike do not go in step."""
        return f"{self.name}\0{name}"

    def enter(self) -> None:
        """One more session.

        Raises:
            CapacityError: it has as many as it may.
        """
        most = self.config.sessions_max
        if most and self.sessions_count >= most:
            raise CapacityError(
                f"the tenant {self.name} has {most} sessions open already: close some, or raise "
                f"{SECTION}.{self.name}.sessions_max"
            )
        self.sessions_count += 1

    def leave(self) -> None:
        """A session is over."""
        self.sessions_count -= 1


def make_tenant(
    config: TenantConfig, cache: ShardCache, datasets: Datasets, *, memory_bytes: int, ratio: float,
    ledger: ArenaLedger, clock: Clock,
) -> Tenant:  # fmt: skip
    """A tenant over its cache and datasets.

    Args:
        config: of the tenant.
        cache: of the tenant.
        datasets: of the tenant.
        memory_bytes: for everything in the daemon; 0: no limit but the arenas' sizes.
        ratio: the tenant's share of what arenas may have of that.
        ledger: of all arenas at the daemon's socket.
        clock: of the daemon.
    """
    tools = cache.tools
    arena = tools.pool.arena
    windows = Windows(arena.slot_count, arena.extent_bytes)
    # Without a limit only the arena has one, and an earlier one may be as large.
    arenas_bytes = int((memory_bytes - heap_reserved_bytes(memory_bytes)) * ratio)
    limit_bytes = arenas_bytes or 2 * arena.size_bytes
    memory = ArenaMemory(
        limit_bytes, tools.pool, windows, tools.metrics,
        ledger=ledger, tenant=config.name, clock=clock,
    )  # fmt: skip
    return Tenant(config, cache, datasets, windows, memory)


class Tenants:
    """All tenants of a daemon.

    Args:
        tenants: at least one; several, or one with a name, are told apart by `admission`.
        admission: says whose a connection is.
        memory_bytes: for everything in the daemon; 0: no limit.
    """

    def __init__(
        self, tenants: Sequence[Tenant], admission: Admission, *, memory_bytes: int = 0
    ) -> None:
        self._by_name = {tenant.name: tenant for tenant in tenants}
        self._admission = admission
        arenas_bytes = sum(t.cache.tools.pool.arena.size_bytes for t in tenants)
        # What the heap may have.
        self.heap_bytes_max = (memory_bytes or sys.maxsize) - arenas_bytes

    @classmethod
    def alone(
        cls, cache: ShardCache, datasets: Datasets, *, ledger: ArenaLedger, clock: Clock
    ) -> Tenants:
        """Everybody is of the one tenant that there is, and memory has no limit."""
        tenant = make_tenant(
            ALONE, cache, datasets, memory_bytes=0, ratio=1.0, ledger=ledger, clock=clock
        )
        return cls([tenant], Admission(()))

    def admit(self, door: str, token: str | None, uid: int) -> Tenant:
        """The tenant that a connection is of.

        Args:
            door: the socket that it came to: `COMMON_DOOR`, or the path of a tenant's own.
            token: what it said.
            uid: its user.

        Raises:
            AccessDeniedError: it is nobody's, with what to set.
        """
        return self._by_name[self._admission.admit(door, token, uid)]

    def door_limit(self, door: str) -> int:
        """How many connections may be open at a door at a time; 0: no limit of its own."""
        for tenant in self._by_name.values():
            if door and tenant.config.socket_path == door:
                return tenant.config.sessions_max
        return 0
