"""Alibaba Cloud OSS: head, list and ranged reads over our own HTTP engine.

Every part carries ``If-Match``, so parallel parts never mix two versions of an object, and
``x-oss-range-behavior: standard``, without which OSS answers an out-of-range request with the whole
object. Status, ``Content-Range``, etag and length are checked before a byte is taken. Attempts are
judged by `retry`; a retry asks for what is still missing, so no byte is written twice.

Lives on the engine's loop only.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import (
    ConfigError,
    GpufeedError,
    IntegrityError,
    ShardChangedError,
    UsageError,
)
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.origin.base import OnTarget
from gpufeed.cachefs.origin.credentials.chain import CredentialBook
from gpufeed.cachefs.origin.failure import AttemptFailedError, Failure
from gpufeed.cachefs.origin.http1 import (
    ERROR_BODY_LIMIT_BYTES,
    Answer,
    Exchange,
    Head,
    request_bytes,
)
from gpufeed.cachefs.origin.oss_address import Address, bucket_and_key, cautions
from gpufeed.cachefs.origin.oss_answer import (
    asked_delay_s,
    check_etag,
    check_range,
    crc_of,
    server_offset_s,
    status_failure,
)
from gpufeed.cachefs.origin.oss_sign import (
    Credentials,
    encode_path,
    encode_query,
    request_path,
    signed_headers,
)
from gpufeed.cachefs.origin.oss_xml import parse_listing
from gpufeed.cachefs.origin.pool import ConnectionPool
from gpufeed.cachefs.origin.retry import Again, Retrier
from gpufeed.cachefs.origin.sink import Sink
from gpufeed.cachefs.units import MIB

_LOG = logging.getLogger("gpufeed.origin")
LIST_PAGE_COUNT = 1000
LIST_BODY_BYTES_MAX = 8 * MIB


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body_limit_bytes: int = ERROR_BODY_LIMIT_BYTES


class OssOrigin:
    """Satisfies `Origin` for ``oss://bucket/key``.

    Raises:
        ConfigError: no endpoint, or the credentials asked for are not set.
    """

    def __init__(self, config: OriginConfig, metrics: Metrics, book: CredentialBook) -> None:
        self._config = config
        self._metrics = metrics
        self._address = Address.of(config)
        self._provider = book.provider(
            config, self._address.region, internal=self._address.internal
        )
        for caution in cautions(self._address, config):
            _LOG.warning("%s", caution)
            metrics.add("origin_warnings_total")
        self._pool = ConnectionPool(config)
        self._offset_s = 0.0
        # Jitter needs no secrecy, only that nodes differ.
        self._rng = random.Random()  # noqa: S311

    # --- Origin -------------------------------------------------------------------------------

    async def head(self, url: str) -> ObjectInfo:
        """See `Origin`."""
        bucket, key = bucket_and_key(url)
        if not key:
            raise UsageError(f"{url!r} names a bucket, not an object; a prefix ends with /")
        request = _Request("HEAD", bucket, key, {}, {})
        answer = await self._retried(f"HEAD {url}", lambda: self._answered(request))
        headers = answer.head.headers
        size = answer.head.content_length_bytes
        if size is None or not headers.get("etag"):
            raise IntegrityError(f"HEAD {url}: the answer has no length or no etag")
        return ObjectInfo(url, size, headers["etag"].strip('"'), crc_of(answer.head))

    async def list(self, prefix_url: str) -> AsyncIterator[ObjectInfo]:
        """See `Origin`."""
        bucket, prefix = bucket_and_key(prefix_url)
        token = ""
        while True:
            query = {
                "list-type": "2", "max-keys": str(LIST_PAGE_COUNT), "prefix": prefix,
                "encoding-type": "url",
            }  # fmt: skip
            if token:
                query["continuation-token"] = token
            request = _Request("GET", bucket, "", query, {}, LIST_BODY_BYTES_MAX)
            attempt = functools.partial(self._answered, request)
            answer = await self._retried(f"list {prefix_url}", attempt)
            page = parse_listing(answer.body)
            if page is None or answer.truncated or (token and page.next_token == token):
                raise IntegrityError(f"list {prefix_url}: the answer is no complete listing")
            for found in page.objects:
                yield ObjectInfo(f"oss://{bucket}/{found.key}", found.size_bytes, found.etag)
            if not page.next_token:
                return
            token = page.next_token

    async def read_into(
        self,
        info: ObjectInfo,
        begin_bytes: int,
        targets: Sequence[memoryview],
        on_target: OnTarget,
        *,
        demand: bool = True,
    ) -> int | None:
        """See `Origin`."""
        sink = Sink(targets, on_target)
        if sink.remaining_bytes == 0:
            sink.report()
            return None
        what = f"GET {info.url} bytes {begin_bytes}-{begin_bytes + sink.total_bytes - 1}"
        try:
            answer = await self._retried(what, lambda: self._read(info, begin_bytes, sink))
        except ShardChangedError:
            raise await self._changed(info) from None
        return crc_of(answer.head)

    async def close(self) -> None:
        """See `Origin`."""
        await self._provider.close()
        await self._pool.close()

    # --- one attempt --------------------------------------------------------------------------

    async def _read(self, info: ObjectInfo, begin_bytes: int, sink: Sink) -> Answer:
        bucket, key = bucket_and_key(info.url)
        first = begin_bytes + sink.position_bytes
        last = begin_bytes + sink.total_bytes - 1
        whole = first == 0 and last == info.size_bytes - 1
        headers = {"if-match": f'"{info.etag}"'}
        if not whole:
            headers["range"] = f"bytes={first}-{last}"
            headers["x-oss-range-behavior"] = "standard"
        before = sink.position_bytes

        def accept(head: Head) -> Sink | None:
            if head.status not in (200, 206):
                return None
            check_range(head, whole=whole, expected=f"bytes {first}-{last}/{info.size_bytes}")
            check_etag(head, info.etag)
            return sink

        try:
            return await self._exchange(_Request("GET", bucket, key, {}, headers), accept)
        finally:
            self._metrics.add("origin_bytes_total", sink.position_bytes - before)

    async def _answered(self, request: _Request) -> Answer:
        answer = await self._exchange(request, lambda _: None)
        self._metrics.add("origin_bytes_total", len(answer.body))
        return answer

    async def _exchange(self, request: _Request, accept: Callable[[Head], Sink | None]) -> Answer:
        """Sign, send, receive.

        Raises:
            AttemptFailedError: no answer, or one that is an error.
            GpufeedError: nothing to sign with.
        """
        address = self._address
        credentials = await self._provider.get()
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
            headers={"host": address.host_header(request.bucket), **request.headers},
            credentials=credentials,
            region=address.region,
            now_s=time.time() + self._offset_s,
        )
        path = request_path(request.bucket if address.path_style else "", request.key)
        exchange = Exchange(
            request_bytes(request.method, f"{path}?{query}" if query else path, headers),
            accept,
            bodiless=request.method == "HEAD",
            body_limit_bytes=request.body_limit_bytes,
        )
        self._metrics.add("origin_requests_total")
        self._metrics.add("origin_in_flight", 1)
        try:
            answer = await self._pool.exchange(address.endpoint(request.bucket), exchange)
        finally:
            self._metrics.add("origin_in_flight", -1)
        status, delay_s = answer.head.status, asked_delay_s(answer.head)
        if delay_s or status in (429, 503):
            self._metrics.add("origin_throttled_total")
        if status not in (200, 206):
            raise _RefusedError(status_failure(answer, delay_s), credentials)
        return answer

    # --- attempts -----------------------------------------------------------------------------

    async def _retried(
        self, what: str, attempt: Callable[[], Coroutine[None, None, Answer]]
    ) -> Answer:
        loop = asyncio.get_running_loop()
        retrier = Retrier(
            f"{what} at {self._address.text}",
            self._config.retries_max,
            loop.time() + self._config.deadline_s,
            self._rng,
        )
        while True:
            try:
                return await attempt()
            except AttemptFailedError as error:
                failed = error
            verdict = retrier.judge(failed.failure, loop.time())
            if isinstance(verdict, GpufeedError):
                raise verdict
            await self._repair(verdict, failed)

    async def _repair(self, verdict: Again, failed: AttemptFailedError) -> None:
        self._metrics.add("origin_retries_total")
        failure = failed.failure
        if verdict.repair == "credentials":
            assert isinstance(failed, _RefusedError), failed
            await self._provider.renew(failed.credentials)
        elif verdict.repair == "clock":
            self._offset_s = server_offset_s(failure.date, time.time())
        if verdict.delay_s:
            await asyncio.sleep(verdict.delay_s)

    async def _changed(self, info: ObjectInfo) -> ShardChangedError:
        try:
            now = f"etag {(await self.head(info.url)).etag}"
        except GpufeedError as error:
            now = f"gone ({error})"
        return ShardChangedError(
            f"{info.url} was overwritten: the listing had etag {info.etag}, now it is {now}; open "
            "the dataset again to read the new version"
        )


class _RefusedError(AttemptFailedError):
    """An error answer, and the credentials that its request was signed with."""

    def __init__(self, failure: Failure, credentials: Credentials) -> None:
        super().__init__(failure)
        self.credentials = credentials
