"""How a client and a daemon agree on the session protocol, and what they say where they cannot.

Frames, and what `HELLO`, `WELCOME` and `ERROR` hold, stay as they are for ever; fields may be
added, and unknown ones are ignored. So the oldest and the newest of either side can read them.
`WELCOME` comes with two descriptors: the arena's memory, and a locked file that the client keeps
exactly as long as it maps that (`gpufeed.cachefs.arena.ledger`).
`HELLO` says which versions the client speaks, oldest and newest; the daemon takes the newest that
both have, or refuses in words that name the side to be upgraded. The version says what all other
bodies mean. A client that says nothing is of the first one, which had no say in it.

Pure; used by both sides.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

from gpufeed.cachefs.errors import ProtocolError

# What this software speaks. A version is dropped when nobody can be running it any more.
PROTOCOL_OLDEST = 1
PROTOCOL_NEWEST = 1

TOKEN_CHARACTERS_MAX = 4096
SOFTWARE_CHARACTERS_MAX = 100
UNNAMED = "of the first version"


def software() -> str:
    """Name and version of this software, for messages."""
    try:
        return f"gpufeed {importlib.metadata.version('gpufeed')}"
    except importlib.metadata.PackageNotFoundError:  # run from a tree that was not installed
        return "gpufeed (version unknown)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a client begins with.

    Attributes:
        protocol: the oldest and the newest version that it speaks.
        software: its name and version.
        window_bytes: wish for the session's window; 0 leaves it to the daemon.
        whole: all of the window or a refusal, instead of less.
        token: says which tenant it is of.
    """

    protocol: tuple[int, int] = (1, 1)
    software: str = UNNAMED
    window_bytes: int = 0
    whole: bool = False
    token: str | None = None

    def pack(self) -> dict[str, Any]:
        """As JSON."""
        value: dict[str, Any] = {
            "protocol": list(self.protocol),
            "software": self.software,
            "window_bytes": self.window_bytes,
        }
        if self.whole:
            value["whole"] = True
        if self.token is not None:
            value["token"] = self.token
        return value

    @classmethod
    def unpack(cls, value: dict[str, Any]) -> Hello:
        """See `pack`.

        Raises:
            ProtocolError: a field is not what it must be; the message names it.
        """
        token = value.get("token")
        if token is not None and not (
            isinstance(token, str) and len(token) <= TOKEN_CHARACTERS_MAX
        ):
            raise ProtocolError(
                f"HELLO: token is no text of up to {TOKEN_CHARACTERS_MAX} characters"
            )
        whole = value.get("whole", False)
        if not isinstance(whole, bool):
            raise ProtocolError("HELLO: whole is neither true nor false")
        return cls(
            protocol=_protocol(value.get("protocol", [1, 1])),
            software=_printable(value.get("software", UNNAMED)),
            window_bytes=_whole_number(value.get("window_bytes", 0), "window_bytes"),
            whole=whole,
            token=token,
        )


def hello(*, window_bytes: int, whole: bool, token: str | None) -> Hello:
    """What this software says as a client."""
    return Hello(
        protocol=(PROTOCOL_OLDEST, PROTOCOL_NEWEST), software=software(),
        window_bytes=window_bytes, whole=whole, token=token,
    )  # fmt: skip


def agree(client: Hello) -> int:
    """The daemon's choice.

    Raises:
        ProtocolError: there is no version that both speak; says which side to upgrade.
    """
    oldest, newest = client.protocol
    chosen = min(newest, PROTOCOL_NEWEST)
    if chosen < max(oldest, PROTOCOL_OLDEST):
        side = "client" if newest < PROTOCOL_OLDEST else "daemon"
        raise ProtocolError(
            f"this daemon ({software()}) speaks session protocol "
            f"{_span(PROTOCOL_OLDEST, PROTOCOL_NEWEST)}, the client ({client.software}) "
            f"{_span(oldest, newest)}: upgrade the {side}"
        )
    return chosen


def check_welcome(value: dict[str, Any]) -> int:
    """The version that the daemon chose. Daemons of the first version do not say.

    Raises:
        ProtocolError: one that this client does not speak.
    """
    chosen = _whole_number(value.get("protocol", 1), "protocol")
    if not PROTOCOL_OLDEST <= chosen <= PROTOCOL_NEWEST:
        side = "daemon" if chosen < PROTOCOL_OLDEST else "client"
        theirs = _printable(value.get("software", UNNAMED))
        raise ProtocolError(
            f"this client ({software()}) speaks session protocol "
            f"{_span(PROTOCOL_OLDEST, PROTOCOL_NEWEST)}, the daemon ({theirs}) chose {chosen}: "
            f"upgrade the {side}"
        )
    return chosen


def _span(oldest: int, newest: int) -> str:
    return str(newest) if oldest == newest else f"{oldest} to {newest}"


def _protocol(value: object) -> tuple[int, int]:
    if not (isinstance(value, list) and len(value) == 2):
        raise ProtocolError("HELLO: protocol is no pair of the oldest and the newest version")
    oldest, newest = (_whole_number(one, "protocol") for one in value)
    if not 1 <= oldest <= newest:
        raise ProtocolError(f"HELLO: protocol from {oldest} to {newest} is no range")
    return oldest, newest


def _whole_number(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ProtocolError(f"HELLO: {name} is no whole number")
    return value


def _printable(value: object) -> str:
    text = str(value)[:SOFTWARE_CHARACTERS_MAX]
    return "".join(c if c.isprintable() else "?" for c in text)
