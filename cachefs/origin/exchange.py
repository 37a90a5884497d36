"""A request and its answer as values: what is sent, where the body goes, what came back. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpufeed.cachefs.errors import UsageError
from gpufeed.cachefs.origin.sink import Sink
from gpufeed.cachefs.units import KIB

ERROR_BODY_LIMIT_BYTES = 64 * KIB


@dataclass(frozen=True, slots=True)
class Head:
    """Status line and headers of an answer; names in lower case, the last of equal names wins."""

    status: int
    headers: Mapping[str, str]

    @property
    def content_length_bytes(self) -> int | None:
        """The body's length if it was told."""
        text = self.headers.get("content-length", "")
        return int(text) if text.isascii() and text.isdigit() else None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `body` is empty where a sink took it; `truncated` says the limit cut it."""

    head: Head
    body: bytes = b""
    truncated: bool = False


Accept = Callable[[Head], Sink | None]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request ready to send, and what to do with its answer.

    Attributes:
        request: the bytes of the request, see `request_bytes`.
        accept: chooses where the body goes; may raise `AttemptFailedError` to refuse it.
        bodiless: the answer has no body whatever its headers say (HEAD).
        body_limit_bytes: how much of a collected body is kept.
    """

    request: bytes
    accept: Accept
    bodiless: bool = False
    body_limit_bytes: int = ERROR_BODY_LIMIT_BYTES


def request_bytes(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """Lay a request without body out.

    Raises:
        UsageError: a control character in the target or a header.
    """
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {headers[name]}" for name in headers)]
    for line in lines:
        if not line.isascii() or not line.isprintable():
            raise UsageError(f"{line!r} cannot be sent in an HTTP head; remove odd characters")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
