"""One small HTTP request to a token service, a few times a day: a session of its own each.

Bounded in time and size, follows no redirect, and takes no proxy from the environment: a metadata
service is asked directly or not at all.
"""

from __future__ import annotations

import email.utils
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gpufeed.cachefs.errors import OriginUnavailableError
from gpufeed.cachefs.units import KIB

BODY_BYTES_MAX = 64 * KIB
# Of an answer, in a message.
SHOWN_CHARACTERS = 200


class UnreachableError(OriginUnavailableError):
    """Nothing took the connection: there may be no such service here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request. Times in seconds; `who` is for messages, as the URL may hold a secret."""

    who: str
    method: str
    url: str
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    connect_timeout_s: float = 5.0
    timeout_s: float = 10.0
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """An answer. `at_s` is the answerer's wall clock, or ours where it told no date."""

    who: str
    status: int
    text: str
    at_s: float

    def table(self) -> Mapping[str, Any]:
        """The body, a JSON object.

        Raises:
            OriginUnavailableError: it is none.
        """
        try:
            value = json.loads(self.text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise OriginUnavailableError(f"{self.who} answered with no JSON object")
        return value

    def shown(self) -> str:
        """The answer's status, and its code and message where it has them."""
        try:
            table = json.loads(self.text)
            words = f"{table['Code']}: {table['Message']}"
        except (ValueError, KeyError, TypeError):
            words = " ".join(self.text.split())
        return f"HTTP {self.status} {words[:SHOWN_CHARACTERS]}".rstrip()


async def ask(request: Ask) -> Told:
    """Send, and receive the whole answer.

    Raises:
        UnreachableError: nothing took the connection.
        OriginUnavailableError: too slow, too long, or the connection broke.
    """
    timeout = aiohttp.ClientTimeout(total=request.timeout_s, sock_connect=request.connect_timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(
                request.method,
                request.url,
                params=request.query,
                data=request.form,
                headers=request.headers,
                ssl=request.tls or True,
                allow_redirects=False,
            ) as answer,
        ):
            return await _told(request, answer)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise UnreachableError(f"{request.who} cannot be reached: {error}") from None
    except TimeoutError:
        raise OriginUnavailableError(
            f"{request.who} did not answer within {request.timeout_s:g} s"
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise OriginUnavailableError(
            f"{request.who} broke off: {type(error).__name__}: {error}"
        ) from None


async def _told(request: Ask, answer: aiohttp.ClientResponse) -> Told:
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > BODY_BYTES_MAX:
            raise OriginUnavailableError(
                f"{request.who} answered with more than {BODY_BYTES_MAX} bytes"
            )
    return Told(
        request.who, answer.status, body.decode(errors="replace"), _at_s(answer.headers.get("Date"))
    )


def _at_s(date: str | None) -> float:
    try:
        return email.utils.parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return time.time()
