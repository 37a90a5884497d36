"""Which credentials are taken, and what is said where what they need is not set."""

from __future__ import annotations

import logging

import pytest

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import AccessDeniedError, ConfigError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.credentials.chain import CredentialBook
from gpufeed.cachefs.origin.oss_sign import Credentials
from gpufeed.cachefs.testing.tokenservices import PROVIDER_ARN, ROLE_ARN, ROLE_NAME

P = "ALIBABA_CLOUD_"
OSS_PAIR = {"OSS_ACCESS_KEY_ID": "oss", "OSS_ACCESS_KEY_SECRET": "s"}
CLOUD_PAIR = {f"{P}ACCESS_KEY_ID": "cloud", f"{P}ACCESS_KEY_SECRET": "s"}
FIRST = Credentials("STS.key-1", "secret-1", "token-1")
NOBODY = Credentials("", "")


class Cloud:
    """The services, and an environment that leads to them."""

    def __init__(self, services, authority: str, token_path: str) -> None:
        self.services = services
        self.authority = authority
        self.rrsa = {
            f"{P}ROLE_ARN": ROLE_ARN, f"{P}OIDC_PROVIDER_ARN": PROVIDER_ARN,
            f"{P}OIDC_TOKEN_FILE": token_path, f"{P}STS_ENDPOINT": services.sts_host,
        }  # fmt: skip
        self.uri = {f"{P}CREDENTIALS_URI": services.uri}
        self.named = {f"{P}ECS_METADATA": ROLE_NAME}

    def provider(self, environ: dict[str, str], metadata_url: str | None = None, **fields):
        book = CredentialBook(
            environ, Metrics(), metadata_url=metadata_url or self.services.metadata_url
        )
        config = OriginConfig(ca_file=self.authority, **fields)
        return book.provider(config, "cn-hangzhou", internal=True)


@pytest.fixture
def cloud(services, tls_files, tmp_path):
    path = tmp_path / "token"
    path.write_text("a-pods-token")
    return Cloud(services, tls_files.authority, str(path))


class TestAuto:
    async def test_a_key_that_the_environment_holds_is_called_env(self, cloud, caplog):
        caplog.set_level(logging.INFO)
        provider = cloud.provider(OSS_PAIR, key="oss", secret="s")
        assert await provider.get() == Credentials("oss", "s", "")
        assert "origin credentials: env (found by credentials = auto)" in caplog.text

    async def test_the_first_in_the_documented_order_is_taken(self, cloud, caplog):
        caplog.set_level(logging.INFO)
        everything = {**OSS_PAIR, **CLOUD_PAIR, **cloud.rrsa, **cloud.named, **cloud.uri}
        steps = [
            ({"key": "k", "secret": "s"}, [], "static", None),
            ({}, [], "env", "oss"),
            ({}, OSS_PAIR, "env", "cloud"),
            ({}, CLOUD_PAIR, "rrsa", "sts"),
            ({}, cloud.rrsa, "ecs", "role"),
            ({}, cloud.named, "uri", "uri"),
            ({}, cloud.uri, "ecs-if-any", "roles"),
        ]
        for fields, gone, kind, who in steps:
            for name in gone:
                del everything[name]
            caplog.clear()
            cloud.services.said.calls.clear()
            provider = cloud.provider(everything, **fields)
            assert f"origin credentials: {kind} (found by credentials = auto)" in caplog.text
            found = await provider.get()
            if who in ("oss", "cloud"):
                assert found.key == who
            elif who is not None:
                assert cloud.services.said.calls[who] == 1
                assert found.key.startswith("STS.key-")
        assert "secret-" not in caplog.text

    async def test_where_there_is_nothing_requests_go_unsigned(self, cloud, caplog):
        caplog.set_level(logging.INFO)
        nowhere = "http://127.0.0.1:1"
        assert await cloud.provider({}, nowhere).get() == NOBODY
        assert "none: unsigned" in caplog.text
        forbidden = {f"{P}ECS_METADATA_DISABLED": "True", **cloud.named}
        assert await cloud.provider(forbidden).get() == NOBODY
        assert not cloud.services.said.calls

    async def test_half_of_rrsa_is_not_rrsa(self, cloud):
        del cloud.rrsa[f"{P}OIDC_TOKEN_FILE"]
        await cloud.provider({**cloud.rrsa, **cloud.uri}).get()
        assert cloud.services.said.calls == {"uri": 1}

    async def test_tokens_belong_to_their_pair(self, cloud):
        found = await cloud.provider({**CLOUD_PAIR, f"{P}SECURITY_TOKEN": "t"}).get()
        assert found.token == "t"
        found = await cloud.provider({**OSS_PAIR, f"{P}SECURITY_TOKEN": "t"}).get()
        assert found.token == ""


