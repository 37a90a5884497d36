"""The pure parts of the OSS origin: addresses, signatures, XML, verdicts, credentials, rates."""

from __future__ import annotations

import random

import pytest

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import (
    AccessDeniedError,
    ConfigError,
    IntegrityError,
    NotFoundError,
    OperatorError,
    OriginUnavailableError,
    ShardChangedError,
    UsageError,
)
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin import retry
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.origin.exchange import request_bytes
from gpufeed.cachefs.origin.failure import Failure, FailureKind
from gpufeed.cachefs.origin.oss_address import Address, bucket_and_key, cautions
from gpufeed.cachefs.origin.oss_sign import (
    Credentials,
    encode_path,
    encode_query,
    request_path,
    signed_headers,
)
from gpufeed.cachefs.origin.oss_xml import parse_error, parse_listing
from gpufeed.cachefs.origin.rate import TokenBucket
from gpufeed.cachefs.origin.retry import Again, Retrier

INTERNAL = "oss-cn-hangzhou-internal.aliyuncs.com"


@pytest.mark.parametrize(
    ("endpoint", "host", "port", "tls", "region"),
    [
        (INTERNAL, f"b1t.{INTERNAL}", 80, False, "cn-hangzhou"),
        (f"https://{INTERNAL}", f"b1t.{INTERNAL}", 443, True, "cn-hangzhou"),
        ("oss-us-west-1.aliyuncs.com", "b1t.oss-us-west-1.aliyuncs.com", 443, True, "us-west-1"),
        ("http://oss-us-west-1.aliyuncs.com/", "b1t.oss-us-west-1.aliyuncs.com", 80, False,
         "us-west-1"),
        ("cn-beijing.oss.aliyuncs.com", "b1t.cn-beijing.oss.aliyuncs.com", 443, True,
         "cn-beijing"),
        ("cn-beijing-h-internal.oss-data-acc.aliyuncs.com",
         "b1t.cn-beijing-h-internal.oss-data-acc.aliyuncs.com", 80, False, ""),
        ("127.0.0.1:9000", "127.0.0.1", 9000, False, ""),
        ("https://127.0.0.1", "127.0.0.1", 443, True, ""),
        ("localhost:9000", "localhost", 9000, False, ""),
        ("[::1]:9000", "::1", 9000, False, ""),
        ("data.example.com", "b1t.data.example.com", 443, True, ""),
    ],
)  # fmt: skip
def test_an_endpoint_tells_where_to_go(endpoint, host, port, tls, region):
    address = Address.of(OriginConfig(endpoint=endpoint))
    found = address.endpoint("b1t")
    assert (found.host, found.port, found.tls, address.region) == (host, port, tls, region)


def test_the_host_header_names_the_port_only_where_it_must():
    assert Address.of(OriginConfig(endpoint=INTERNAL)).host_header("b1t") == f"b1t.{INTERNAL}"
    assert Address.of(OriginConfig(endpoint="[::1]:9000")).host_header("b1t") == "[::1]:9000"
    assert Address.of(OriginConfig(endpoint="h.example:81")).host_header("b1t") == (
        "b1t.h.example:81"
    )


@pytest.mark.parametrize("bad", ["ftp://x", "host:99999", "http://", "host/path", "[::1", "https:"])
def test_an_endpoint_that_is_no_address_is_refused(bad):
    with pytest.raises(ConfigError, match="no address"):
        Address.of(OriginConfig(endpoint=bad))


@pytest.mark.parametrize("bad", ["oss://B/k", "oss://a/k", "oss://b_c/k", "oss://bu cket/k"])
def test_a_bucket_that_cannot_be_is_refused(bad):
    with pytest.raises(UsageError, match="no bucket's name"):
        bucket_and_key(bad)


