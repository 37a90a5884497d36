"""`gpufeed config show` and `gpufeed config check`.

`show` prints every setting with where it is from, as TOML that may be pasted into the file, or as
JSON. `check` reads everything and says what will not do. Credentials are never printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator

from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.origin.oss_address import Address, cautions
from gpufeed.daemon.config import LoadedSettings, add_config_flags, load_settings
from gpufeed.daemon.settingvalues import show_value
from gpufeed.daemon.startchecks import excess, refusals, taken


def command(argv: list[str]) -> int:
    """``gpufeed config``.

    Raises:
        ConfigError: the settings are wrong.
    """
    parser = argparse.ArgumentParser(
        prog="gpufeed config",
        description="Show the settings and where each is from, or check them.",
        epilog="examples: gpufeed config show; gpufeed config show --json; "
        "gpufeed config check --config /etc/gpufeed/gpufeed.toml",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="show|check")
    show = actions.add_parser("show", help="print every setting and where it is from")
    show.add_argument("--json", action="store_true", help="print JSON")
    check = actions.add_parser("check", help="say whether the settings will do")
    for sub in (show, check):
        add_config_flags(sub)
    arguments = parser.parse_args(argv)
    loaded = load_settings(arguments)
    if arguments.action == "check":
        return _check(loaded)
    sys.stdout.write(_as_json(loaded) if arguments.json else _as_toml(loaded))
    return 0


def _as_toml(loaded: LoadedSettings) -> str:
    lines = [f"# file: {loaded.config_path or 'none'}"]
    section = ""
    for full_name, key in loaded.keys.items():
        if key.section != section:
            section = key.section
            lines += ["", f"[{section}]"]
        setting = f"{key.name} = {show_value(key, loaded.value(full_name))}"
        if key.secret:
            setting = f"# {setting}"
        lines.append(f"{setting:<40} # {loaded.provenance[full_name]}")
    return "\n".join(lines) + "\n"


def _as_json(loaded: LoadedSettings) -> str:
    values = {}
    for full_name, key in loaded.keys.items():
        value = loaded.value(full_name)
        values[full_name] = {
            "value": show_value(key, value) if key.secret else value,
            "source": loaded.provenance[full_name],
        }
    return json.dumps({"file": loaded.config_path, "settings": values}, indent=2) + "\n"


def _check(loaded: LoadedSettings) -> int:
    problems = [*refusals(loaded), *taken(loaded)]
    for problem in problems:
        sys.stderr.write(f"gpufeed: {problem}\n")
    if problems:
        # A setting to be corrected goes before what may be free at another time.
        return min(problem.exit_status for problem in problems)
    for note in _notes(loaded):
        sys.stdout.write(f"note: {note}\n")
    sys.stdout.write(f"the configuration is valid (file: {loaded.config_path or 'none'})\n")
    return 0


def _notes(loaded: LoadedSettings) -> Iterator[str]:
    """What will do, but may surprise."""
    settings = loaded.settings
    if not settings.store.path:
        yield "memory only: nothing is cached on disk"
    yield from excess(loaded)
    for name, prefixes in (
        ("policy.quotas", settings.policy.quota_bytes), ("policy.pins", settings.policy.pins),
    ):  # fmt: skip
        for prefix in prefixes:
            if not prefix.endswith("/"):
                yield (
                    f"{name}: {prefix} also covers {prefix}-private and whatever else begins with "
                    "it; end it with / to mean what lies under it"
                )
    if not settings.origin.endpoint:
        yield (
            "origin.endpoint is not set: clients must name one of the cloud's own, or of "
            "daemon.endpoints, for oss:// in storage_options"
        )
        return
    try:
        yield from cautions(Address.of(settings.origin), settings.origin)
    except ConfigError as error:  # for oss:// it will not do; for another scheme it may
        yield str(error)