class TestNamed:
    @pytest.mark.parametrize("kind", ["env", "rrsa", "ecs", "uri", "anonymous"])
    async def test_a_kind_is_taken_though_others_come_first(self, cloud, kind):
        everything = {**CLOUD_PAIR, **cloud.rrsa, **cloud.uri}
        found = await cloud.provider(everything, credentials=kind).get()
        want = {"env": "cloud", "anonymous": ""}.get(kind, "STS.key-1")
        assert found.key == want

    @pytest.mark.parametrize(
        ("kind", "environ", "text"),
        [
            ("env", {}, "neither OSS_ACCESS_KEY_ID nor ALIBABA_CLOUD_ACCESS_KEY_ID is set"),
            ("env", {"OSS_ACCESS_KEY_ID": "x"},
             "OSS_ACCESS_KEY_ID is set, but OSS_ACCESS_KEY_SECRET is not"),
            ("auto", {f"{P}ACCESS_KEY_SECRET": "x"},
             f"{P}ACCESS_KEY_SECRET is set, but {P}ACCESS_KEY_ID is not"),
            ("rrsa", {f"{P}ROLE_ARN": "r"},
             f"{P}OIDC_PROVIDER_ARN, {P}OIDC_TOKEN_FILE is not set"),
            ("ecs", {f"{P}ECS_METADATA_DISABLED": "true"}, "ECS_METADATA_DISABLED forbids it"),
            ("uri", {}, f"{P}CREDENTIALS_URI is not set"),
        ],
    )  # fmt: skip
    def test_what_it_needs_is_named(self, cloud, kind, environ, text):
        with pytest.raises(ConfigError, match=text):
            cloud.provider(environ, credentials=kind)

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"credentials": "sts"}, "must be one of auto, static"),
            ({"credentials": "rrsa", "key": "k", "secret": "s"}, "origin.key is set too"),
            ({"credentials": "static"}, "set origin.key and origin.secret"),
        ],
    )
    def test_contradictions_are_refused(self, fields, text):
        with pytest.raises(ConfigError, match=text):
            OriginConfig(**fields)

    async def test_version_1_of_metadata_can_be_forbidden(self, cloud):
        cloud.services.said.v2_works = False
        assert await cloud.provider({}, credentials="ecs").get() == FIRST
        forbidden = {f"{P}IMDSV1_DISABLED": "true"}
        with pytest.raises(Exception, match="version 1 is forbidden"):
            await cloud.provider(forbidden, credentials="ecs").get()

    async def test_an_error_names_the_provider_and_what_to_set(self, cloud):
        cloud.rrsa[f"{P}OIDC_PROVIDER_ARN"] = "another"
        with pytest.raises(AccessDeniedError) as caught:
            await cloud.provider(cloud.rrsa).get()
        text = str(caught.value)
        assert text.startswith(f"no credentials from RRSA role {ROLE_ARN}: the token service ")
        assert "AuthenticationFail.OIDCProvider: The provider is not known." in text
        assert "check ALIBABA_CLOUD_ROLE_ARN, ALIBABA_CLOUD_OIDC_PROVIDER_ARN" in text


class TestRole:
    async def test_it_is_assumed_with_what_was_found(self, cloud):
        sts = {f"{P}STS_ENDPOINT": f"https://{cloud.services.sts_host}/"}
        base = {"OSS_ACCESS_KEY_ID": "base-key", "OSS_ACCESS_KEY_SECRET": "base-secret"}
        assert await cloud.provider({**sts, **base}, role_arn=ROLE_ARN).get() == FIRST
        form = cloud.services.said.forms[0]
        assert (form["Action"], form["AccessKeyId"]) == ("AssumeRole", "base-key")

    async def test_its_session_is_named_as_the_environment_says_or_after_the_machine(self, cloud):
        await cloud.provider({**cloud.rrsa, f"{P}ROLE_SESSION_NAME": "mine and/yours"}).get()
        await cloud.provider(cloud.rrsa).get()
        names = [form["RoleSessionName"] for form in cloud.services.said.forms]
        assert names[0] == "mine-and-yours"
        assert names[1].startswith("gpufeed-")
        assert len(names[1]) <= 64


@pytest.mark.parametrize(
    ("environ", "region", "internal", "host"),
    [
        ({}, "cn-hangzhou", True, "sts-vpc.cn-hangzhou.aliyuncs.com"),
        ({}, "cn-hangzhou", False, "sts.aliyuncs.com"),
        ({}, "", True, "sts.aliyuncs.com"),
        ({"STS_REGION": "cn-beijing"}, "cn-hangzhou", True, "sts.cn-beijing.aliyuncs.com"),
        ({"STS_REGION": "cn-beijing", "VPC_ENDPOINT_ENABLED": "true"}, "", False,
         "sts-vpc.cn-beijing.aliyuncs.com"),
        ({"STS_ENDPOINT": "h.example"}, "cn-hangzhou", True, "h.example"),
        ({"STS_ENDPOINT": "https://h.example:8443/"}, "cn-hangzhou", True, "h.example:8443"),
    ],
)  # fmt: skip
def test_the_token_service_is_where_the_environment_or_the_origin_is(
    environ, region, internal, host
):
    book = CredentialBook({P + name: value for name, value in environ.items()}, Metrics())
    assert book.sts_host(region, internal=internal) == host


@pytest.mark.parametrize("bad", ["http://h.example", "https://", "https://h/path", "https://h:x"])
def test_tokens_are_sent_nowhere_but_to_a_host_over_tls(bad):
    book = CredentialBook({f"{P}STS_ENDPOINT": bad}, Metrics())
    with pytest.raises(ConfigError, match="must be a host"):
        book.sts_host("", internal=False)


def test_origins_that_would_ask_the_same_service_share_a_provider(cloud):
    book = CredentialBook(cloud.rrsa, Metrics())
    first = book.provider(OriginConfig(endpoint="a.example"), "r", internal=False)
    assert book.provider(OriginConfig(endpoint="b.example"), "r", internal=False) is first
    other = OriginConfig(key="k", secret="s")
    assert book.provider(other, "r", internal=False) is not first


def test_a_file_without_certificates_is_named(cloud, tmp_path):
    cloud.authority = str(tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"origin\.ca_file .*none\.pem is no file with PEM"):
        cloud.provider(cloud.rrsa)
    (tmp_path / "none.pem").write_text("not a certificate")
    with pytest.raises(ConfigError, match=r"origin\.ca_file"):
        cloud.provider(cloud.rrsa)
