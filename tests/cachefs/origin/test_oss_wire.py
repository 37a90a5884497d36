"""OSS reads against a server that says what the test wrote: right, wrong, half and nothing."""

from __future__ import annotations

import asyncio
import base64
import email.utils
import re
import time

import pytest
from scripted_server import Do, error, partial, reply, scripted

from gpufeed.cachefs.errors import (
    AccessDeniedError,
    IntegrityError,
    NotFoundError,
    OriginUnavailableError,
    ShardChangedError,
)
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.testing.origin_contract import Reading, content

DATA = content(100_000)
INFO = ObjectInfo("oss://bucket/key", len(DATA), "E1")


def header(request: str, name: str) -> str:
    found = re.search(rf"^{name}: (.*?)\r$", request, re.MULTILINE | re.IGNORECASE)
    return found.group(1) if found else ""


async def test_a_whole_object_is_a_plain_conditional_get(start_engine):
    async with scripted(reply(200, DATA, x_oss_hash_crc64ecma="17", etag='"E1"')) as server:
        reading = Reading(60_000, 40_000)
        assert await reading.run(start_engine(server.endpoint), INFO, 0) == 17
    request = server.requests[0]
    assert request.startswith("GET /bucket/key HTTP/1.1\r\n")
    assert header(request, "if-match") == '"E1"'
    assert not header(request, "range")
    assert header(request, "host") == f"127.0.0.1:{server.port}"
    assert "Credential=k/" in header(request, "authorization")
    assert reading.memory == DATA
    assert reading.reported == [0, 1]


async def test_a_part_asks_for_its_range_in_the_standard_way(start_engine, metrics):
    async with scripted(partial(DATA, 1000, 5000)) as server:
        reading = Reading(1000, 3000)
        assert await reading.run(start_engine(server.endpoint), INFO, 1000) is None
    assert header(server.requests[0], "range") == "bytes=1000-4999"
    assert header(server.requests[0], "x-oss-range-behavior") == "standard"
    assert header(server.requests[0], "if-match") == '"E1"'
    assert reading.memory == DATA[1000:5000]
    assert metrics.get("origin_requests_total") == 1
    assert metrics.get("origin_bytes_total") == 4000
    assert metrics.get("origin_in_flight") == 0


@pytest.mark.parametrize(
    "wrong",
    [
        reply(200, DATA),
        partial(DATA, 0, 4000, content_range=f"bytes 0-3999/{len(DATA)}"),
        partial(DATA, 1000, 5000, content_range="bytes 1000-4999/77"),
        partial(DATA, 1000, 5000, content_range=""),
        partial(DATA, 1000, 4000, content_range=f"bytes 1000-4999/{len(DATA)}"),
        partial(DATA, 1000, 5000, content_length="", transfer_encoding="chunked"),
        [partial(DATA, 1000, 5000, content_length=""), Do.CLOSE],
    ],
    ids=["whole", "other-range", "other-size", "no-range", "short", "chunked", "no-length"],
)
async def test_an_answer_that_does_not_fit_is_refused_before_a_byte_is_taken(
    start_engine, metrics, wrong
):
    async with scripted(wrong, wrong, wrong) as server:
        reading = Reading(1000, 3000)
        with pytest.raises(IntegrityError, match="3 times"):
            await reading.run(start_engine(server.endpoint), INFO, 1000)
    assert reading.reported == []
    assert reading.memory == bytes(4000)
    assert metrics.get("origin_retries_total") == 2


async def test_a_right_answer_after_a_wrong_one_is_taken(start_engine):
    async with scripted(reply(200, DATA), partial(DATA, 5, 10)) as server:
        reading = Reading(5)
        await reading.run(start_engine(server.endpoint), INFO, 5)
    assert reading.memory == DATA[5:10]


@pytest.mark.parametrize("end", [Do.CLOSE, Do.RESET, Do.HANG])
async def test_a_body_cut_short_is_resumed_where_it_ended(start_engine, metrics, end):
    cut = partial(DATA, 0, 50_000)[:-20_000]
    async with scripted([cut, end], partial(DATA, 30_000, 50_000)) as server:
        engine = start_engine(server.endpoint, stall_timeout_s=0.3)
        reading = Reading(20_000, 30_000)
        running = asyncio.create_task(reading.run(engine, INFO, 0))
        await running
    resumed_at = int(header(server.requests[1], "range")[len("bytes=") :].split("-")[0])
    if end is not Do.RESET:  # a reset may throw away what was on its way
        assert resumed_at == 30_000
        assert reading.memory == DATA[:50_000]
        assert metrics.get("origin_bytes_total") == 50_000
    assert reading.reported == [0, 1]
    assert len(server.requests) == 2


