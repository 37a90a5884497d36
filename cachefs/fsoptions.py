"""What the fsspec door may be told, by name: its own options, and those of its target.

A name that nobody reads is refused: a misspelt endpoint, silently dropped, reads from the daemon's
own and with the daemon's own credentials, which is another bucket of that name or an error that
names no cause. Messages have names only, never values, since those may be secrets.

Targets other than OSS have filesystems that hand options on to their clients; theirs are not known
here, and pass. Pure, but for the variable that ossfs reads too.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from typing import Any

from gpufeed.cachefs.fserrors import FileUsageError

DAEMON_OPTIONS = ("endpoint", "key", "secret", "token", "region")
# What fsspec reads itself, of any filesystem, or leaves behind where it resolves a chain.
FSSPEC_OPTIONS = (
    "skip_instance_cache", "asynchronous", "loop", "batch_size", "use_listings_cache",
    "listings_expiry_time", "max_paths", "target_protocol", "target_options", "fo",
)  # fmt: skip
DOOR_OPTIONS = (*FSSPEC_OPTIONS, "daemon", "block_size")
# ossfs takes any name, so that its own have to be told here; a test compares them with it.
OSSFS_OPTIONS = (
    "endpoint", "key", "secret", "token", "default_cache_type", "default_block_size",
)  # fmt: skip
_OSS_NAMES = tuple(dict.fromkeys((*DAEMON_OPTIONS, *OSSFS_OPTIONS)))
OSS_OPTIONS = (*_OSS_NAMES, *FSSPEC_OPTIONS)
_CREDENTIALS_ARE_FOR_READING = (
    "give target_options with endpoint, key and secret: the daemon's credentials are for reading"
)


def refuse_unknown(options: Collection[str], target_protocol: str) -> None:
    """Look at the names that the filesystem was given beyond those of its signature.

    Raises:
        UsageError: one is not of the door.
    """
    for name in options:
        if name in DOOR_OPTIONS:
            continue
        place = (
            f"put it in target_options, or with gpufeed::{target_protocol}:// in "
            f"{target_protocol}={{...}}"
        )
        meant = _nearest(name, (*DOOR_OPTIONS, target_protocol))
        if name in OSS_OPTIONS:
            advice = f"it is one of the target's: {place}"
        elif meant:
            advice = f"did you mean {meant}? If it is one of the target's, {place}"
        else:
            advice = f"if it is one of the target's, {place}"
        raise FileUsageError(f"gpufeed's filesystem has no option {name!r}; {advice}")


def target_options(protocol: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The target's own options, once their names are known to be good.

    Libraries that resolve ``gpufeed::oss://b/*.x`` by themselves (HF datasets) leave the pattern
    behind each address that they found, as one more link of the chain, which gets the options.

    Raises:
        UsageError: no mapping, or a name that neither the daemon nor ossfs knows.
    """
    options = _mapping(options)
    while options.get("target_protocol") == protocol:
        options = _mapping(options.get("target_options"))
    for name in options if protocol == "oss" else ():
        if name not in OSS_OPTIONS:
            meant = _nearest(name, OSS_OPTIONS)
            known = ", ".join(_OSS_NAMES)
            raise FileUsageError(
                f"target_options of oss have no {name!r}; "
                + (f"did you mean {meant}? Known are {known}" if meant else f"known are {known}")
            )
    return dict(options)


def _mapping(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise FileUsageError(
            f"target_options must be a mapping of names to values, not {type(options).__name__}"
        )
    return options


def _nearest(name: str, valid: Collection[str]) -> str:
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return found[0] if found else ""


def daemon_options(options: Mapping[str, Any]) -> dict[str, str]:
    """What the daemon is told of a target's storage options; s3fs has names of its own."""
    client = options.get("client_kwargs") or {}
    named = {
        "endpoint": options.get("endpoint_url") or client.get("endpoint_url"),
        "region": client.get("region_name"),
        **{name: options[name] for name in DAEMON_OPTIONS if options.get(name)},
    }
    return {name: str(value) for name, value in named.items() if value}


def must_be_writable(protocol: str, options: Mapping[str, Any]) -> None:
    """Look whether the target's filesystem could write at all; others than OSS say so themselves.

    An endpoint alone passes: a bucket may be open to everybody.

    Raises:
        UsageError: what ossfs needs is missing.
    """
    if protocol != "oss":
        return
    has_endpoint = bool(options.get("endpoint"))
    key, secret = bool(options.get("key")), bool(options.get("secret"))
    if not has_endpoint and not key and not secret:
        raise FileUsageError(f"this filesystem cannot write: {_CREDENTIALS_ARE_FOR_READING}")
    lacking = [
        name
        for name, is_there in (
            ("endpoint", has_endpoint or bool(os.environ.get("OSS_ENDPOINT"))),
            ("key", key or not secret),
            ("secret", secret or not key),
        )
        if not is_there
    ]
    if lacking:
        raise FileUsageError(
            f"this filesystem cannot write, its target_options lack {' and '.join(lacking)}: "
            f"{_CREDENTIALS_ARE_FOR_READING}"
        )


def buffer_bytes(block_size: Any) -> int:
    """`block_size` as it was given.

    Raises:
        UsageError: it is no positive number.
    """
    if not isinstance(block_size, int) or block_size <= 0:
        raise FileUsageError(
            f"block_size is {block_size!r}; it must be a positive number of bytes, for example "
            "1048576"
        )
    return block_size
