"""Where credentials come from. The provider is asked for each request and after a refusal.

`StaticCredentials` gives what the configuration holds. `EnvironmentCredentials` reads the variables
that OSS's own tools read, again after each refusal, so that a sidecar may renew them in a file that
a wrapper sources; without any, requests go unsigned.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.origin.oss_sign import Credentials

_VARIABLES = (
    ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", "OSS_SESSION_TOKEN"),
    (
        "ALIBABA_CLOUD_ACCESS_KEY_ID",
        "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
        "ALIBABA_CLOUD_SECURITY_TOKEN",
    ),
)


class CredentialProvider(Protocol):
    """Gives credentials."""

    async def get(self, *, refresh: bool = False) -> Credentials:
        """The current ones; `refresh` after the service called them expired."""
        ...


class StaticCredentials:
    """Always the same."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def get(self, *, refresh: bool = False) -> Credentials:
        """See `CredentialProvider`."""
        return self._credentials


class EnvironmentCredentials:
    """From the environment; anonymous if it has none."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._found = self._read()

    def _read(self) -> Credentials:
        for key, secret, token in _VARIABLES:
            if self._environ.get(key) and self._environ.get(secret):
                return Credentials(
                    self._environ[key], self._environ[secret], self._environ.get(token, "")
                )
        return Credentials("", "")

    async def get(self, *, refresh: bool = False) -> Credentials:
        """See `CredentialProvider`."""
        if refresh:
            self._found = self._read()
        return self._found


def provider_of(config: OriginConfig) -> CredentialProvider:
    """The provider that the configuration asks for."""
    if config.key:
        return StaticCredentials(Credentials(config.key, config.secret, config.token))
    return EnvironmentCredentials(os.environ)
