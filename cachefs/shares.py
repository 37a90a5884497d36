"""Who may hold how much of the store: datasets (quota, pin), tenants, the ad-hoc corner. Pure.

Each resident or admitted shard counts for one **group** (the longest configured prefix that its
address begins with, or the ad-hoc corner, or none) and for one tenant. Quotas and the corner are
hard limits of a group, and a tenant may have a hard limit too. A tenant's fair share is the
capacity divided among the tenants that hold or want something, by weight; it is no limit: what
others leave free may be taken, and is what is taken back first.

Bytes are charged when a shard is admitted, not when it has arrived, so limits hold at any moment.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpufeed.cachefs.config import PolicyConfig
from gpufeed.cachefs.units import BLOCK_BYTES, format_bytes

Mask = npt.NDArray[np.bool_]

_NO_GROUP = 0
_ADHOC = 1
_FIRST_PREFIX = 2
TENANTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Standing:
    """Whose a shard is.

    Attributes:
        url: the address of its first object; empty if not known.
        tenant: for whom it was fetched.
        adhoc: read as a file, outside of any dataset.
    """

    url: str = ""
    tenant: str = ""
    adhoc: bool = False


NOBODY = Standing()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """What one tenant may have.

    Attributes:
        weight: of its fair share, relative to the others'.
        quota_bytes: its hard limit; 0: none.
    """

    weight: float = 1.0
    quota_bytes: int = 0


_PLAIN_SHARE = TenantShare()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a newcomer's group says.

    Attributes:
        group: its number.
        own_short_bytes: to be evicted of the same group before the newcomer may enter.
        tenant_short_bytes: to be evicted of the same tenant before it may enter.
        is_recency: within the group the newest goes before the oldest, whatever plans say.
        refusal: why it can never enter; empty if it can.
    """

    group: int
    own_short_bytes: int = 0
    tenant_short_bytes: int = 0
    is_recency: bool = False
    refusal: str = ""


