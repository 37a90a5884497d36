"""The configuration slices of the library: frozen, validated where they are made.

Each component receives its own slice and nothing else. Files, environment and flags are read in
`gpufeed.daemon.config`, which builds these; nothing here reads the environment or touches the disk.
Credentials and endpoint are named as ossfs's ``storage_options`` name them: ``endpoint``, ``key``,
``secret``, ``token``; ``region`` is ours, because V4 signatures need it.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.units import BLOCK_BYTES, GIB, KIB, MIB, format_bytes, parse_bytes

# IFNAMSIZ of Linux, less the closing zero.
INTERFACE_NAME_BYTES_MAX = 15
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")

CREDENTIAL_KINDS = ("auto", "static", "env", "rrsa", "ecs", "uri", "anonymous")

# How much of the arena bytes under way from origins may take; the rest is the sessions'.
IN_FLIGHT_RATIO = 0.25
HUGE_PAGE_BYTES = 2 * MIB
# Text compresses to a tenth; what expands more than this was made to fill disks.
EXPANSION_RATIO_MAX = 256.0


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginConfig:
    """How object storage is reached. Sizes in bytes, times in seconds.

    Attributes:
        credentials: one of `CREDENTIAL_KINDS`; see `gpufeed.cachefs.origin.credentials.chain`.
        role_arn: a role to assume with the credentials found; empty = none.
        ca_file: PEM authorities that certificates are checked by, in place of the system's.
    """

    endpoint: str = ""
    region: str = ""
    credentials: str = "auto"
    key: str = field(default="", repr=False)
    secret: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    role_arn: str = ""
    ca_file: str = ""
    part_bytes: int = 8 * MIB
    connections_max: int = 64
    requests_per_s_max: float = 2000.0
    bytes_per_s_max: int = 0
    prefetch_bytes_per_s_max: int = 0
    hedge_ratio_max: float = 0.05
    hedge_spare_bytes: int = 64 * MIB
    threads: int = 0
    bind_interface: str = ""
    bind_address: str = ""
    retries_max: int = 6
    connect_timeout_s: float = 5.0
    stall_timeout_s: float = 10.0
    deadline_s: float = 120.0

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: out of range.
        """
        _require(
            64 * KIB <= self.part_bytes <= GIB,
            f"origin.part_bytes is {self.part_bytes}; it must be from 64 KiB to 1 GiB",
        )
        _require(1 <= self.connections_max <= 4096, "origin.connections_max must be 1 to 4096")
        _require(self.requests_per_s_max > 0, "origin.requests_per_s_max must be above 0")
        _require(0 <= self.retries_max <= 100, "origin.retries_max must be 0 to 100")
        _require(0 <= self.threads <= 64, "origin.threads must be 0 (automatic) to 64")
        _require(0 <= self.hedge_ratio_max <= 1, "origin.hedge_ratio_max must be 0 (never) to 1")
        for name in ("bytes_per_s_max", "prefetch_bytes_per_s_max", "hedge_spare_bytes"):
            _require(getattr(self, name) >= 0, f"origin.{name} must not be negative (0 = none)")
        self._check_binding()
        for name in ("connect_timeout_s", "stall_timeout_s", "deadline_s"):
            _require(getattr(self, name) > 0, f"origin.{name} must be above 0")
        _require(
            bool(self.key) == bool(self.secret),
            "origin.key and origin.secret belong together: give both or neither",
        )
        _require(
            self.credentials in CREDENTIAL_KINDS,
            f"origin.credentials is {self.credentials!r}; it must be one of "
            f"{', '.join(CREDENTIAL_KINDS)}",
        )
        _require(
            not self.key or self.credentials in ("auto", "static"),
            f"origin.credentials is {self.credentials}, but origin.key is set too: remove one",
        )
        _require(
            bool(self.key) or self.credentials != "static",
            "origin.credentials is static: set origin.key and origin.secret",
        )

    def _check_binding(self) -> None:
        _require(
            not (self.bind_interface and self.bind_address),
            "origin.bind_interface and origin.bind_address are two ways to choose one network: "
            "give one of them",
        )
        _require(
            len(self.bind_interface.encode()) <= INTERFACE_NAME_BYTES_MAX,
            f"origin.bind_interface is {self.bind_interface!r}; an interface's name has at most "
            f"{INTERFACE_NAME_BYTES_MAX} bytes",
        )
        if self.bind_address:
            try:
                ipaddress.ip_address(self.bind_address)
            except ValueError:
                raise ConfigError(
                    f"origin.bind_address is {self.bind_address!r}; it must be an IP address of "
                    "this machine"
                ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """The NVMe store.

    Attributes:
        path: the cache directory; empty = memory only, nothing is kept on disk.
        capacity_bytes: hard limit.
        free_floor_ratio: of the file system's bytes, and of its inodes, that stay free.
        io_threads: disk calls under way at once.
        write_bytes_per_s_max: for disks that share their bandwidth; what would have to wait long
            is not cached. 0 = no cap.
        writes_in_flight_max: writes of extents under way at once; 0 = as many as threads.
        decompress: ``.tar.gz`` and ``.tar.zst`` are kept and served as plain tars.
        expansion_ratio_max: a compressed object that expands further is refused.
        probe_after_s: how long a disk that failed is left alone before it is tried again.
    """

    path: str = ""
    capacity_bytes: int = 0
    free_floor_ratio: float = 0.05
    io_threads: int = 4
    write_bytes_per_s_max: int = 0
    writes_in_flight_max: int = 0
    decompress: bool = True
    expansion_ratio_max: float = EXPANSION_RATIO_MAX
    probe_after_s: float = 30.0

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: out of range.
        """
        _require(self.capacity_bytes >= 0, "store.capacity_bytes must not be negative")
        _require(0 <= self.free_floor_ratio < 1, "store.free_floor_ratio must be in [0, 1)")
        _require(1 <= self.io_threads <= 64, "store.io_threads must be 1 to 64")
        _require(
            self.write_bytes_per_s_max >= 0,
            "store.write_bytes_per_s_max must not be negative; 0 is no cap",
        )
        _require(
            0 <= self.writes_in_flight_max <= 64,
            "store.writes_in_flight_max must be 0 to 64; 0 is as many as threads",
        )
        _require(0 < self.probe_after_s <= 86400, "store.probe_after_s must be above 0, to 86400")
        _require(self.expansion_ratio_max >= 1, "store.expansion_ratio_max must be at least 1")


@dataclass(frozen=True, slots=True)
class PrefixRule:
    """A dataset's limit. `quota_bytes` 0: none. Pinned: never a victim of others."""

    prefix: str
    quota_bytes: int = 0
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """What may be kept, beyond what plans say.

    Attributes:
        adhoc_ratio: share of the capacity for files read outside of any dataset.
        ttl_s: a shard not used for so long is removed; 0 keeps it. Counted anew at each start.
        quotas: ``PREFIX=SIZE``: a dataset's hard limit, for example ``oss://bucket/train/=2TB``.
        pins: prefixes whose shards are never evicted for others.
    """

    adhoc_ratio: float = 0.05
    ttl_s: float = 0.0
    quotas: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check ranges and forms.

        Raises:
            ConfigError: out of range or malformed.
        """
        _require(0 <= self.adhoc_ratio <= 1, "policy.adhoc_ratio must be in [0, 1]")
        _require(self.ttl_s >= 0, "policy.ttl_s must not be negative")
        for name, prefixes in (("quotas", self.quota_bytes), ("pins", self.pins)):
            for prefix in prefixes:
                scheme = SCHEME.match(prefix)
                _require(
                    scheme is not None and scheme.end() < len(prefix),
                    f"policy.{name} has {prefix!r}; write prefixes with their scheme and what they "
                    "stand for, for example oss://bucket/train/",
                )

    @property
    def rules(self) -> tuple[PrefixRule, ...]:
        """Quotas and pins, one rule a prefix."""
        quotas = self.quota_bytes
        return tuple(
            PrefixRule(prefix, quotas.get(prefix, 0), prefix in self.pins)
            for prefix in dict.fromkeys((*quotas, *self.pins))
        )

    @property
    def quota_bytes(self) -> dict[str, int]:
        """`quotas`, read."""
        try:
            return {prefix: parse_bytes(size) for prefix, size in _pairs("quotas", self.quotas)}
        except ConfigError as error:
            told = str(error).removeprefix("policy.quotas: ")
            raise ConfigError(f"policy.quotas: {told}") from None


def _pairs(name: str, values: tuple[str, ...]) -> list[tuple[str, str]]:
    """NAME=VALUE taken apart; no name comes twice."""
    pairs: dict[str, str] = {}
    for value in values:
        _require("=" in value, f"policy.{name}: {value!r} is not of the form NAME=VALUE")
        key, _, text = value.rpartition("=")
        key, text = key.strip(), text.strip()
        _require(key not in pairs, f"policy.{name}: {key!r} is given twice; keep one of them")
        pairs[key] = text
    return list(pairs.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaConfig:
    """The shared memory.

    Attributes:
        size_bytes: all of it.
        extent_bytes: the size of a slot.
        lock_memory: keep it out of swap.
        huge_pages: from the machine's reserved pool of 2 MiB pages.
        in_flight_bytes_max: how much of it bytes on their way from origins may take together;
            0 = all that sessions leave, a quarter (`IN_FLIGHT_RATIO`).
    """

    size_bytes: int = GIB
    extent_bytes: int = 4 * MIB
    lock_memory: bool = True
    huge_pages: bool = False
    in_flight_bytes_max: int = 0

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: out of range.
        """
        _require(
            self.extent_bytes % BLOCK_BYTES == 0 and 64 * KIB <= self.extent_bytes <= GIB,
            f"arena.extent_bytes is {self.extent_bytes}; it must be a multiple of {BLOCK_BYTES} "
            "from 64 KiB to 1 GiB",
        )
        _require(
            self.size_bytes >= 8 * self.extent_bytes,
            f"arena.size_bytes is {format_bytes(self.size_bytes)}; it must hold at least 8 extents "
            f"of {format_bytes(self.extent_bytes)}",
        )
        _require(
            not self.huge_pages or self.extent_bytes % HUGE_PAGE_BYTES == 0,
            f"arena.extent_bytes is {format_bytes(self.extent_bytes)}; with arena.huge_pages it "
            f"must be a multiple of {format_bytes(HUGE_PAGE_BYTES)}",
        )
        share_bytes = int(self.size_bytes * IN_FLIGHT_RATIO)
        _require(
            self.in_flight_bytes_max == 0
            or self.extent_bytes <= self.in_flight_bytes_max <= share_bytes,
            f"arena.in_flight_bytes_max is {format_bytes(self.in_flight_bytes_max)}; it must be 0, "
            f"or from one extent ({format_bytes(self.extent_bytes)}) to "
            f"{format_bytes(share_bytes)}, what sessions leave of arena.size",
        )

    @property
    def in_flight_bytes(self) -> int:
        """The limit that `in_flight_bytes_max` stands for."""
        return self.in_flight_bytes_max or int(self.size_bytes * IN_FLIGHT_RATIO)

    @property
    def slot_count(self) -> int:
        """How many whole slots fit."""
        return self.size_bytes // self.extent_bytes
