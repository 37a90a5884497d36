"""The settings' names and types, and the reading of one value from text.

Owns the table of keys, made from the fields of the frozen slices so that it cannot lag behind them:
``section.name``, its type, and whether it is secret. Pure.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.units import format_bytes, parse_bytes

Kind = Literal["bytes", "int", "float", "bool", "str", "list"]
# In whatever section.
SECRET_NAMES = frozenset(("key", "secret", "token"))
_BOOLEANS = {
    "true": True, "1": True, "yes": True, "on": True,
    "false": False, "0": False, "no": False, "off": False,
}  # fmt: skip
_KINDS: dict[Any, Kind] = {
    int: "int", float: "float", bool: "bool", str: "str", tuple[str, ...]: "list",
}  # fmt: skip
_WANTED: dict[Kind, str] = {
    "bytes": "a size, for example \"64GiB\"",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "list": "a list of strings, none of them empty (in a variable: separated by commas, or a TOML "
    "array)",
}  # fmt: skip
_READERS: dict[Kind, tuple[tuple[type, ...], Callable[[Any], Any]]] = {
    "bytes": ((str, int), parse_bytes),
    "int": ((str, int), int),
    "float": ((str, int, float), float),
    "str": ((str,), str),
}


@dataclass(frozen=True, slots=True)
class Key:
    """One setting."""

    section: str
    name: str
    kind: Kind
    default: Any

    @property
    def full_name(self) -> str:
        """``section.name``."""
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"GPUFEED_{self.section}_{self.name}".upper()

    @property
    def secret(self) -> bool:
        """Never to be printed."""
        return self.name in SECRET_NAMES


def keys_of(slices: Mapping[str, type]) -> dict[str, Key]:
    """The table of keys of these sections' dataclasses."""
    table = {}
    for section, cls in slices.items():
        types = typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            is_size = item.name.endswith(("_bytes", "_bytes_max", "_bytes_per_s_max"))
            kind = "bytes" if is_size else _KINDS[types[item.name]]
            key = Key(section, item.name, kind, item.default)
            table[key.full_name] = key
    return table


def nearest(name: str, valid: typing.Iterable[str], cutoff: float = 0.5) -> str:
    """The valid name that was probably meant, or an empty string."""
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return found[0] if found else ""


def read_value(key: Key, value: Any, source: str) -> Any:
    """The value of `key` as its slice wants it. Text from environment and flags is parsed.

    Raises:
        ConfigError: of the wrong type; the message has the source, and no secret.
    """
    try:
        return _read(key.kind, value)
    except (ValueError, TypeError, KeyError, AttributeError, ConfigError):
        shown = "a value" if key.secret else repr(value)
        raise ConfigError(
            f"{key.full_name} is {shown} ({source}); it must be {_WANTED[key.kind]}"
        ) from None


def _read(kind: Kind, value: Any) -> Any:
    if kind == "bool":
        return value if isinstance(value, bool) else _BOOLEANS[str(value).strip().lower()]
    if isinstance(value, bool):
        raise TypeError
    if kind == "list":
        return _read_list(value)
    types, convert = _READERS[kind]
    return convert(_check(value, types))


def _read_list(value: Any) -> tuple[str, ...]:
    """Of a list, each of whose strings may be a TOML array, as flags give them; or of text."""
    if not isinstance(value, str):
        parts: list[Any] = []
        for part in _check(value, (list, tuple)):
            is_array = isinstance(part, str) and part.lstrip().startswith("[")
            parts.extend(_toml_array(part) if is_array else [part])
    elif value.lstrip().startswith("["):
        parts = _toml_array(value)
    else:
        parts = value.split(",") if value.strip() else []
    stripped = tuple(_check(part, (str,)).strip() for part in parts)
    if "" in stripped:
        raise ValueError
    return stripped


def _toml_array(text: str) -> list[Any]:
    table = tomllib.loads(f"value = {text}")
    if list(table) != ["value"]:
        raise ValueError
    return list(_check(table["value"], (list,)))


def _check(value: Any, types: tuple[type, ...]) -> Any:
    if not isinstance(value, types):
        raise TypeError
    return value


def show_value(key: Key, value: Any) -> str:
    """The value as `config show` prints it: secrets hidden, the rest as TOML."""
    if key.secret:
        return "(set)" if value else "(unset)"
    if key.kind == "bytes":
        readable = format_bytes(value)
        return f'"{readable}"' if parse_bytes(readable) == value else str(value)
    return json.dumps(value, ensure_ascii=False)
