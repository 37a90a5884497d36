"""Settings of the daemon: one TOML file, the environment, flags; the last of them wins.

Owns `load_settings`, which turns all of it into frozen, validated slices and says of each value
where it is from. Nothing else in gpufeed reads configuration. From weakest to strongest:

1. defaults, some derived from the machine (`gpufeed.daemon.machine`);
2. ``OSS_ACCESS_KEY_ID``, ``OSS_ACCESS_KEY_SECRET``, ``OSS_SESSION_TOKEN``, ``OSS_ENDPOINT`` and
   ``OSS_REGION``, as other tools for OSS read them;
3. the file: ``--config``, else ``GPUFEED_CONFIG``, else `DEFAULT_FILE` if there is one;
4. ``GPUFEED_<SECTION>_<NAME>``;
5. flags.

Tenants are tables of the file, ``[tenants.NAME]``, and nothing else sets them
(`gpufeed.daemon.tenantconfig`).

A name that does not exist is an error, with the one that was probably meant. Key, secret and token
are one credential: a stronger source of any of them silences the ``OSS_*`` variables for all three,
and so does an ``origin.credentials`` that takes them from elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpufeed.cachefs.config import SCHEME, ArenaConfig, OriginConfig, PolicyConfig, StoreConfig
from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.origin.oss_address import foreign_origin
from gpufeed.daemon.machine import Derived, Machine
from gpufeed.daemon.settingvalues import Key, keys_of, nearest, read_value
from gpufeed.daemon.tenantconfig import (
    SECTION,
    TenantConfig,
    check_together,
    tenant_keys,
    tenant_names,
    uids_of,
)

DEFAULT_FILE = "/etc/gpufeed/gpufeed.toml"
CONFIG_VARIABLE = "GPUFEED_CONFIG"
SOCKET_MODES = ("0600", "0660", "0666")
LOG_LEVELS = ("debug", "info", "warning", "error")
_FLAG_DEST = "setting:"
_OSS_VARIABLES = {
    "origin.key": "OSS_ACCESS_KEY_ID",
    "origin.secret": "OSS_ACCESS_KEY_SECRET",
    "origin.token": "OSS_SESSION_TOKEN",
    "origin.endpoint": "OSS_ENDPOINT",
    "origin.region": "OSS_REGION",
}
_CREDENTIAL = ("origin.key", "origin.secret", "origin.token")
# Kubernetes gives every pod such variables for each Service of its namespace; with a Service called
# gpufeed or gpufeed-daemon they look like ours.
_SERVICE_LINK = re.compile(r"GPUFEED_(?:\w+_)?(?:SERVICE_(?:HOST|PORT\w*)|PORT(?:_\d+_\w+)?)")
# How alike a variable of no known section must be to one of ours to be taken for a slip.
_SLIP_RATIO = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """The process itself.

    Attributes:
        socket_path: where sessions are accepted.
        socket_mode: who may connect to it, and to tenants' own sockets, as far as permissions say.
        uids: users that may connect, where users mean something; empty: not asked.
        http_host: address of the metrics and health endpoint.
        http_port: 0 = any free one, -1 = none.
        allow: prefixes of the addresses that clients may read; an embedded daemon allows all.
        endpoints: further endpoints that clients may name; an embedded daemon asks any.
        linger_s: how long an embedded daemon stays after its last session.
        sessions_max: sessions open at a time.
        memory_bytes: for arenas, earlier daemons' arenas that are still mapped, and the heap; 0:
            no limit but the arena's size.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
    """

    socket_path: str = ""
    socket_mode: str = "0600"
    uids: tuple[str, ...] = ()
    http_host: str = "127.0.0.1"
    http_port: int = 9478
    allow: tuple[str, ...] = ("oss://", "s3://")
    endpoints: tuple[str, ...] = ()
    linger_s: float = 10.0
    sessions_max: int = 1024
    memory_bytes: int = 0
    log_level: str = "info"

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: out of range.
        """
        _require(
            -1 <= self.http_port <= 65535,
            f"daemon.http_port is {self.http_port}; it must be 0 to 65535, or -1 for none",
        )
        _require(
            self.socket_mode in SOCKET_MODES,
            f"daemon.socket_mode is {self.socket_mode!r}; it must be one of "
            f"{', '.join(SOCKET_MODES)}",
        )
        uids_of("daemon.uids", self.uids)
        for endpoint in self.endpoints:
            foreign_origin(endpoint, "")
        for prefix in self.allow:
            _require(
                SCHEME.match(prefix) is not None,
                f"daemon.allow has {prefix!r}; write prefixes with their scheme, for example "
                "oss://bucket/",
            )
        _require(
            0 <= self.linger_s <= 86400,
            f"daemon.linger_s is {self.linger_s}; it must be 0 to 86400",
        )
        _require(
            1 <= self.sessions_max <= 65536,
            f"daemon.sessions_max is {self.sessions_max}; it must be 1 to 65536",
        )
        _require(self.memory_bytes >= 0, "daemon.memory_bytes must not be negative")
        _require(
            self.log_level in LOG_LEVELS,
            f"daemon.log_level is {self.log_level!r}; it must be one of {', '.join(LOG_LEVELS)}",
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything, one slice a component."""

    origin: OriginConfig
    store: StoreConfig
    arena: ArenaConfig
    daemon: DaemonConfig
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    tenants: tuple[TenantConfig, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The settings, where each value is from (``section.name`` to words), and the file read.

    Attributes:
        keys: all of them, those of the tenants after the others.
    """

    settings: Settings
    provenance: Mapping[str, str]
    config_path: str | None
    keys: Mapping[str, Key]

    def value(self, full_name: str) -> Any:
        """The value of ``section.name``."""
        section, _, name = full_name.rpartition(".")
        head, _, tenant = section.partition(".")
        if head == SECTION:
            (found,) = (one for one in self.settings.tenants if one.name == tenant)
            return getattr(found, name)
        return getattr(getattr(self.settings, section), name)


_SLICES: dict[str, type] = {
    "origin": OriginConfig, "store": StoreConfig, "arena": ArenaConfig, "daemon": DaemonConfig,
    "policy": PolicyConfig,
}  # fmt: skip
KEYS: Mapping[str, Key] = keys_of(_SLICES)

# No flag for credentials: a command line is readable by every process of the machine.
_FLAGS = {
    "daemon.socket_path": ("--socket", "PATH", "Unix socket that sessions connect to"),
    "store.path": ("--cache-path", "DIR", "directory of the NVMe cache"),
    "store.capacity_bytes": ("--capacity", "SIZE", "hard limit of the cache, for example 2TB"),
    "arena.size_bytes": ("--arena", "SIZE", "shared memory, for example 8GiB"),
    "arena.extent_bytes": ("--extent-size", "SIZE", "one slot of the arena"),
    "origin.endpoint": ("--endpoint", "URL", "endpoint of the object storage"),
    "origin.region": ("--region", "NAME", "its region, which signatures need"),
    "daemon.http_host": ("--http-host", "HOST", "address for /metrics and /healthz"),
    "daemon.http_port": ("--http-port", "PORT", "its port; 0 = any free one, -1 = none"),
    "daemon.allow": ("--allow", "PREFIX", "addresses that clients may read (repeatable)"),
    "daemon.log_level": ("--log-level", "LEVEL", "debug, info, warning or error"),
}


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the flags that `load_settings` understands."""
    group = parser.add_argument_group(
        "configuration", "stronger than GPUFEED_* variables, which are stronger than the file"
    )
    group.add_argument("--config", metavar="FILE", help=f"TOML file (default {DEFAULT_FILE})")
    memory = group.add_mutually_exclusive_group()
    memory.add_argument("--memory-only", action="store_true", help="keep nothing on disk")
    for full_name, (flag, metavar, text) in _FLAGS.items():
        where = memory if full_name == "store.path" else group
        action = "append" if KEYS[full_name].kind == "list" else "store"
        where.add_argument(
            flag, metavar=metavar, action=action, dest=_FLAG_DEST + full_name, help=text
        )


def load_settings(
    arguments: argparse.Namespace | None = None,
    *,
    config_path: str | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    machine: Machine | None = None,
) -> LoadedSettings:
    """Read the settings.

    Args:
        arguments: what a parser with `add_config_flags` returned, if there is a command line.
        config_path: the file; None = as `arguments`, the environment or the default say.
        flags: further values by ``section.name``, as strong as flags.
        environ: the environment; None = the process's.
        machine: where derived defaults come from; None = this one.

    Raises:
        ConfigError: an unknown name, a wrong type or range, or an unreadable file; the message says
            where the value is from.
    """
    environ = os.environ if environ is None else environ
    machine = machine or Machine(environ=environ)
    named = config_path or (arguments.config if arguments is not None else None)
    path = named or environ.get(CONFIG_VARIABLE) or None
    if path is None and os.path.exists(DEFAULT_FILE):
        path = DEFAULT_FILE
    content = _file_content(path)
    tenants = tenant_names(content, f"file {path}")
    keys = {**KEYS, **tenant_keys(tenants)}
    layers = [
        *_from_file(content, f"file {path}"),
        *_from_environment(environ),
        *_from_flags(arguments),
        *((name, value, "flag") for name, value in (flags or {}).items()),
    ]
    values: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    for full_name, value, source in layers:
        key = _known(keys, full_name, source)
        values[full_name] = read_value(key, value, source)
        provenance[full_name] = source
    _fill_from_oss_variables(values, provenance, environ)
    settings = _Builder(keys, values, provenance).build(machine, tenants)
    everywhere = {name: provenance.get(name, "default") for name in keys}
    return LoadedSettings(settings, everywhere, path, keys)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _known(keys: Mapping[str, Key], full_name: str, source: str) -> Key:
    """The key, or an error that names the one that was probably meant."""
    key = keys.get(full_name)
    if key is not None:
        return key
    section, _, name = full_name.rpartition(".")
    names = [key.name for key in keys.values() if key.section == section]
    if not names:
        sections = (*_SLICES, SECTION)
        meant = nearest(section, sections)
        hint = f"did you mean [{meant}]?" if meant else f"there are {', '.join(sections)}"
        raise ConfigError(f"unknown section [{section}] ({source}); {hint}")
    meant = nearest(name, names)
    hint = f"did you mean {section}.{meant}?" if meant else f"there are {', '.join(names)}"
    raise ConfigError(f"unknown setting {full_name} ({source}); {hint}")


def _file_content(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _from_file(content: Mapping[str, Any], source: str) -> Iterator[tuple[str, Any, str]]:
    for section, items in content.items():
        if not isinstance(items, dict):
            raise ConfigError(
                f"{section} stands outside of a section ({source}); settings belong under "
                f"{', '.join(f'[{name}]' for name in _SLICES)}"
            )
        if not items and section not in (*_SLICES, SECTION):
            _known(KEYS, f"{section}.", source)
        tables = {section: items}
        if section == SECTION:
            tables = {f"{section}.{name}": table for name, table in items.items()}
        for table, settings in tables.items():
            for name, value in settings.items():
                yield f"{table}.{name}", value, source


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    variables = {key.variable: name for name, key in KEYS.items()}
    for variable, value in environ.items():
        if not variable.startswith("GPUFEED_"):
            continue
        source = f"environment variable {variable}"
        if variable.startswith(f"GPUFEED_{SECTION.upper()}_"):
            raise ConfigError(f"unknown {source}; tenants are set in the file, [{SECTION}.NAME]")
        if variable in variables:
            yield variables[variable], value, source
        elif not _SERVICE_LINK.fullmatch(variable):
            section = variable.removeprefix("GPUFEED_").partition("_")[0].lower()
            in_section = variable.startswith(tuple(f"GPUFEED_{s.upper()}_" for s in _SLICES))
            meant = nearest(variable, variables, cutoff=0.0 if in_section else _SLIP_RATIO)
            if meant and (in_section or section not in _SLICES):
                raise ConfigError(f"unknown {source}; did you mean {meant}?")


def _from_flags(arguments: argparse.Namespace | None) -> Iterator[tuple[str, Any, str]]:
    if arguments is None:
        return
    if arguments.memory_only:
        yield "store.path", "", "flag --memory-only"
        yield "store.capacity_bytes", 0, "flag --memory-only"
    for full_name, (flag, _, _) in _FLAGS.items():
        value = getattr(arguments, _FLAG_DEST + full_name)
        if value is not None:
            yield full_name, value, f"flag {flag}"


def _fill_from_oss_variables(
    values: dict[str, Any], provenance: dict[str, str], environ: Mapping[str, str]
) -> None:
    elsewhere = values.get("origin.credentials", "auto") not in ("auto", "static")
    has_credential = elsewhere or any(values.get(name) for name in _CREDENTIAL)
    for full_name, variable in _OSS_VARIABLES.items():
        value = environ.get(variable, "")
        taken = has_credential if full_name in _CREDENTIAL else full_name in values
        if value and not taken:
            values[full_name] = value
            provenance[full_name] = f"environment variable {variable}"


class _Builder:
    """Validates values, deriving what was not given; a range error says where the value is from."""

    def __init__(
        self, keys: Mapping[str, Key], values: dict[str, Any], provenance: dict[str, str]
    ) -> None:
        self._keys = keys
        self._values = values
        self._provenance = provenance

    def build(self, machine: Machine, tenants: tuple[str, ...]) -> Settings:
        """All slices."""
        self._derive(machine)
        settings = Settings(
            self._made("origin", OriginConfig), self._made("store", StoreConfig),
            self._made("arena", ArenaConfig), self._made("daemon", DaemonConfig),
            self._made("policy", PolicyConfig),
            tuple(self._made(f"{SECTION}.{name}", TenantConfig, name=name) for name in tenants),
        )  # fmt: skip
        with self._located():
            check_together(
                settings.tenants, arena=settings.arena, allow=settings.daemon.allow,
                socket_path=settings.daemon.socket_path,
            )  # fmt: skip
        return settings

    def _derive(self, machine: Machine) -> None:
        values = self._values
        if not values.get("daemon.socket_path"):
            self._derived("daemon.socket_path", machine.socket_path())
        if "daemon.memory_bytes" not in values:
            self._derived("daemon.memory_bytes", machine.memory_limit())
        if "store.path" not in values:
            self._derived("store.path", machine.cache_path())
        if "arena.size_bytes" not in values:
            extent = values.get("arena.extent_bytes", KEYS["arena.extent_bytes"].default)
            self._derived("arena.size_bytes", machine.arena_bytes(max(1, extent)))
        if "store.capacity_bytes" not in values:
            self._made("store", StoreConfig)  # the ratio is checked before it is used
            ratio = values.get("store.free_floor_ratio", KEYS["store.free_floor_ratio"].default)
            path = values["store.path"]
            self._derived("store.capacity_bytes", machine.capacity_bytes(path, ratio))

    def _derived(self, full_name: str, derived: Derived[Any]) -> None:
        self._values[full_name] = derived.value
        self._provenance[full_name] = f"derived: {derived.how}"

    def _made(self, section: str, cls: type, **fixed: str) -> Any:
        keys = self._keys
        own = {keys[n].name: v for n, v in self._values.items() if keys[n].section == section}
        with self._located():
            return cls(**own, **fixed)

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            sources = [f"{n}: {from_}" for n, from_ in self._provenance.items() if n in str(error)]
            where = f" ({'; '.join(sources)})" if sources else ""
            raise ConfigError(f"{error}{where}") from None
