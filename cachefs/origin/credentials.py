"""Where credentials come from.

A provider has the current ones at hand, since each request needs them, and renews them when the
service refuses them. `EnvironmentCredentials` looks for the variables that OSS's own tools read;
without any, requests go unsigned. `FetchedCredentials` asks a coroutine, once for however many
requests were refused together (single flight).

Lives on the engine's loop only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

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

    @property
    def current(self) -> Credentials:
        """Those to sign the next request with."""
        ...

    async def renew(self, refused: Credentials) -> None:
        """Replace `refused`, which the service did not take; nothing if that is done already."""
        ...


class StaticCredentials:
    """Always the same."""

    def __init__(self, credentials: Credentials) -> None:
        self.current = credentials

    async def renew(self, refused: Credentials) -> None:
        """See `CredentialProvider`: there are no others."""


class EnvironmentCredentials:
    """From a mapping such as `os.environ`; anonymous if it has none. Read again when refused."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.current = self._read()

    def _read(self) -> Credentials:
        for key, secret, token in _VARIABLES:
            if self._environ.get(key) and self._environ.get(secret):
                return Credentials(
                    self._environ[key], self._environ[secret], self._environ.get(token, "")
                )
        return Credentials("", "")

    async def renew(self, refused: Credentials) -> None:
        """See `CredentialProvider`."""
        self.current = self._read()


class FetchedCredentials:
    """From a coroutine, for example one that asks a token service. One call at a time.

    Args:
        first: what to begin with.
        fetch: gets new ones; what it raises is raised by every `renew` that waited for it.
    """

    def __init__(
        self, first: Credentials, fetch: Callable[[], Coroutine[Any, Any, Credentials]]
    ) -> None:
        self.current = first
        self._fetch = fetch
        self._fetching: asyncio.Task[Credentials] | None = None

    async def renew(self, refused: Credentials) -> None:
        """See `CredentialProvider`."""
        if self.current != refused:
            return
        task = self._fetching
        if task is None:
            task = self._fetching = asyncio.get_running_loop().create_task(self._fetch())
            task.add_done_callback(self._fetched)
        # One caller's cancellation is not the others'.
        await asyncio.shield(task)

    def _fetched(self, task: asyncio.Task[Credentials]) -> None:
        self._fetching = None
        if not task.cancelled() and task.exception() is None:
            self.current = task.result()


def provider_of(config: OriginConfig) -> CredentialProvider:
    """The provider that the configuration asks for."""
    if config.key:
        return StaticCredentials(Credentials(config.key, config.secret, config.token))
    return EnvironmentCredentials(os.environ)
