"""What a source of credentials is: one exchange, asked for by whoever keeps them fresh.

A source holds no credentials, no lock and no timer; `gpufeed.cachefs.origin.credentials.renewed`
decides when it is asked, and sees to it that it is asked once at a time.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gpufeed.cachefs.errors import OriginUnavailableError
from gpufeed.cachefs.origin.oss_sign import Credentials


@dataclass(frozen=True, slots=True)
class Issued:
    """Credentials, and for how long they are good.

    Attributes:
        credentials: to sign with.
        lifetime_s: seconds from now until they expire; infinite if they do not.
        renew_in_s: when to ask again though they do not expire; None = by `lifetime_s`.
    """

    credentials: Credentials
    lifetime_s: float = math.inf
    renew_in_s: float | None = None


class Source(Protocol):
    """Gives credentials.

    Attributes:
        name: for logs and messages, for example ``RRSA role acs:ram::1:role/reader``.
        advice: what to check or set when it fails, as the end of a sentence.
    """

    name: str
    advice: str

    async def fetch(self) -> Issued:
        """Ask once.

        Raises:
            OriginUnavailableError: nobody answered, or not in a way that makes sense: ask again.
            NotFoundError: it has none for this machine.
            AccessDeniedError: it refused.
            ConfigError: something that it needs is not set.
        """
        ...


def issued_from(told: Mapping[str, Any], now_s: float, who: str) -> Issued:
    """Credentials as Alibaba Cloud's services write them.

    Args:
        told: ``AccessKeyId``, ``AccessKeySecret``, ``SecurityToken``, ``Expiration``.
        now_s: seconds since the epoch by the clock of whoever told.
        who: for messages.

    Raises:
        OriginUnavailableError: incomplete, malformed, or expired already.
    """
    values = [told.get(name) for name in ("AccessKeyId", "AccessKeySecret", "SecurityToken")]
    if not all(isinstance(value, str) and value for value in values):
        raise OriginUnavailableError(
            f"{who} answered without AccessKeyId, AccessKeySecret and SecurityToken (it told "
            f"{', '.join(sorted(map(str, told))) or 'nothing'})"
        )
    expiration = told.get("Expiration")
    try:
        expires_at_s = datetime.datetime.fromisoformat(str(expiration)).timestamp()
    except ValueError:
        raise OriginUnavailableError(
            f"{who} answered with the expiration {expiration!r}, which is no time"
        ) from None
    lifetime_s = expires_at_s - now_s
    if lifetime_s <= 0:
        raise OriginUnavailableError(
            f"{who} gave credentials that expired {-lifetime_s:.0f} s ago ({expiration})"
        )
    return Issued(Credentials(*map(str, values)), lifetime_s)
