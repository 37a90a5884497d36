"""The verifier against the vendor's signers, which sign here without any network."""

from __future__ import annotations

import datetime
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufeed.cachefs.testing.standin.config import AccessKey
from gpufeed.cachefs.testing.standin.replies import OssError, Request
from gpufeed.cachefs.testing.standin.signature import Verifier

oss = pytest.importorskip("alibabacloud_oss_v2")
signer_v1 = pytest.importorskip("alibabacloud_oss_v2.signer.v1")
signer_v4 = pytest.importorskip("alibabacloud_oss_v2.signer.v4")

REGION = "cn-hangzhou"
NOW_S = 1_800_000_000.0
PLAIN = AccessKey("ak", "secret")
STS = AccessKey("STS.ak", "other", "token/+=", NOW_S + 100)
SIGNERS = {"v1": signer_v1.SignerV1, "v4": signer_v4.SignerV4}
VERIFIER = Verifier([PLAIN, STS], REGION)


def signed(
    how: str,
    key: AccessKey = PLAIN,
    *,
    secret: str = "",
    name: str = "dir/a b+c 数.bin",
    query: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
    at_s: float = NOW_S,
    region: str = REGION,
    presigned: bool = False,
) -> Request:
    """A GET as the vendor's SDK signs it, and as a server would address it."""
    encoded = "&".join(f"{quote(n, safe='')}={quote(v, safe='')}" for n, v in (query or {}).items())
    request = oss.types.HttpRequest("GET", f"http://b.host/{quote(name)}?{encoded}")
    request.headers.update(headers or {})
    context = oss.types.SigningContext(
        product="oss", region=region, bucket="b", key=name, request=request,
        credentials=oss.credentials.Credentials(key.key, secret or key.secret, key.token or None),
        signing_time=datetime.datetime.fromtimestamp(at_s, datetime.UTC),
    )  # fmt: skip
    context.auth_method_query = presigned
    if presigned:
        context.expiration_time = datetime.datetime.fromtimestamp(at_s + 600, datetime.UTC)
    SIGNERS[how]().sign(context)
    arguments = parse_qsl(urlsplit(request.url).query, keep_blank_values=True)
    lowered = {n.lower(): v for n, v in request.headers.items()}
    return Request("GET", "b", name, tuple(arguments), lowered)


def refusal(request: Request, now_s: float = NOW_S, **options: bool) -> tuple[str, str]:
    with pytest.raises(OssError) as refused:
        VERIFIER.check(request, now_s, **options)
    return refused.value.code, refused.value.ec


@pytest.mark.parametrize("key", [PLAIN, STS], ids=["static", "sts"])
@pytest.mark.parametrize("presigned", [False, True], ids=["header", "query"])
@pytest.mark.parametrize("how", ["v1", "v4"])
def test_what_the_vendor_signs_is_accepted(how: str, presigned: bool, key: AccessKey) -> None:
    VERIFIER.check(signed(how, key, presigned=presigned), NOW_S)


@settings(max_examples=50)
@given(
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
    query=st.dictionaries(
        st.text("abz-. +&=%é", min_size=1, max_size=4),
        st.text("ab/ +&=%数", max_size=4),
        max_size=4,
    ),
)
def test_any_key_and_any_query_verify_in_version_4(name: str, query: dict[str, str]) -> None:
    VERIFIER.check(signed("v4", name=name, query=query), NOW_S)


@pytest.mark.parametrize("presigned", [False, True], ids=["header", "query"])
@pytest.mark.parametrize("how", ["v1", "v4"])
def test_a_wrong_secret_does_not_match(how: str, presigned: bool) -> None:
    request = signed(how, secret="wrong", presigned=presigned)
    assert refusal(request)[0] == "SignatureDoesNotMatch"


@pytest.mark.parametrize("how", ["v1", "v4"])
def test_a_changed_request_does_not_match(how: str) -> None:
    request = signed(how, headers={"x-oss-meta-a": "1"})
    assert isinstance(request.headers, dict)
    request.headers["x-oss-meta-a"] = "2"
    assert refusal(request)[0] == "SignatureDoesNotMatch"
    other = signed(how)
    other.key = "another"
    assert refusal(other)[0] == "SignatureDoesNotMatch"


@pytest.mark.parametrize("how", ["v1", "v4"])
@pytest.mark.parametrize("drift_s", [-901, 901])
def test_a_clock_off_by_more_than_15_minutes_is_refused(how: str, drift_s: int) -> None:
    assert refusal(signed(how, at_s=NOW_S + drift_s))[0] == "RequestTimeTooSkewed"
    VERIFIER.check(signed(how, at_s=NOW_S + drift_s * 890 / 901), NOW_S)


@pytest.mark.parametrize("how", ["v1", "v4"])
def test_tokens_are_wanted_compared_and_expire(how: str) -> None:
    assert refusal(signed(how, AccessKey("STS.ak", "other")))[1] == "0002-00000003"
    wrong = signed(how, AccessKey("STS.ak", "other", "bad"))
    assert refusal(wrong) == ("InvalidSecurityToken", "0002-00000008")
    expired = ("SecurityTokenExpired", "0002-00000007")
    assert refusal(signed(how, STS), NOW_S + 101) == expired
    assert refusal(signed(how, STS), tokens_expired=True) == expired


def test_an_unknown_key_another_region_and_no_signature_are_refused() -> None:
    assert refusal(signed("v4", AccessKey("nobody", "x")))[0] == "InvalidAccessKeyId"
    assert refusal(signed("v4", region="cn-beijing"))[0] == "InvalidArgument"
    assert refusal(Request("GET", "b", "k", (), {}))[0] == "AccessDenied"


@pytest.mark.parametrize("how", ["v1", "v4"])
def test_a_presigned_address_ends(how: str) -> None:
    assert refusal(signed(how, presigned=True), NOW_S + 601)[0] == "AccessDenied"


@pytest.mark.parametrize(
    "query",
    [
        {"x-oss-signature-version": "OSS4-HMAC-SHA256", "x-oss-date": "20270115T080000Z",
         "x-oss-expires": "soon",
         "x-oss-credential": "ak/20270115/cn-hangzhou/oss/aliyun_v4_request"},
        {"x-oss-signature-version": "OSS4-HMAC-SHA256", "x-oss-date": "yesterday"},
        {"OSSAccessKeyId": "ak", "Expires": "²"},
    ],
)  # fmt: skip
def test_malformed_presigned_arguments_are_an_answer_not_a_crash(query: dict[str, str]) -> None:
    refusal(Request("GET", "b", "k", tuple(query.items()), {}))
