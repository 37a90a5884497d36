"""The tenants of a shared daemon as they are configured: one table ``[tenants.NAME]`` each. Pure.

A tenant is known by a token, or by a socket of its own that only it can reach. It has an arena, a
list of what it may read, credentials and a share of the store of its own. Without tables there is
one tenant, whom everybody is of who reaches the daemon's socket; `ALONE` stands for it.

Where there are several, only object stores are served: who may read an object is asked of the store
that has it, with the tenant's own credentials, and a file system knows of the daemon's alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpufeed.cachefs.config import CREDENTIAL_KINDS, IN_FLIGHT_RATIO, ArenaConfig
from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.shares import TenantShare
from gpufeed.daemon.settingvalues import Key, keys_of

SECTION = "tenants"
TENANTS_MAX = 256
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
OBJECT_STORES = ("oss://", "s3://")
# Files of other user namespaces, and whoever is of one, are shown as this one's.
OVERFLOW_UID = 65534
_ACCOUNT = ("endpoint", "region", "credentials", "key", "secret", "token", "role_arn")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def uids_of(name: str, texts: Sequence[str]) -> frozenset[int]:
    """A setting's user ids, read.

    Raises:
        ConfigError: one is no user id, or stands for whoever is of another user namespace.
    """
    for text in texts:
        _require(
            text.isdecimal() and int(text) < 1 << 32, f"{name} has {text!r}; write numbers of users"
        )
        _require(
            int(text) != OVERFLOW_UID,
            f"{name} has {OVERFLOW_UID}, which everybody of another user namespace is shown as: "
            "use a token or a socket of its own there",
        )
    return frozenset(map(int, texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """One tenant.

    Attributes:
        name: of its table.
        socket_path: a socket of its own; empty: none.
        token_file: a file with its tokens, one a line; empty: none.
        uids: users that may be it, where users mean something; empty: not asked.
        allow: prefixes that it may read; empty: those of ``daemon.allow``.
        endpoint: where not ``origin.endpoint``; so ``region``.
        credentials: its own, with ``key``, ``secret``, ``token``, ``role_arn`` as in ``origin``;
            empty: those of ``origin``.
        arena_ratio: its share of the arena; 0: an equal share of what the others leave.
        weight: of its fair share of the store.
        quota_bytes: the most that it may have there; 0: no limit of its own.
        sessions_max: open at a time; 0: no limit of its own.
    """

    name: str = ""
    socket_path: str = ""
    token_file: str = ""
    uids: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    endpoint: str = ""
    region: str = ""
    credentials: str = ""
    key: str = field(default="", repr=False)
    secret: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    role_arn: str = ""
    arena_ratio: float = 0.0
    weight: float = 1.0
    quota_bytes: int = 0
    sessions_max: int = 0

    def __post_init__(self) -> None:
        """Check what one table says.

        Raises:
            ConfigError: out of range, or nobody could be this tenant.
        """
        if not self.name:
            return
        own = f"{SECTION}.{self.name}"
        _require(
            bool(self.socket_path or self.token_file),
            f"{own} has neither socket_path nor token_file: nobody could be this tenant",
        )
        uids_of(f"{own}.uids", self.uids)
        for prefix in self.allow:
            _require(
                prefix.startswith(OBJECT_STORES),
                f"{own}.allow has {prefix!r}; tenants read object stores only, so write prefixes "
                f"that begin with {' or '.join(OBJECT_STORES)}",
            )
        kinds = ("", *CREDENTIAL_KINDS)
        _require(
            self.credentials in kinds,
            f"{own}.credentials is {self.credentials!r}; it must be one of "
            f"{', '.join(CREDENTIAL_KINDS)}",
        )
        _require(
            bool(self.key) == bool(self.secret),
            f"{own}.key and {own}.secret belong together: give both or neither",
        )
        _require(
            not self.key or self.credentials in ("", "auto", "static"),
            f"{own}.credentials is {self.credentials}, but {own}.key is set too: remove one",
        )
        _require(bool(self.key) or not self.token, f"{own}.token is of no use without {own}.key")
        _require(
            bool(self.key) or self.credentials != "static",
            f"{own}.credentials is static: set {own}.key and {own}.secret",
        )
        _require(
            0 <= self.arena_ratio <= 1, f"{own}.arena_ratio is {self.arena_ratio}; it is 0 to 1"
        )
        _require(
            0 < self.weight < float("inf"),
            f"{own}.weight is {self.weight}; it must be above 0 and finite",
        )
        _require(self.quota_bytes >= 0, f"{own}.quota_bytes must not be negative; 0 is no limit")
        _require(
            0 <= self.sessions_max <= 65536,
            f"{own}.sessions_max is {self.sessions_max}; it must be 1 to 65536, or 0 for no limit",
        )

    @property
    def origin_options(self) -> dict[str, str]:
        """What of its origin is its own, for `OriginEngine`."""
        return {name: getattr(self, name) for name in _ACCOUNT if getattr(self, name)}

    @property
    def share(self) -> TenantShare:
        """Its share of the store."""
        return TenantShare(weight=self.weight, quota_bytes=self.quota_bytes)


ALONE = TenantConfig()


def tenant_names(content: Mapping[str, Any], source: str) -> tuple[str, ...]:
    """The tables of tenants in a configuration file.

    Raises:
        ConfigError: something else stands there, a name will not do, or there are too many.
    """
    tables = content.get(SECTION, {})
    _require(
        isinstance(tables, dict) and all(isinstance(table, dict) for table in tables.values()),
        f"[{SECTION}] has settings of its own ({source}); each tenant has a table, for example "
        f"[{SECTION}.vision]",
    )
    for name in tables:
        _require(
            NAME.fullmatch(name) is not None,
            f"[{SECTION}.{name}] ({source}): a tenant's name has 1 to 63 of a-z, 0-9, - and _",
        )
    _require(
        len(tables) <= TENANTS_MAX,
        f"there are {len(tables)} tenants ({source}); a daemon has at most {TENANTS_MAX}",
    )
    return tuple(tables)


def tenant_keys(names: Sequence[str]) -> dict[str, Key]:
    """The settings of these tenants by ``tenants.NAME.setting``."""
    keys = keys_of({f"{SECTION}.{name}": TenantConfig for name in names})
    return {full_name: key for full_name, key in keys.items() if key.name != "name"}


def check_together(
    tenants: Sequence[TenantConfig], *, arena: ArenaConfig, socket_path: str, allow: Sequence[str]
) -> None:
    """Check what tables say beside one another.

    Args:
        tenants: all of them.
        arena: of the daemon, which they divide.
        socket_path: of the daemon.
        allow: of the daemon, for those without a list of their own.

    Raises:
        ConfigError: two have one socket, the arena does not suffice, or files would be shared.
    """
    taken = {socket_path: "daemon"}
    for tenant in tenants:
        own = f"{SECTION}.{tenant.name}"
        if tenant.socket_path:
            other = taken.setdefault(tenant.socket_path, own)
            _require(
                other == own,
                f"{own}.socket_path is {tenant.socket_path}, which is {other}.socket_path too: "
                "give each a path of its own",
            )
        wrong = [prefix for prefix in allow if not prefix.startswith(OBJECT_STORES)]
        _require(
            bool(tenant.allow) or not wrong,
            f"{own} has no allow, and daemon.allow has {', '.join(wrong)}; tenants read object "
            f"stores only ({', '.join(OBJECT_STORES)}): give {own}.allow",
        )
    for tenant, ratio in zip(tenants, arena_ratios(tenants), strict=True):
        try:
            arena_of(arena, ratio)
        except ConfigError as error:
            raise ConfigError(
                f"{SECTION}.{tenant.name} has {ratio:.3g} of the arena, which is too little: "
                f"{error}"
            ) from None


def arena_ratios(tenants: Sequence[TenantConfig]) -> list[float]:
    """Each tenant's share of the arena.

    Raises:
        ConfigError: they come to more than all of it, or leave nothing for some.
    """
    given = sum(tenant.arena_ratio for tenant in tenants)
    # Three thirds, written in decimals, are as good as one.
    _require(given <= 1.001, f"the tenants' arena_ratio come to {given:.4g}; they share 1")
    rest = [tenant for tenant in tenants if not tenant.arena_ratio]
    _require(
        not rest or given < 1,
        f"the other tenants' arena_ratio leave nothing for {', '.join(t.name for t in rest)}",
    )
    equal = (1 - given) / len(rest) if rest else 0.0
    return [(tenant.arena_ratio or equal) / max(1.0, given) for tenant in tenants]


def arena_of(arena: ArenaConfig, ratio: float) -> ArenaConfig:
    """A part of an arena, in whole extents.

    Raises:
        ConfigError: too small for an arena.
    """
    if ratio == 1:
        return arena
    size_bytes = int(arena.size_bytes * ratio) // arena.extent_bytes * arena.extent_bytes
    in_flight_bytes = 0
    if arena.in_flight_bytes_max:
        in_flight_bytes = max(arena.extent_bytes, int(arena.in_flight_bytes_max * ratio))
        in_flight_bytes = min(in_flight_bytes, int(size_bytes * IN_FLIGHT_RATIO))
    return replace(arena, size_bytes=size_bytes, in_flight_bytes_max=in_flight_bytes)
