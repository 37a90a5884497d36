"""One call to OSS: signed, sent when its turn has come, repeated as long as that is worth it.

`ask` is one attempt: sign, wait for a place, exchange, and tell the account how it went. `call`
repeats attempts by the verdicts of `retry`, with fresh credentials or the server's clock where an
error answer asks for them, and waits where the origin is known to be down.

``deadline_s`` bounds a call whole, a body that has stopped included. It runs from the moment at
which the call first had a connection or found the origin down: waiting for the requests of others
is our own doing, and no reason to fail.

Lives on one engine thread's loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import ConfigError, GpufeedError, OriginUnavailableError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.credentials.chain import CredentialBook
from gpufeed.cachefs.origin.deadline import Deadline
from gpufeed.cachefs.origin.dial import Endpoint
from gpufeed.cachefs.origin.exchange import (
    ERROR_BODY_LIMIT_BYTES,
    Accept,
    Answer,
    Exchange,
    request_bytes,
)
from gpufeed.cachefs.origin.failure import AttemptFailedError, Failure
from gpufeed.cachefs.origin.limits import Sign
from gpufeed.cachefs.origin.oss_address import Address
from gpufeed.cachefs.origin.oss_answer import asked_delay_s, server_offset_s, status_failure
from gpufeed.cachefs.origin.oss_codes import rule_of
from gpufeed.cachefs.origin.oss_sign import (
    Credentials,
    encode_path,
    encode_query,
    request_path,
    signed_headers,
)
from gpufeed.cachefs.origin.pool import ConnectionPool, Ticket
from gpufeed.cachefs.origin.retry import Again, Retrier

# Whose addresses are kept.
BUCKETS_MAX = 64


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body_limit_bytes: int = ERROR_BODY_LIMIT_BYTES


# One attempt, under the ticket that it is given.
Attempt = Callable[[Ticket], Coroutine[None, None, Answer]]


class OssClient:
    """See the top of the file.

    Args:
        config: timeouts and limits.
        address: where.
        metrics: for counters.
        book: who to sign as.
        pool: this thread's connections there.

    Raises:
        ConfigError: the credentials asked for are not set.
    """

    def __init__(
        self,
        config: OriginConfig,
        address: Address,
        metrics: Metrics,
        book: CredentialBook,
        pool: ConnectionPool,
    ) -> None:
        self._retries_max = config.retries_max
        self._deadline_s = config.deadline_s
        self._address = address
        self._metrics = metrics
        self._provider = book.provider(config, address.region, internal=address.internal)
        self._pool = pool
        self._account = pool.account
        self._offset_s = 0.0
        self._where: dict[str, tuple[Endpoint, str]] = {}
        # Jitter needs no secrecy, only that nodes differ.
        self._rng = random.Random()  # noqa: S311

    async def close(self) -> None:
        """No call is under way."""
        await self._provider.close()

    # --- attempts -----------------------------------------------------------------------------

    async def call(self, what: str, attempt: Attempt, *, demand: bool = True) -> Answer:
        """Repeat `attempt` until it succeeds, or until that is no use.

        Args:
            what: for messages, for example ``HEAD oss://bucket/key``.
            attempt: does it once; given a ticket, of which it may set the size.
            demand: somebody waits.

        Raises:
            GpufeedError: see `gpufeed.cachefs.origin.retry`.
        """
        loop = asyncio.get_running_loop()
        retrier = Retrier(f"{what} at {self._address.text}", self._retries_max, self._rng)
        deadline = Deadline(self._deadline_s, loop)
        failed: AttemptFailedError | None = None
        try:
            while True:
                probe = await self._account.outage.admitted(deadline.start)
                try:
                    return await attempt(Ticket(0, demand, probe, deadline.start))
                except AttemptFailedError as error:
                    failed = error
                retrier.deadline_at_s = deadline.at_s
                verdict = retrier.judge(failed.failure, loop.time(), probe=probe)
                if isinstance(verdict, GpufeedError):
                    raise verdict
                await self._repair(verdict, failed)
        except asyncio.CancelledError:
            if deadline.passed():
                raise self._late(retrier, failed) from None
            raise
        finally:
            deadline.stop()

    async def _repair(self, verdict: Again, failed: AttemptFailedError) -> None:
        self._metrics.add("origin_retries_total")
        if verdict.repair == "credentials":
            assert isinstance(failed, _RefusedError), failed
            await self._provider.renew(failed.credentials)
        elif verdict.repair == "clock":
            self._offset_s = server_offset_s(failed.failure.date, time.time())
        if verdict.delay_s:
            await asyncio.sleep(verdict.delay_s)

    def _late(self, retrier: Retrier, failed: AttemptFailedError | None) -> GpufeedError:
        before = f" after {retrier.attempts} that failed, last with {failed}" if failed else ""
        trouble = self._account.outage.trouble
        return OriginUnavailableError(
            f"{retrier.what} did not end within origin.deadline_s = {self._deadline_s:g} s"
            f"{before}{'; ' + trouble if trouble else ''}; it may work later: check the network, "
            "the endpoint and the bucket's limits"
        )

    # --- one attempt --------------------------------------------------------------------------

    async def ask(self, request: Request, accept: Accept, ticket: Ticket) -> Answer:
        """Send one request, and receive its answer to where `accept` says.

        Raises:
            AttemptFailedError: no answer, or one that is an error.
            GpufeedError: nothing to sign with.
        """
        account, credentials = self._account, None

        async def make() -> Exchange:
            # Not before its turn: a signature is good for minutes, and so may credentials be.
            nonlocal credentials
            credentials = await self._provider.get()
            return self._signed(request, accept, credentials)

        told = False
        try:
            answer = await self._pool.exchange(self._found(request.bucket)[0], make, ticket)
            failure, sign = self._verdict(answer)
            told = True
            size_bytes = ticket.size_bytes if failure is None else 0
            account.answered(
                ticket.times, size_bytes, answer.head.status, sign=sign, probe=ticket.probe
            )
        except AttemptFailedError as error:
            told = True
            account.failed(error.failure, probe=ticket.probe)
            raise
        finally:
            if not told:
                account.given_up(probe=ticket.probe, begun=ticket.has_begun)
        if failure is not None:
            assert credentials is not None, "answered, but never signed"
            if credentials.is_anonymous and failure.status == 403:
                detail = f"{failure.detail} The request was unsigned: no credentials were found."
                failure = dataclasses.replace(failure, detail=detail)
            raise _RefusedError(failure, credentials)
        return answer

    def _signed(self, request: Request, accept: Accept, credentials: Credentials) -> Exchange:
        address = self._address
        if not address.region and not credentials.is_anonymous:
            raise ConfigError(
                f"the region cannot be told from the endpoint {address.text!r}: set "
                "origin.region, for example cn-hangzhou (signatures need it)"
            )
        query = encode_query(request.query)
        headers = signed_headers(
            method=request.method,
            resource=encode_path(request.bucket, request.key),
            query=query,
            headers={"host": self._found(request.bucket)[1], **request.headers},
            credentials=credentials,
            region=address.region,
            now_s=time.time() + self._offset_s,
        )
        path = request_path(request.bucket, request.key, in_host=not address.path_style)
        self._metrics.add("origin_requests_total")
        return Exchange(
            request_bytes(request.method, f"{path}?{query}" if query else path, headers),
            accept,
            bodiless=request.method == "HEAD",
            body_limit_bytes=request.body_limit_bytes,
        )

    def _found(self, bucket: str) -> tuple[Endpoint, str]:
        """Where a bucket is, and the ``Host`` to name there; of the last buckets asked for."""
        found = self._where.get(bucket)
        if found is None:
            if len(self._where) >= BUCKETS_MAX:
                self._where.clear()
            found = self._address.endpoint(bucket), self._address.host_header(bucket)
            self._where[bucket] = found
        return found

    def _verdict(self, answer: Answer) -> tuple[Failure | None, Sign | None]:
        """Whether the answer is an error, and what the limits learn from it."""
        status, delay_s = answer.head.status, asked_delay_s(answer.head)
        sign = Sign.HELD_BACK if delay_s else None
        failure = None
        if status not in (200, 206):
            failure = status_failure(answer, delay_s)
            sign = rule_of(status, failure.code).sign or sign
        if sign is not None:
            self._metrics.add("origin_throttled_total")
        return failure, sign


class _RefusedError(AttemptFailedError):
    """An error answer, and the credentials that its request was signed with."""

    def __init__(self, failure: Failure, credentials: Credentials) -> None:
        super().__init__(failure)
        self.credentials = credentials
