"""What signs a request: credentials at hand, kept fresh without anybody waiting.

`RenewedCredentials` asks its source when somebody needs credentials and there are none, and in the
background when somebody uses some that will soon expire. So nothing runs where nothing is read, and
no timer is kept. While they are good, a renewal that fails is a warning; when they are expired it
is an error, and for the back-off's time the same error at once, lest thousands of parts ask a
service that is down.

One question at a time, whoever asks: the first caller's loop runs it, all others wait for it, on
whichever loop they are. A caller's cancellation is not the others'.

Threads: any. The lock is held for a few assignments, never across an await.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
import threading
from typing import Protocol

from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.errors import GpufeedError, OriginUnavailableError, RetryableError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.credentials.schedule import Schedule
from gpufeed.cachefs.origin.credentials.source import Issued, Source
from gpufeed.cachefs.origin.oss_sign import Credentials
from gpufeed.cachefs.tasks import until_done

_LOG = logging.getLogger("gpufeed.credentials")
# Tries of one renewal, and the pause before the second; it doubles.
TRIES_MAX = 3
PAUSE_S = 0.5
# A source that gives again what the service refuses is not asked more often than this.
REFUSED_AGAIN_S = 1.0


class CredentialProvider(Protocol):
    """Gives credentials to sign with."""

    async def get(self) -> Credentials:
        """Those to sign the next request with.

        Raises:
            GpufeedError: there are none; the message names who should have given them.
        """
        ...

    async def renew(self, refused: Credentials) -> None:
        """Replace `refused`, which the service did not take; nothing if that is done already."""
        ...

    async def close(self) -> None:
        """Give up what the running loop still asks."""
        ...


class FixedCredentials:
    """Always the same."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def get(self) -> Credentials:
        """See `CredentialProvider`."""
        return self._credentials

    async def renew(self, refused: Credentials) -> None:
        """See `CredentialProvider`: there are no others."""

    async def close(self) -> None:
        """See `CredentialProvider`."""


_Flight = concurrent.futures.Future[Credentials]


class RenewedCredentials:
    """See the top of the file.

    Args:
        source: who is asked.
        clock: monotonic seconds.
        metrics: counts renewals and failures.
        base: whose credentials the source asks with; closed with this one.
        rng: jitter.
    """

    def __init__(
        self,
        source: Source,
        *,
        clock: Clock,
        metrics: Metrics,
        base: CredentialProvider | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._source = source
        self._base = base
        self._clock = clock
        self._metrics = metrics
        # Jitter needs no secrecy, only that nodes differ.
        self._schedule = Schedule(rng or random.Random())  # noqa: S311
        self._rng = self._schedule.rng
        self._lock = threading.Lock()
        self._current: Credentials | None = None
        self._flight: _Flight | None = None
        self._task: asyncio.Task[Issued] | None = None
        self._failure: GpufeedError | None = None
        self._refused_until_s = 0.0

    async def get(self) -> Credentials:
        """See `CredentialProvider`."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            current = self._current
            if current is not None and not self._schedule.is_expired(now_s):
                if self._flight is None and self._schedule.is_due(now_s):
                    self._begin()
                return current
            if self._flight is None and not self._schedule.is_due(now_s):
                assert self._failure is not None, "expired, not due, and nothing has failed"
                raise _copy(self._failure)
            flight = self._flight or self._begin()
        return await _landed(flight)

    async def renew(self, refused: Credentials) -> None:
        """See `CredentialProvider`.

        Raises:
            GpufeedError: the source gave none.
        """
        with self._lock:
            if self._current != refused or self._clock.monotonic_s() < self._refused_until_s:
                return
            flight = self._flight or self._begin()
        new = await _landed(flight)
        if new == refused:
            self._refused_until_s = self._clock.monotonic_s() + REFUSED_AGAIN_S

    async def close(self) -> None:
        """See `CredentialProvider`."""
        task = self._task
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            task.cancel()
            await until_done(task)
        if self._base is not None:
            await self._base.close()

    # --- the one question ---------------------------------------------------------------------

    def _begin(self) -> _Flight:
        """Ask, on the running loop. The lock is held."""
        flight: _Flight = concurrent.futures.Future()
        task = asyncio.get_running_loop().create_task(self._ask())
        self._flight, self._task = flight, task
        task.add_done_callback(self._land)
        return flight

    async def _ask(self) -> Issued:
        pause_s = PAUSE_S
        for _ in range(TRIES_MAX - 1):
            try:
                return await self._source.fetch()
            except RetryableError as error:
                _LOG.debug("%s: %s; asking again", self._source.name, error)
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
            pause_s *= 2
        return await self._source.fetch()

    def _land(self, task: asyncio.Task[Issued]) -> None:
        """The answer, or the lack of one, goes to all who wait."""
        error = None if task.cancelled() else task.exception()
        with self._lock:
            flight, self._flight, self._task = self._flight, None, None
            assert flight is not None, "landed twice"
            if task.cancelled():
                error = OriginUnavailableError(f"{self._source.name}: the origin engine was closed")
            elif error is None:
                self._note(task.result())
            elif isinstance(error, GpufeedError):
                error = self._failure = self._noted(error)
            else:  # a mistake of ours, which a renewal ahead of time would otherwise hide
                _LOG.error("asking %s for credentials failed", self._source.name, exc_info=error)
        if error is None:
            flight.set_result(task.result().credentials)
        else:
            flight.set_exception(error)

    def _note(self, issued: Issued) -> None:
        now_s = self._clock.monotonic_s()
        first = self._current is None
        self._current, self._failure = issued.credentials, None
        self._schedule.issued(issued, now_s)
        self._metrics.add("credential_renewals_total")
        _LOG.log(
            logging.INFO if first else logging.DEBUG,
            "origin credentials: %s, %s; the next in %.0f s",
            self._source.name,
            f"key {issued.credentials.key}" if issued.credentials.key else "none: unsigned",
            self._schedule.ask_at_s - now_s,
        )

    def _noted(self, error: GpufeedError) -> GpufeedError:
        """The failure, with what to do about it."""
        name, advice = self._source.name, self._source.advice
        now_s = self._clock.monotonic_s()
        again_s = self._schedule.failed(now_s)
        self._metrics.add("credential_failures_total")
        if not self._schedule.is_expired(now_s):
            _LOG.warning(
                "the credentials from %s could not be renewed: %s; they are good for %.0f s more, "
                "the next try is in %.0f s; check %s",
                name, error, self._schedule.expires_at_s - now_s, again_s, advice,
            )  # fmt: skip
        return type(error)(f"no credentials from {name}: {error}; check {advice}")


async def _landed(flight: _Flight) -> Credentials:
    try:
        # Shielded: to cancel the wrapper would cancel the flight of all.
        return await asyncio.shield(asyncio.wrap_future(flight))
    except GpufeedError as error:
        raise _copy(error) from None


def _copy(error: GpufeedError) -> GpufeedError:
    """One of its own for each who waited: a shared one would gather everybody's traceback."""
    return type(error)(str(error))