async def test_a_reported_target_is_never_written_again(start_engine):
    cut = partial(DATA, 0, 50_000)[:-25_000]
    async with scripted([cut, Do.HANG], partial(DATA, 25_000, 50_000)) as server:
        engine = start_engine(server.endpoint, stall_timeout_s=0.5)
        reading = Reading(20_000, 30_000)

        def spoil(i: int) -> None:
            reading.targets[i][:] = bytes(len(reading.targets[i]))

        await engine.read_into(INFO, 0, reading.targets, spoil)
    assert reading.memory == bytes(50_000)


async def test_a_server_that_never_answers_is_named_in_the_error(start_engine):
    async with scripted([Do.HANG], [Do.HANG], [Do.HANG]) as server:
        engine = start_engine(server.endpoint, stall_timeout_s=0.05)
        with pytest.raises(OriginUnavailableError, match=r"3 times.*no byte for 0.05 s") as caught:
            await engine.head(INFO.url)
    assert server.endpoint in str(caught.value)


async def test_an_unreachable_server_is_named_in_the_error(start_engine):
    async with scripted() as server:
        endpoint = server.endpoint
    with pytest.raises(OriginUnavailableError, match=r"3 times.*Connection refused") as caught:
        await start_engine(endpoint).head(INFO.url)
    assert endpoint in str(caught.value)


async def test_a_connection_is_kept_and_used_again(start_engine):
    async with scripted(*[partial(DATA, 0, 10)] * 3) as server:
        engine = start_engine(server.endpoint)
        for _ in range(3):
            await Reading(10).run(engine, INFO, 0)
    assert server.connections == 1


async def test_a_connection_whose_end_was_announced_is_not_used_again(start_engine, metrics):
    async with scripted(*[partial(DATA, 0, 10, connection="close")] * 2) as server:
        engine = start_engine(server.endpoint)
        for _ in range(2):
            await Reading(10).run(engine, INFO, 0)
    assert server.connections == 2
    assert metrics.get("origin_retries_total") == 0


async def test_a_connection_with_bytes_too_many_is_not_used_again(start_engine):
    async with scripted(partial(DATA, 0, 10) + b"more", partial(DATA, 0, 10)) as server:
        engine = start_engine(server.endpoint)
        for _ in range(2):
            await Reading(10).run(engine, INFO, 0)
    assert server.connections == 2


async def test_a_kept_connection_found_closed_costs_no_retry(start_engine, metrics):
    async with scripted(partial(DATA, 0, 10), [Do.CLOSE], partial(DATA, 0, 10)) as server:
        engine = start_engine(server.endpoint, retries_max=0)
        for _ in range(2):
            await Reading(10).run(engine, INFO, 0)
    assert server.connections == 2
    assert metrics.get("origin_retries_total") == 0


async def test_a_fresh_connection_found_closed_does(start_engine, metrics):
    async with scripted([Do.CLOSE], partial(DATA, 0, 10)) as server:
        await Reading(10).run(start_engine(server.endpoint), INFO, 0)
    assert metrics.get("origin_retries_total") == 1


async def test_a_head_in_pieces_and_an_interim_answer_are_understood(start_engine):
    whole = partial(DATA, 0, 9)
    pieces = [whole[:5], whole[5:40], whole[40:-4], whole[-4:]]
    async with scripted([b"HTTP/1.1 100 Continue\r\n\r\n", *pieces]) as server:
        reading = Reading(9)
        await reading.run(start_engine(server.endpoint), INFO, 0)
    assert reading.memory == DATA[:9]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (reply(200, DATA, x_junk="j" * 20_000), "head of more than 16384 bytes"),
        (b"220 mail.example ESMTP\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef", "not HTTP"),
    ],
    ids=["oversize", "no-http", "two-lengths"],
)
async def test_what_is_not_http_is_unavailable(start_engine, bad, named):
    async with scripted(bad, bad, bad) as server:
        with pytest.raises(OriginUnavailableError, match=named):
            await start_engine(server.endpoint).head(INFO.url)


async def test_an_error_in_chunks_is_read(start_engine):
    body = b"<Error><Code>AccessDenied</Code><Message>not you</Message></Error>"
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    answer = reply(403, content_length="", transfer_encoding="chunked") + chunks
    async with scripted(answer, partial(DATA, 0, 10)) as server:
        engine = start_engine(server.endpoint)
        with pytest.raises(AccessDeniedError, match=r"not you"):
            await Reading(10).run(engine, INFO, 0)
        await Reading(10).run(engine, INFO, 0)
    assert server.connections == 1


async def test_an_endless_error_is_cut(start_engine):
    async with scripted(reply(404, b"x" * 1_000_000)) as server:
        with pytest.raises(NotFoundError):
            await Reading(10).run(start_engine(server.endpoint), INFO, 0)


