"""The storage options in a client's request, checked. Pure."""

from __future__ import annotations

from typing import Any

from gpufeed.cachefs.errors import UsageError

OPTION_NAMES = ("endpoint", "key", "secret", "token", "region")


def options_of(value: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The checked storage options of a request, sorted; empty ones left out.

    Raises:
        UsageError: no mapping, or a name that is not one of `OPTION_NAMES`.
    """
    options = value.get("storage_options", {})
    if not isinstance(options, dict):
        raise UsageError("storage_options must be a mapping of names to strings")
    unknown = [name for name in options if name not in OPTION_NAMES]
    if unknown:
        raise UsageError(
            f"storage_options has {', '.join(unknown)}; known are {', '.join(OPTION_NAMES)}"
        )
    return tuple(sorted((name, str(option)) for name, option in options.items() if option))
