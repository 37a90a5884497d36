"""Whether a daemon could start with these settings, and read anything.

`refusals` are what both `gpufeed daemon` and `gpufeed config check` refuse: settings that are wrong
on this machine, in themselves or together. What ``oss://`` needs is checked where `daemon.allow`
lets somebody read it. `excess` will do, but may surprise. `taken` tries what another process may
hold and leaves nothing behind; only ``config check`` asks: a daemon finds out by starting.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator

from gpufeed.cachefs.errors import ConfigError, GpufeedError, OperatorError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.credentials.chain import CredentialBook
from gpufeed.cachefs.origin.oss_address import Address
from gpufeed.cachefs.origin.tls import client_context
from gpufeed.cachefs.store.directory import CacheDirectory
from gpufeed.cachefs.store.files import DiskFiles
from gpufeed.cachefs.units import MIB, format_bytes
from gpufeed.daemon.admission import read_tokens
from gpufeed.daemon.config import LoadedSettings
from gpufeed.daemon.listen import SOCKET_PATH_BYTES_MAX, is_taken
from gpufeed.daemon.machine import Machine, nearest_existing
from gpufeed.daemon.memory import heap_reserved_bytes
from gpufeed.daemon.tenantconfig import SECTION

# Less is a slip of the unit: no shard is that small.
QUOTA_BYTES_MIN = MIB
OSS = "oss://"


def require_startable(loaded: LoadedSettings) -> None:
    """Raise the first of `refusals`.

    Raises:
        ConfigError: there is one.
    """
    for refusal in refusals(loaded):
        raise refusal


def refusals(loaded: LoadedSettings) -> Iterator[ConfigError]:
    """Settings that will not do, in the order of their sections."""
    settings, provenance = loaded.settings, loaded.provenance
    yield from _origin_refusals(loaded)
    yield from _memory_refusals(loaded)
    for name, socket_path in _sockets(loaded):
        path_bytes = len(os.fsencode(socket_path))
        if path_bytes > SOCKET_PATH_BYTES_MAX:
            yield ConfigError(
                f"{name} is {path_bytes} bytes long ({provenance[name]}); the system allows "
                f"{SOCKET_PATH_BYTES_MAX}"
            )
    yield from _token_refusals(loaded)
    for prefix, quota_bytes in settings.policy.quota_bytes.items():
        if quota_bytes < QUOTA_BYTES_MIN:
            yield ConfigError(
                f"policy.quotas: {prefix} has {format_bytes(quota_bytes)} "
                f"({provenance['policy.quotas']}); it must be at least "
                f"{format_bytes(QUOTA_BYTES_MIN)}"
            )


def _sockets(loaded: LoadedSettings) -> Iterator[tuple[str, str]]:
    """The setting's name and the path of each socket."""
    yield "daemon.socket_path", loaded.settings.daemon.socket_path
    for tenant in loaded.settings.tenants:
        if tenant.socket_path:
            yield f"{SECTION}.{tenant.name}.socket_path", tenant.socket_path


def _token_refusals(loaded: LoadedSettings) -> Iterator[ConfigError]:
    owners: dict[str, str] = {}
    for tenant in loaded.settings.tenants:
        if not tenant.token_file:
            continue
        name = f"{SECTION}.{tenant.name}.token_file"
        try:
            tokens = read_tokens(tenant.token_file)
        except ConfigError as error:
            yield ConfigError(f"{name}: {error} ({loaded.provenance[name]})")
            continue
        for token in tokens:
            owner = owners.setdefault(token, tenant.name)
            if owner != tenant.name:
                yield ConfigError(
                    f"{name} has a token that {owner} has too: each is of one tenant, or nobody "
                    "could come by it"
                )