async def test_an_error_of_a_head_request_comes_in_a_header(start_engine):
    told = base64.b64encode(
        b"<Error><Code>SignatureDoesNotMatch</Code><Message>m</Message></Error>"
    ).decode()
    async with scripted(reply(403, x_oss_err=told)) as server:
        with pytest.raises(AccessDeniedError, match=r"origin.secret belongs to origin.key"):
            await start_engine(server.endpoint).head(INFO.url)


async def test_a_throttled_request_is_repeated_and_counted(start_engine, metrics):
    slow = error(503, "TotalQpsLimitExceeded")
    async with scripted(slow, partial(DATA, 0, 10, x_oss_qos_delay_time="20")) as server:
        await Reading(10).run(start_engine(server.endpoint), INFO, 0)
    assert metrics.get("origin_retries_total") == 1
    assert metrics.get("origin_throttled_total") == 2


async def test_a_wrong_clock_is_corrected_once(start_engine):
    ahead_s = time.time() + 7200
    date = email.utils.formatdate(ahead_s, usegmt=True)
    skewed = error(403, "RequestTimeTooSkewed", date=date)
    async with scripted(skewed, partial(DATA, 0, 9), skewed, skewed) as server:
        engine = start_engine(server.endpoint)
        await Reading(9).run(engine, INFO, 0)
        with pytest.raises(AccessDeniedError, match="clock"):
            await Reading(9).run(engine, INFO, 0)
    want = time.strftime("%Y%m%dT%H", time.gmtime(ahead_s))
    assert header(server.requests[1], "x-oss-date")[:11] in (
        want,
        time.strftime("%Y%m%dT%H", time.gmtime(ahead_s + 5)),
    )


@pytest.mark.parametrize(
    "first", [error(412, "PreconditionFailed"), partial(DATA, 0, 9, etag='"E2"')]
)
async def test_an_overwritten_object_is_told_with_both_etags(start_engine, first):
    async with scripted(first, reply(200, content_length="7", etag='"E2"')) as server:
        reading = Reading(9)
        with pytest.raises(ShardChangedError, match=r"etag E1.*etag E2"):
            await reading.run(start_engine(server.endpoint), INFO, 0)
    assert reading.reported == []


async def test_a_listing_that_goes_on_nowhere_is_refused(start_engine):
    page = b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"
    async with scripted(reply(200, page)) as server:
        with pytest.raises(IntegrityError, match="no complete listing"):
            await start_engine(server.endpoint).list("oss://bucket/p/")


async def test_a_cancelled_read_ends_when_its_connection_is_gone(start_engine, metrics):
    async with scripted([partial(DATA, 0, 50_000)[:-10_000], Do.HANG]) as server:
        engine = start_engine(server.endpoint)
        reading = Reading(20_000, 30_000)
        running = asyncio.create_task(reading.run(engine, INFO, 0))
        await server.hanging.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert metrics.get("origin_in_flight") == 0
        await server.gone.wait()
    assert metrics.get("origin_retries_total") == 0


async def test_more_reads_than_connections_wait_their_turn(start_engine):
    async with scripted(*[partial(DATA, 0, 10)] * 20) as server:
        engine = start_engine(server.endpoint, connections_max=2)
        await asyncio.gather(*(Reading(10).run(engine, INFO, 0) for _ in range(20)))
    assert server.connections <= 2


async def test_without_a_key_requests_go_unsigned(start_engine):
    async with scripted(partial(DATA, 0, 10)) as server:
        await Reading(10).run(start_engine(server.endpoint, key="", secret=""), INFO, 0)
    assert not header(server.requests[0], "authorization")


async def test_a_token_is_sent_and_signed(start_engine):
    async with scripted(partial(DATA, 0, 10)) as server:
        engine = start_engine(server.endpoint)
        reading = Reading(10)
        options = {"key": "k2", "secret": "s2", "token": "t2"}
        await engine.read_into(INFO, 0, reading.targets, reading.reported.append, options)
    assert header(server.requests[0], "x-oss-security-token") == "t2"
    assert "Credential=k2/" in header(server.requests[0], "authorization")


async def test_after_a_cancelled_read_its_memory_belongs_to_the_caller(start_engine):
    size = 32 * 1024 * 1024
    head = reply(200, content_length=str(size))
    async with scripted([head, *[bytes([1]) * 65536] * (size // 65536)]) as server:
        engine = start_engine(server.endpoint)
        reading = Reading(65536, size - 65536)
        begun = asyncio.Event()
        info = ObjectInfo(INFO.url, size, "E1")
        running = asyncio.create_task(
            engine.read_into(info, 0, reading.targets, lambda _: begun.set())
        )
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        reading.memory[:] = bytes(size)
        # Another read proves that the engine's loop has gone on since.
        server.script = [reply(200, content_length="5", etag='"E2"')]
        await engine.head(INFO.url)
    assert not any(reading.memory)
