"""Byte and time units, and how people write them.

`parse_bytes("4MiB")`, `format_bytes(4194304)`. Binary suffixes are powers of 1024, decimal ones of
1000; a bare number is bytes.
"""

from __future__ import annotations

import re

from gpufeed.cachefs.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

KB = 1000
MB = 1000 * KB
GB = 1000 * MB
TB = 1000 * GB

# The unit of O_DIRECT alignment, of disk accounting and of memory pages.
BLOCK_BYTES = 4096

_SUFFIXES = {
    "": 1, "b": 1, "k": KB, "kb": KB, "kib": KIB, "m": MB, "mb": MB, "mib": MIB,
    "g": GB, "gb": GB, "gib": GIB, "t": TB, "tb": TB, "tib": TIB,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Turn ``"1.5GiB"``, ``"800 MB"`` or ``4096`` into bytes.

    Raises:
        ConfigError: not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text))
    factor = _SUFFIXES.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a size; write for example 64MiB, 1.5TB or 4096")
    return int(float(match.group(1)) * factor)


def format_bytes(size_bytes: int) -> str:
    """The shortest exact-looking form: ``"4 MiB"``, ``"1.5 GiB"``, ``"17 B"``."""
    value = float(size_bytes)
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {suffix}" if value != int(value) else f"{int(value)} {suffix}"
        value /= 1024
    return f"{value:.3g} TiB" if value != int(value) else f"{int(value)} TiB"


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
