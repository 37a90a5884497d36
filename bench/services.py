"""The services of a run: the OSS stand-in that plays the origin, and gpufeed's daemon.

Both are started as a user would start them, by their commands, under a keeper, and say that they
serve by a JSON line on a descriptor. Ending is the keeper's business.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpufeed.bench import demodata
from gpufeed.bench.children import Child, Family, read_ready_line
from gpufeed.bench.demodata import BUCKET
from gpufeed.bench.stepchoice import OriginShape
from gpufeed.cachefs import wire
from gpufeed.cachefs.units import MB

# The stand-in reads all objects once before it serves.
READY_TIMEOUT_S = 180.0
_GPUFEED = "import sys; from gpufeed.daemon.cli import main; sys.exit(main())"
_STANDIN = (
    "import sys; from gpufeed.cachefs.testing.standin.command import command; "
    "sys.exit(command(sys.argv[1:]))"
)


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running gpufeed daemon."""

    child: Child
    socket: str
    pid: int


def start_daemon(
    family: Family,
    *,
    socket: Path,
    cache_dir: Path,
    sizes: tuple[int, int],
    origin: Mapping[str, str],
) -> Daemon:
    """Start ``gpufeed daemon`` with a cache of its own; `sizes` are capacity and arena in bytes.

    Raises:
        GpufeedError: it does not come up; its own reason, or the end of its log.
    """
    flags = [
        "--endpoint", origin["endpoint"],
        "--region", origin["region"],
        "--http-port", "0",
    ]  # fmt: skip
    environment = {
        "GPUFEED_ORIGIN_KEY": origin["key"],
        "GPUFEED_ORIGIN_SECRET": origin["secret"],
    }
    return _start_daemon(family, socket, cache_dir, sizes, flags, environment)


def start_local_daemon(
    family: Family,
    *,
    socket: Path,
    cache_dir: Path,
    sizes: tuple[int, int],
    extent_bytes: int,
    allow: str,
) -> Daemon:
    """Start ``gpufeed daemon`` over local files below the address `allow`; see `start_daemon`."""
    flags = ["--extent-size", str(extent_bytes), "--allow", allow, "--http-port", "-1"]
    environment = {"GPUFEED_STORE_FREE_FLOOR_RATIO": "0"}
    return _start_daemon(family, socket, cache_dir, sizes, flags, environment)


def _start_daemon(
    family: Family,
    socket: Path,
    cache_dir: Path,
    sizes: tuple[int, int],
    flags: Sequence[str],
    environment: Mapping[str, str],
) -> Daemon:
    capacity_bytes, arena_bytes = sizes
    arguments = [
        "daemon",
        "--socket", str(socket),
        "--cache-path", str(cache_dir),
        "--capacity", str(capacity_bytes),
        "--arena", str(arena_bytes),
        *flags,
    ]  # fmt: skip
    child, ready = _start(
        family, "daemon", [sys.executable, "-c", _GPUFEED, *arguments], environment
    )
    return Daemon(child, str(ready.get("socket", socket)), int(ready["pid"]))


def _start(
    family: Family, name: str, command: Sequence[str], environment: Mapping[str, str]
) -> tuple[Child, Mapping[str, Any]]:
    """Start a service with ``--ready-fd`` and wait for its line."""
    read_fd, write_fd = os.pipe()
    try:
        try:
            child = family.start(
                name,
                [*command, "--ready-fd", str(write_fd)],
                pass_fds=(write_fd,),
                environment=environment,
                service=True,
            )
        finally:
            os.close(write_fd)
        ready = read_ready_line(child, read_fd, timeout_s=READY_TIMEOUT_S)
    finally:
        os.close(read_fd)
    if "error" in ready:
        raise wire.unpack_error(dict(ready))
    return child, ready


def start_standin(family: Family, objects_dir: Path, shape: OriginShape) -> dict[str, str]:
    """Start ``gpufeed standin`` over `objects_dir`; returns how to reach it.

    Raises:
        WorkerError: it does not come up; the message has the end of its log.
    """
    arguments = [
        "--root", str(objects_dir),
        "--port", "0",
        "--public", demodata.BUCKET,
        "--first-byte-ms", f"{shape.first_byte_s * 1e3:g}",
        "--mb-per-s", f"{shape.bytes_per_s / MB:g}",
        # Etags are computed now, not in the middle of the first epoch that asks.
        "--prepare",
        # The plain-HTTP contender does not sign.
        "--public", BUCKET,
    ]  # fmt: skip
    _, ready = _start(family, "standin", [sys.executable, "-c", _STANDIN, *arguments], {})
    return {name: str(ready[name]) for name in ("endpoint", "key", "secret", "region")}