class Shares:
    """See the top of the file. Numbers are those of `gpufeed.cachefs.nextuse`.

    Args:
        config: quotas, pins and the ad-hoc corner.
        capacity_bytes: of the store.
        tenants: by name; those not named have a weight of 1 and no quota.
    """

    def __init__(
        self,
        config: PolicyConfig,
        capacity_bytes: int,
        tenants: Mapping[str, TenantShare] | None = None,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        rules = sorted(config.rules, key=lambda rule: len(rule.prefix), reverse=True)
        self._prefixes = [rule.prefix for rule in rules]
        self._quota_bytes = [0, int(config.adhoc_ratio * capacity_bytes)]
        self._quota_bytes.extend(rule.quota_bytes for rule in rules)
        self._pinned = np.array([False, False, *(rule.pinned for rule in rules)])
        self._stays = np.array([False, True, *(rule.pinned for rule in rules)])
        self._shares: Mapping[str, TenantShare] = tenants or {}
        self._group_bytes: collections.Counter[int] = collections.Counter()
        self._tenants: dict[str, int] = {}
        self._tenant_bytes: collections.Counter[int] = collections.Counter()
        self._group = np.zeros(0, np.uint16)
        self._tenant = np.zeros(0, np.uint16)
        self._blocks = np.zeros(0, np.int32)

    def fit(self, count: int) -> None:
        """Make room for numbers below `count`."""
        more = count - len(self._group)
        if more > 0:
            self._group = np.pad(self._group, (0, more))
            self._tenant = np.pad(self._tenant, (0, more))
            self._blocks = np.pad(self._blocks, (0, more))

    # --- accounts -----------------------------------------------------------------------------

    def group_of(self, standing: Standing) -> int:
        """The group that a shard counts for."""
        if standing.adhoc:
            return _ADHOC
        if not self._prefixes:
            return _NO_GROUP
        for i, prefix in enumerate(self._prefixes):
            if standing.url.startswith(prefix):
                return _FIRST_PREFIX + i
        return _NO_GROUP

    def tenant_of(self, standing: Standing) -> int:
        """The tenant's number. Beyond `TENANTS_MAX` the rest share one."""
        if len(self._tenants) >= TENANTS_MAX:
            return self._tenants.get(standing.tenant, 0)
        return self._tenants.setdefault(standing.tenant, len(self._tenants))

    def charge(self, standing: Standing, size_bytes: int) -> None:
        """A shard was admitted."""
        self._group_bytes[self.group_of(standing)] += size_bytes
        self._tenant_bytes[self.tenant_of(standing)] += size_bytes

    def abandon(self, standing: Standing, size_bytes: int) -> None:
        """An admitted shard did not come, or came with another size and is charged anew."""
        self._group_bytes[self.group_of(standing)] -= size_bytes
        self._tenant_bytes[self.tenant_of(standing)] -= size_bytes

    def enter(self, number: int, standing: Standing, size_bytes: int) -> None:
        """A shard is resident. It is charged here."""
        assert size_bytes % BLOCK_BYTES == 0, size_bytes
        self._group[number] = self.group_of(standing)
        self._tenant[number] = self.tenant_of(standing)
        self._blocks[number] = size_bytes // BLOCK_BYTES
        self.charge(standing, size_bytes)

    def restore(self, sizes_bytes: npt.NDArray[np.int64]) -> None:
        """The shards numbered from 0 on are resident, and nobody's for now."""
        count = len(sizes_bytes)
        self._blocks[:count] = sizes_bytes // BLOCK_BYTES
        self._group[:count] = self.group_of(NOBODY)
        self._tenant[:count] = self.tenant_of(NOBODY)
        self.charge(NOBODY, int(sizes_bytes.sum()))

    def leave(self, number: int) -> None:
        """A resident shard is gone."""
        size_bytes = self.size_bytes(number)
        self._group_bytes[int(self._group[number])] -= size_bytes
        self._tenant_bytes[int(self._tenant[number])] -= size_bytes
        self._blocks[number] = 0

    def adopt(self, number: int, standing: Standing) -> None:
        """A resident shard is of another standing than it was thought to be."""
        size_bytes = self.size_bytes(number)
        self.leave(number)
        self.enter(number, standing, size_bytes)

    def is_of(self, number: int, standing: Standing) -> bool:
        """The resident shard is of this standing, as far as it matters."""
        same_group = self._group[number] == self.group_of(standing)
        return bool(same_group and self._tenant[number] == self.tenant_of(standing))

    @property
    def tells_apart(self) -> bool:
        """Not all shards are alike: there are rules, tenants, or ad-hoc reads."""
        return bool(self._prefixes) or len(self._tenants) > 1 or self._group_bytes[_ADHOC] > 0

    def size_bytes(self, number: int) -> int:
        """Bytes of a resident shard."""
        return int(self._blocks[number]) * BLOCK_BYTES

    def is_adhoc(self, number: int) -> bool:
        """The resident shard lives in the ad-hoc corner."""
        return bool(self._group[number] == _ADHOC)

    def group_bytes(self, standing: Standing) -> int:
        """Bytes charged to the shard's group."""
        return self._group_bytes[self.group_of(standing)]

    @property
    def charged_bytes(self) -> int:
        """All bytes charged."""
        return self._tenant_bytes.total()

    # --- rules --------------------------------------------------------------------------------

    def limits(self, standing: Standing, size_bytes: int) -> Limits:
        """What the newcomer's group allows."""
        group = self.group_of(standing)
        quota_bytes = self._quota_bytes[group]
        tenant_short_bytes = 0
        tenant_bytes = self._shares.get(standing.tenant, _PLAIN_SHARE).quota_bytes
        if tenant_bytes:
            if size_bytes > tenant_bytes:
                what = f"the quota of the tenant {standing.tenant}, {format_bytes(tenant_bytes)}"
                return Limits(group, refusal=f"larger than {what}")
            held_bytes = self._tenant_bytes[self.tenant_of(standing)]
            tenant_short_bytes = max(0, held_bytes + size_bytes - tenant_bytes)
        if group == _NO_GROUP or (group != _ADHOC and quota_bytes == 0):
            return Limits(group, tenant_short_bytes=tenant_short_bytes)
        if size_bytes > quota_bytes:
            what = "the ad-hoc corner" if group == _ADHOC else f"the quota of {standing.url}"
            return Limits(group, refusal=f"larger than {what}, {format_bytes(quota_bytes)}")
        own_short_bytes = max(0, self._group_bytes[group] + size_bytes - quota_bytes)
        return Limits(group, own_short_bytes, tenant_short_bytes, is_recency=group == _ADHOC)

    def stays(self, number: int) -> bool:
        """Nobody else's need moves the resident shard: it is pinned, or in the ad-hoc corner."""
        return bool(self._stays[self._group[number]])

    def is_pinned(self, number: int) -> bool:
        """The resident shard lies under a pinned prefix."""
        return bool(self._pinned[self._group[number]])

    def pins(self, standing: Standing) -> bool:
        """A shard of this standing would be pinned."""
        return bool(self._pinned[self.group_of(standing)])

    @property
    def has_staying(self) -> bool:
        """Some resident shard may be one that `stays`."""
        return any(held for group, held in self._group_bytes.items() if group != _NO_GROUP)

    def staying_between(self, begin: int, end: int) -> Mask:
        """`stays` of the numbers ``[begin, end)``."""
        staying: Mask = self._stays[self._group[begin:end]]
        return staying

    def of_group(self, group: int) -> Mask:
        """Which numbers count for a group; only those of resident shards mean anything."""
        mask: Mask = self._group == group
        return mask

    def of_tenant(self, standing: Standing) -> Mask:
        """Which numbers count for a tenant; only those of resident shards mean anything."""
        mask: Mask = self._tenant == self.tenant_of(standing)
        return mask

    def is_anothers(self, number: int, standing: Standing) -> bool:
        """The resident shard is charged to another tenant, and not to nobody."""
        held_by = self._tenant[number]
        return bool(held_by not in (self.tenant_of(NOBODY), self.tenant_of(standing)))

    @property
    def is_shared(self) -> bool:
        """More than one tenant holds something."""
        return sum(held > 0 for held in self._tenant_bytes.values()) > 1

    def _share_bytes(self, among: set[int]) -> dict[int, float]:
        names = {number: name for name, number in self._tenants.items()}
        weights = {n: self._shares.get(names[n], _PLAIN_SHARE).weight for n in among}
        total = sum(weights.values())
        return {number: self._capacity_bytes * weight / total for number, weight in weights.items()}

    def displaceable(self, standing: Standing, size_bytes: int) -> tuple[Mask, Mask]:
        """Whose shards a newcomer may displace.

        Returns:
            Masks over numbers: those that may be displaced if they are needed later, and of these
            the ones of tenants above their share, which a tenant below its own may always displace.
        """
        own = self.tenant_of(standing)
        holding = {number for number, held in self._tenant_bytes.items() if held > 0} | {own}
        shares = self._share_bytes(holding)
        greedy = [n for n in holding if n != own and self._tenant_bytes[n] > shares[n]]
        if self._tenant_bytes[own] + size_bytes > shares[own]:
            always: list[int] = []
        else:
            always = greedy
        is_greedy: Mask = np.isin(self._tenant, greedy)
        is_always: Mask = np.isin(self._tenant, always)
        return (self._tenant == own) | is_greedy, is_always