def _memory_refusals(loaded: LoadedSettings) -> Iterator[ConfigError]:
    settings, provenance = loaded.settings, loaded.provenance
    arena_bytes, memory_bytes = settings.arena.size_bytes, settings.daemon.memory_bytes
    limit = Machine().memory_limit()
    arena = f"arena.size_bytes is {format_bytes(arena_bytes)} ({provenance['arena.size_bytes']})"
    if arena_bytes > limit.value:
        yield ConfigError(f"{arena}, more than {limit.how}")
        return
    heap_bytes = heap_reserved_bytes(memory_bytes)
    if memory_bytes and arena_bytes + heap_bytes > memory_bytes:
        yield ConfigError(
            f"{arena}; with {format_bytes(heap_bytes)} for the daemon itself that is more "
            f"than daemon.memory_bytes, {format_bytes(memory_bytes)} "
            f"({provenance['daemon.memory_bytes']})"
        )


def _origin_refusals(loaded: LoadedSettings) -> Iterator[ConfigError]:
    origin, provenance = loaded.settings.origin, loaded.provenance
    scheme = origin.endpoint.partition("://")[0] if "://" in origin.endpoint else "https"
    if scheme not in ("http", "https"):
        yield ConfigError(
            f"origin.endpoint is {origin.endpoint!r} ({provenance['origin.endpoint']}); write "
            "host, host:port, http://host or https://host"
        )
        return
    try:
        if origin.ca_file:
            client_context(origin.ca_file)
        if any(prefix.startswith(OSS) for prefix in loaded.settings.daemon.allow):
            _check_oss(loaded)
    except ConfigError as error:
        yield error


def _check_oss(loaded: LoadedSettings) -> None:
    origin = loaded.settings.origin
    address = Address.of(origin) if origin.endpoint else None
    region = address.region if address else origin.region
    signed = CredentialBook(os.environ, Metrics()).check(
        origin, region, internal=address is not None and address.internal
    )
    if address and signed and not region:
        raise ConfigError(
            f"origin.region is not set, and the endpoint {origin.endpoint} "
            f"({loaded.provenance['origin.endpoint']}) does not tell it: set origin.region, for "
            "example cn-hangzhou (signatures need it)"
        )


def excess(loaded: LoadedSettings) -> Iterator[str]:
    """A capacity that its filesystem cannot hold."""
    store = loaded.settings.store
    if store.path and store.capacity_bytes:
        found = os.statvfs(nearest_existing(store.path))
        total_bytes = found.f_blocks * found.f_frsize
        # Some filesystems tell no size.
        if 0 < total_bytes < store.capacity_bytes:
            yield (
                f"store.capacity_bytes is {format_bytes(store.capacity_bytes)} "
                f"({loaded.provenance['store.capacity_bytes']}), its filesystem has "
                f"{format_bytes(total_bytes)}"
            )


def taken(loaded: LoadedSettings) -> Iterator[GpufeedError]:
    """What cannot be had on this machine, now."""
    settings, provenance = loaded.settings, loaded.provenance
    path = settings.store.path
    if path:
        why = _why_not_writable(path)
        if why:
            yield ConfigError(
                f"store.path {path} cannot be written: {why} ({provenance['store.path']}); choose "
                "another, or --memory-only"
            )
        elif os.path.isdir(path):
            try:
                CacheDirectory(path, DiskFiles()).check()
            except OperatorError as error:
                yield error
    for name, socket_path in _sockets(loaded):
        folder = os.path.dirname(socket_path) or "."
        why = _why_not_writable(folder)
        if why:
            yield ConfigError(
                f"{name} {socket_path} ({provenance[name]}): {folder} cannot be written: {why}"
            )
        elif is_taken(socket_path):
            yield OperatorError(
                f"another gpufeed daemon listens at {socket_path}; stop it, or choose another path "
                "with --socket"
            )
    if settings.daemon.http_port > 0:
        yield from _port_taken(settings.daemon.http_host, settings.daemon.http_port)


def _why_not_writable(path: str) -> str:
    """Tried, as permissions do not tell all; empty if `path` is a directory, or can be one."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".gpufeed-check-", dir=nearest_existing(path)))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _port_taken(host: str, port: int) -> Iterator[OperatorError]:
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
                sock.listen(1)
    except OSError as error:
        yield OperatorError(
            f"cannot listen on http://{host}:{port} ({error.strerror or error}): another daemon "
            "may run; choose another port with --http-port, or -1 to switch it off"
        )
