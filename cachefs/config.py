"""The configuration slices of the library: frozen, validated where they are made.

Each component receives its own slice and nothing else. Files, environment and flags are read in
`gpufeed.daemon.config`, which builds these; nothing here reads the environment or touches the disk.
Credentials and endpoint are named as ossfs's ``storage_options`` name them: ``endpoint``, ``key``,
``secret``, ``token``; ``region`` is ours, because V4 signatures need it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.units import BLOCK_BYTES, GIB, KIB, MIB, format_bytes


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginConfig:
    """How object storage is reached. Sizes in bytes, times in seconds."""

    endpoint: str = ""
    region: str = ""
    key: str = field(default="", repr=False)
    secret: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    part_bytes: int = 8 * MIB
    connections_max: int = 64
    requests_per_s_max: float = 2000.0
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
        for name in ("connect_timeout_s", "stall_timeout_s", "deadline_s"):
            _require(getattr(self, name) > 0, f"origin.{name} must be above 0")
        _require(
            bool(self.key) == bool(self.secret),
            "origin.key and origin.secret belong together: give both or neither",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """The NVMe store. An empty `path` means memory only: nothing is kept on disk."""

    path: str = ""
    capacity_bytes: int = 0
    free_floor_ratio: float = 0.05
    io_threads: int = 4

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: out of range.
        """
        _require(self.capacity_bytes >= 0, "store.capacity_bytes must not be negative")
        _require(0 <= self.free_floor_ratio < 1, "store.free_floor_ratio must be in [0, 1)")
        _require(1 <= self.io_threads <= 64, "store.io_threads must be 1 to 64")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaConfig:
    """The shared memory. `extent_bytes` is the size of a slot."""

    size_bytes: int = GIB
    extent_bytes: int = 4 * MIB
    lock_memory: bool = True

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

    @property
    def slot_count(self) -> int:
        """How many whole slots fit."""
        return self.size_bytes // self.extent_bytes