@pytest.mark.parametrize("how", ["configured", "environment"])
async def test_a_key_without_a_region_is_refused_before_anything_is_sent(monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("OSS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "s")
    pair = {"key": "k", "secret": "s"} if how == "configured" else {}
    metrics = Metrics()
    engine = OriginEngine(OriginConfig(endpoint="127.0.0.1:1", **pair), metrics)
    engine.start()
    try:
        with pytest.raises(ConfigError, match=r"origin\.region"):
            await engine.head("oss://bucket/key")
    finally:
        await engine.close()
    assert metrics.get("origin_requests_total") == 0


@pytest.mark.parametrize(
    ("endpoint", "region", "told"),
    [
        (INTERNAL, "", []),
        (INTERNAL, "cn-hangzhou", []),
        ("oss-cn-hangzhou.aliyuncs.com", "", ["oss-cn-hangzhou-internal.aliyuncs.com"]),
        ("https://s3.oss-us-west-1.aliyuncs.com", "", ["s3.oss-us-west-1-internal.aliyuncs.com"]),
        (INTERNAL, "cn-beijing", ["origin.region is cn-beijing"]),
        ("oss-cn-hangzhou.aliyuncs.com", "cn-beijing", ["-internal", "is in cn-hangzhou, which"]),
        ("127.0.0.1:9000", "cn-beijing", []),
        ("oss-accelerate.aliyuncs.com", "cn-beijing", []),
        ("cn-beijing.oss.aliyuncs.com", "", []),
    ],
)
def test_what_costs_money_or_is_contradictory_is_cautioned_about(endpoint, region, told):
    config = OriginConfig(endpoint=endpoint, region=region)
    found = cautions(Address.of(config), config)
    assert len(found) == len(told)
    for text, caution in zip(told, found, strict=True):
        assert text in caution


def test_the_endpoints_region_is_the_one_that_is_signed_for():
    assert Address.of(OriginConfig(endpoint=INTERNAL, region="cn-beijing")).region == "cn-hangzhou"
    assert Address.of(OriginConfig(endpoint="h.example", region="cn-beijing")).region == (
        "cn-beijing"
    )


def test_a_signature_equals_the_vendors_own():
    # The vendor SDK's published vector, headers that it signs besides ours left out by name.
    headers = signed_headers(
        method="PUT",
        resource=encode_path("bucket", "1234+-/123/1.txt"),
        query=encode_query(
            {
                "param1": "value1", "+param1": "value3", "|param1": "value4",
                "+param2": "", "|param2": "", "param2": "",
            }
        ),
        headers={"x-oss-head1": "value", "abc": "value", "zabc": "value", "xyz": "value",
                 "content-type": "text/plain"},
        credentials=Credentials("ak", "sk"),
        region="cn-hangzhou",
        now_s=1702743657,
    )  # fmt: skip
    assert headers["x-oss-date"] == "20231216T162057Z"
    assert headers["authorization"] == (
        "OSS4-HMAC-SHA256 Credential=ak/20231216/cn-hangzhou/oss/aliyun_v4_request,"
        "Signature=e21d18daa82167720f9b1047ae7e7f1ce7cb77a31e8203a7d5f4624fa0284afe"
    )


def test_paths_are_encoded_as_they_are_signed():
    assert request_path("bucket", "a b/é+%41~", in_host=True) == "/a%20b/%C3%A9%2B%2541~"
    assert request_path("bucket", "a b", in_host=False) == "/bucket/a%20b"
    assert encode_path("bucket", "a b") == "/bucket/a%20b"
    assert encode_path("bucket", "") == "/bucket/"


def test_a_header_cannot_smuggle_another():
    with pytest.raises(UsageError, match="cannot be sent"):
        request_bytes("GET", "/", {"if-match": "a\r\nx: y"})


def test_an_error_body_is_read_and_what_is_none_is_empty():
    body = parse_error(b"<Error><Code>A</Code><Message>m</Message><EC>e</EC></Error>")
    assert (body.code, body.message, body.ec, body.request_id) == ("A", "m", "e", "")
    assert parse_error(b"<html>").code == ""
    assert parse_error(b"").code == ""


@pytest.mark.parametrize(
    "bad",
    [b"", b"<html/>", b"<ListBucketResult><Contents><Size>x</Size></Contents></ListBucketResult>"],
)
def test_a_listing_that_is_none_is_none(bad):
    assert parse_listing(bad) is None


def test_a_listing_is_decoded():
    page = parse_listing(
        b"<ListBucketResult><EncodingType>url</EncodingType><IsTruncated>true</IsTruncated>"
        b"<NextContinuationToken>a%2Fb</NextContinuationToken>"
        b'<Contents><Key>d%2B/e%20</Key><Size>7</Size><ETag>"E"</ETag></Contents>'
        b"</ListBucketResult>"
    )
    assert page is not None
    assert page.next_token == "a/b"
    assert [(o.key, o.size_bytes, o.etag) for o in page.objects] == [("d+/e ", 7, "E")]


def judge(failure: Failure, *, attempts: int = 0, now_s: float = 0.0):
    retrier = Retrier("GET x", 3, random.Random(1), 100.0, attempts=attempts)
    return retrier.judge(failure, now_s)


def status(number: int, code: str = "", wait_s: float = 0.0) -> Failure:
    return Failure(FailureKind.STATUS, "told", status=number, code=code, wait_s=wait_s)


@pytest.mark.parametrize(
    "failure",
    [
        Failure(FailureKind.CONNECT, ""),
        Failure(FailureKind.LOST, ""),
        Failure(FailureKind.STALL, ""),
        Failure(FailureKind.MALFORMED, ""),
        Failure(FailureKind.WRONG_ANSWER, ""),
        status(500, "InternalError"),
        status(502),
        status(503, "TotalQpsLimitExceeded"),
        status(429),
        status(400, "RequestTimeout"),
    ],
    ids=str,
)
def test_what_may_pass_is_tried_again_until_the_retries_or_the_time_are_spent(failure):
    assert isinstance(judge(failure), Again)
    spent = judge(failure, attempts=3)
    late = judge(failure, now_s=100.0)
    wrong = failure.kind is FailureKind.WRONG_ANSWER
    for verdict in (spent, late):
        assert isinstance(verdict, IntegrityError if wrong else OriginUnavailableError)
    assert "4 times" in str(spent)


@pytest.mark.parametrize(
    ("failure", "error", "text"),
    [
        (status(404, "NoSuchKey"), NotFoundError, "the object does not exist"),
        (status(404, "NoSuchBucket"), NotFoundError, "the bucket does not exist"),
        (status(403, "AccessDenied"), AccessDeniedError, "bucket's policy"),
        (status(403, "InvalidAccessKeyId"), AccessDeniedError, "check origin.key"),
        (status(403, "SignatureDoesNotMatch"), AccessDeniedError, "belongs to origin.key"),
        (status(412, "PreconditionFailed"), ShardChangedError, "told"),
        (status(416, "InvalidRange"), ShardChangedError, "InvalidRange"),
        (status(301), OperatorError, "sends us elsewhere"),
        (Failure(FailureKind.CERTIFICATE, "expired"), OperatorError, "origin.ca_file"),
    ],
)
def test_what_cannot_pass_is_raised_at_once(failure, error, text):
    verdict = judge(failure)
    assert type(verdict) is error
    assert text in str(verdict)


@pytest.mark.parametrize(
    ("code", "repair"),
    [("SecurityTokenExpired", "credentials"), ("RequestTimeTooSkewed", "clock")],
)
def test_credentials_and_clock_are_repaired_once(code, repair):
    retrier = Retrier("GET x", 0, random.Random(1), 100.0)
    assert retrier.judge(status(403, code), 0.0) == Again(0.0, repair)
    assert isinstance(retrier.judge(status(403, code), 0.0), AccessDeniedError)


def test_back_off_doubles_with_jitter_up_to_a_cap_and_obeys_the_service(monkeypatch):
    monkeypatch.setattr(retry, "BASE_S", 0.1)
    retrier = Retrier("GET x", 100, random.Random(1), 1e9)
    delays = [retrier.judge(status(503), 0.0).delay_s for _ in range(10)]
    for i, delay in enumerate(delays):
        full = min(retry.CAP_S, 0.1 * 2**i)
        assert full / 2 <= delay <= full
    assert retrier.judge(status(503, wait_s=9.0), 0.0).delay_s == 9.0
    assert retrier.judge(status(503, wait_s=9000.0), 0.0).delay_s == retry.WAIT_MAX_S


def test_secrets_are_not_shown():
    assert "hush" not in repr(Credentials("k", "hush", "hush"))


def test_requests_are_spaced_after_a_burst():
    bucket = TokenBucket(100.0, 0.0)
    waits = [bucket.reserve(0.0) for _ in range(15)]
    assert waits[:10] == [0.0] * 10
    assert waits[10:] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
    assert bucket.reserve(10.0) == 0.0
