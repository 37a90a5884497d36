"""Alibaba Cloud OSS: head, list and ranged reads over our own HTTP engine.

Every part carries ``If-Match``, so parallel parts never mix two versions of an object, and
``x-oss-range-behavior: standard``, without which OSS answers an out-of-range request with the whole
object. Status, ``Content-Range``, etag and length are checked before a byte is taken. Attempts are
repeated by `oss_client`; one that comes after another asks for what is still missing, so no byte is
written twice. A part that somebody waits for may be hedged (`race`).

Lives on one engine thread's loop.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import GpufeedError, IntegrityError, ShardChangedError, UsageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo, folder_info
from gpufeed.cachefs.origin.base import OnTarget
from gpufeed.cachefs.origin.credentials.chain import CredentialBook
from gpufeed.cachefs.origin.exchange import Answer, Head
from gpufeed.cachefs.origin.failure import AttemptFailedError
from gpufeed.cachefs.origin.oss_address import Address, bucket_and_key, cautions
from gpufeed.cachefs.origin.oss_answer import check_etag, check_range, crc_of
from gpufeed.cachefs.origin.oss_client import OssClient, Request
from gpufeed.cachefs.origin.oss_xml import parse_listing
from gpufeed.cachefs.origin.pool import ConnectionPool, Ticket
from gpufeed.cachefs.origin.race import Race, RaceTools
from gpufeed.cachefs.origin.sink import Sink
from gpufeed.cachefs.origin.spare import Spares
from gpufeed.cachefs.units import MIB

LIST_PAGE_COUNT = 1000
LIST_BODY_BYTES_MAX = 8 * MIB


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an object, and where it goes."""

    info: ObjectInfo
    begin_bytes: int
    sink: Sink
    bucket: str
    key: str


class OssOrigin:
    """Satisfies `Origin` for ``oss://bucket/key``.

    Args:
        config: where, and as whom.
        metrics: for counters.
        book: who to sign as.
        pool: this thread's connections there.
        spares: memory for hedges; None: no hedges.

    Raises:
        ConfigError: no endpoint, or the credentials asked for are not set.
    """

    def __init__(
        self,
        config: OriginConfig,
        metrics: Metrics,
        book: CredentialBook,
        pool: ConnectionPool,
        spares: Spares | None = None,
    ) -> None:
        self._metrics = metrics
        address = Address.of(config)
        self._client = OssClient(config, address, metrics, book, pool)
        for caution in cautions(address, config):
            pool.account.caution(caution)
        self._races = RaceTools(pool.account, spares, metrics) if spares else None

    # --- Origin -------------------------------------------------------------------------------

    async def head(self, url: str) -> ObjectInfo:
        """See `Origin`."""
        bucket, key = bucket_and_key(url)
        if not key:
            raise UsageError(f"{url!r} names a bucket, not an object; a prefix ends with /")
        attempt = functools.partial(self._collect, Request("HEAD", bucket, key, {}, {}))
        answer = await self._client.call(f"HEAD {url}", attempt)
        headers = answer.head.headers
        size = answer.head.content_length_bytes
        if size is None or not headers.get("etag"):
            raise IntegrityError(f"HEAD {url}: the answer has no length or no etag")
        return ObjectInfo(url, size, headers["etag"].strip('"'), crc_of(answer.head))

    async def list(self, prefix_url: str) -> AsyncIterator[ObjectInfo]:
        """See `Origin`."""
        async for info in self._list(prefix_url, delimiter=""):
            yield info

    async def list_folder(self, folder_url: str) -> AsyncIterator[ObjectInfo]:
        """See `Origin`."""
        async for info in self._list(folder_url, delimiter="/"):
            # A key that ends with the delimiter is what consoles leave for an empty folder.
            yield folder_info(info.url) if info.url.endswith("/") else info

    async def _list(self, prefix_url: str, *, delimiter: str) -> AsyncIterator[ObjectInfo]:
        bucket, prefix = bucket_and_key(prefix_url)
        token = ""
        while True:
            query = {
                "list-type": "2", "max-keys": str(LIST_PAGE_COUNT), "prefix": prefix,
                "encoding-type": "url",
            }  # fmt: skip
            if delimiter:
                query["delimiter"] = delimiter
            if token:
                query["continuation-token"] = token
            request = Request("GET", bucket, "", query, {}, LIST_BODY_BYTES_MAX)
            attempt = functools.partial(self._collect, request)
            answer = await self._client.call(f"list {prefix_url}", attempt)
            page = parse_listing(answer.body)
            if page is None or answer.truncated or (token and page.next_token == token):
                raise IntegrityError(f"list {prefix_url}: the answer is no complete listing")
            for found in page.objects:
                yield ObjectInfo(f"oss://{bucket}/{found.key}", found.size_bytes, found.etag)
            for folder in page.folders:
                yield folder_info(f"oss://{bucket}/{folder}")
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
        part = _Part(info, begin_bytes, sink, *bucket_and_key(info.url))
        attempt = functools.partial(self._read, part)
        try:
            answer = await self._client.call(what, attempt, demand=demand)
        except ShardChangedError as error:
            raise await self._changed(info, error) from None
        return crc_of(answer.head)

    async def close(self) -> None:
        """See `Origin`."""
        await self._client.close()

    # --- one attempt --------------------------------------------------------------------------

    async def _collect(self, request: Request, ticket: Ticket) -> Answer:
        answer = await self._client.ask(request, lambda _: None, ticket)
        self._metrics.add("origin_bytes_total", len(answer.body))
        return answer

    async def _read(self, part: _Part, ticket: Ticket) -> Answer:
        """What is still missing of the part; hedged, if somebody waits for it."""
        sink = part.sink
        ticket.size_bytes = sink.remaining_bytes
        if self._races is None or not ticket.demand:
            return await self._receive(part, sink.position_bytes, sink, ticket)
        race = Race(self._races, sink, ticket, functools.partial(self._receive, part))
        try:
            return await self._receive(part, sink.position_bytes, sink, ticket)
        except AttemptFailedError as error:
            return await race.rescue(error)
        finally:
            await race.close()

    async def _receive(self, part: _Part, at_bytes: int, sink: Sink, ticket: Ticket) -> Answer:
        """Everything of the part from its byte number `at_bytes` on, into `sink`."""
        info = part.info
        first = part.begin_bytes + at_bytes
        last = part.begin_bytes + part.sink.total_bytes - 1
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

        request = Request("GET", part.bucket, part.key, {}, headers)
        try:
            return await self._client.ask(request, accept, ticket)
        finally:
            self._metrics.add("origin_bytes_total", sink.position_bytes - before)

    async def _changed(self, info: ObjectInfo, error: ShardChangedError) -> ShardChangedError:
        """What the object is now, beside what it was taken for."""
        try:
            etag = (await self.head(info.url)).etag
            now = f"etag {etag}"
        except GpufeedError as gone:
            etag, now = "", f"gone ({gone})"
        if etag == info.etag:
            return error
        return ShardChangedError(
            f"{info.url} was overwritten: the listing had etag {info.etag}, now it is {now}; open "
            "the dataset again to read the new version"
        )
