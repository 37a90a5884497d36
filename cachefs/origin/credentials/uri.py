"""Credentials from an address of somebody's own, ``ALIBABA_CLOUD_CREDENTIALS_URI``.

It answers as the metadata service does. For sidecars and for other clouds.
"""

from __future__ import annotations

import ssl
from urllib.parse import urlsplit

from gpufeed.cachefs.errors import AccessDeniedError, ConfigError, OriginUnavailableError
from gpufeed.cachefs.origin.credentials.coldhttp import Ask, ask
from gpufeed.cachefs.origin.credentials.source import Issued, issued_from


class CredentialsUri:
    """Satisfies `Source`.

    Raises:
        ConfigError: the address is none of http or https.
    """

    advice = "ALIBABA_CLOUD_CREDENTIALS_URI and the service behind it"

    def __init__(self, uri: str, *, tls: ssl.SSLContext | None = None) -> None:
        scheme, where = _split(uri)
        if scheme not in ("http", "https") or not where:
            raise ConfigError(
                "ALIBABA_CLOUD_CREDENTIALS_URI is no http:// or https:// address of a host"
            )
        # Its path or query may be a secret.
        self.name = f"credentials URI at {where}"
        self._uri = uri
        self._tls = tls

    async def fetch(self) -> Issued:
        """See `Source`."""
        told = await ask(Ask(who=self.name, method="GET", url=self._uri, tls=self._tls))
        if told.status != 200:
            error = OriginUnavailableError if _may_pass(told.status) else AccessDeniedError
            raise error(f"{self.name} refused: {told.shown()}")
        table = told.table()
        if table.get("Code", "Success") != "Success":
            raise AccessDeniedError(f"{self.name} refused: {told.shown()}")
        return issued_from(table, told.at_s, self.name)


def _split(uri: str) -> tuple[str, str]:
    """Scheme, and host with port; empty where it is no address."""
    try:
        parts = urlsplit(uri)
        return parts.scheme, f"{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}"
    except ValueError:
        return "", ""


def _may_pass(status: int) -> bool:
    return status >= 500 or status == 429
