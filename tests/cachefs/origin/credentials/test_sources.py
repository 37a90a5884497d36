"""Each source against the services on loopback: what is right, and everything that goes wrong."""

from __future__ import annotations

import asyncio
import time

import pytest
from blockbuster import BlockingError, blockbuster_ctx

from gpufeed.cachefs.errors import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    OriginUnavailableError,
)
from gpufeed.cachefs.origin.credentials import coldhttp, metadata
from gpufeed.cachefs.origin.credentials.metadata import InstanceRole, InstanceRoleIfAny
from gpufeed.cachefs.origin.credentials.provider import FixedCredentials
from gpufeed.cachefs.origin.credentials.source import issued_from
from gpufeed.cachefs.origin.credentials.sts import AssumedRole, OidcRole, Sts
from gpufeed.cachefs.origin.credentials.uri import CredentialsUri
from gpufeed.cachefs.origin.oss_sign import Credentials
from gpufeed.cachefs.origin.tls import client_context
from gpufeed.cachefs.testing.tokenservices import (
    PROVIDER_ARN,
    ROLE_ARN,
    ROLE_NAME,
    ServiceFault,
)

FIRST = Credentials("STS.key-1", "secret-1", "token-1")


@pytest.fixture
def sts(services, tls_files):
    return Sts(
        host=services.sts_host, role_arn=ROLE_ARN, session_name="a-test",
        tls=client_context(tls_files.authority),
    )  # fmt: skip


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("a-pods-token\n")
    return path


@pytest.fixture
def oidc(sts, token_file):
    return OidcRole(sts, provider_arn=PROVIDER_ARN, token_path=str(token_file))


@pytest.fixture
def instance(services):
    return InstanceRole(url=services.metadata_url)


@pytest.fixture
def uri(services):
    return CredentialsUri(services.uri)


@pytest.fixture
def source(request):
    return request.getfixturevalue(request.param)


every_source = pytest.mark.parametrize("source", ["oidc", "instance", "uri"], indirect=True)


@every_source
async def test_it_gives_what_the_service_has_and_for_how_long(source):
    issued = await source.fetch()
    assert issued.credentials == FIRST
    # To the second: that is how exactly the services tell both times.
    assert issued.lifetime_s == pytest.approx(3600, abs=2)


@every_source
@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (ServiceFault("status", 500), OriginUnavailableError, "HTTP 500 InternalError: asked of"),
        (ServiceFault("status", 429), OriginUnavailableError, "HTTP 429"),
        (
            ServiceFault("status", 403, "NoPermission", "You are not authorized"),
            AccessDeniedError, "HTTP 403 NoPermission: You are not authorized",
        ),
        (ServiceFault("malformed"), OriginUnavailableError, "no JSON object"),
        (ServiceFault("empty"), OriginUnavailableError, "without AccessKeyId"),
        (ServiceFault("long"), OriginUnavailableError, "more than 65536 bytes"),
        (ServiceFault("expired"), OriginUnavailableError, "expired 864\\d\\d s ago"),
        (ServiceFault("cut"), OriginUnavailableError, "broke off"),
    ],
    ids=lambda value: f"{value.kind}{value.status}" if isinstance(value, ServiceFault) else "",
)  # fmt: skip
async def test_what_goes_wrong_is_told(services, source, fault, error, text):
    services.said.fault = fault
    with pytest.raises(error, match=text) as caught:
        await source.fetch()
    assert "secret-1" not in str(caught.value)
    services.said.fault = None
    assert (await source.fetch()).credentials.key.startswith("STS.key-")


@every_source
async def test_a_service_that_hangs_is_given_up(services, source, monkeypatch):
    services.said.fault = ServiceFault("hang")
    real = coldhttp.aiohttp.ClientTimeout
    monkeypatch.setattr(
        coldhttp.aiohttp, "ClientTimeout", lambda **named: real(**{**named, "total": 0.2})
    )
    with pytest.raises(OriginUnavailableError, match="did not answer within"):
        await source.fetch()
    services.said.fault = None
    assert (await source.fetch()).credentials == FIRST


async def test_a_service_that_is_not_there_is_told_from_one_that_fails(sts, services):
    instance = InstanceRole(url="http://127.0.0.1:1")
    with pytest.raises(coldhttp.UnreachableError, match="cannot be reached"):
        await instance.fetch()


class TestRrsa:
    async def test_the_tokens_file_is_read_anew_on_each_exchange(self, services, oidc, token_file):
        await oidc.fetch()
        services.said.oidc_token = "rotated"
        with pytest.raises(AccessDeniedError, match=r"AuthenticationFail\.OIDCToken\.Expired"):
            await oidc.fetch()
        token_file.write_text("rotated")
        assert (await oidc.fetch()).credentials.key == "STS.key-2"

    async def test_the_exchange_names_what_the_service_wants(self, services, oidc):
        await oidc.fetch()
        form = services.said.forms[0]
        assert form.pop("Timestamp").endswith("Z")
        assert form == {
            "Action": "AssumeRoleWithOIDC", "Format": "JSON", "Version": "2015-04-01",
            "RoleArn": ROLE_ARN, "OIDCProviderArn": PROVIDER_ARN, "OIDCToken": "a-pods-token",
            "RoleSessionName": "a-test", "DurationSeconds": "3600",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("content", "text"),
        [(None, "cannot be read"), (b"", "has 0 characters"), (b"\xff", "cannot be read"),
         (b"x" * 20_001, "has 20001 characters")],
    )  # fmt: skip
    async def test_a_token_that_is_none_is_not_sent(
        self, services, oidc, token_file, content, text
    ):
        token_file.unlink()
        if content is not None:
            token_file.write_bytes(content)
        with pytest.raises(ConfigError, match=text):
            await oidc.fetch()
        assert services.said.calls["sts"] == 0

    async def test_another_authoritys_certificate_is_refused_before_the_token_is_sent(
        self, services, oidc, sts, other_tls_files, token_file
    ):
        stranger = Sts(
            host=services.sts_host, role_arn=ROLE_ARN, session_name="x",
            tls=client_context(other_tls_files.authority),
        )  # fmt: skip
        oidc = OidcRole(stranger, provider_arn=PROVIDER_ARN, token_path=str(token_file))
        with pytest.raises(OriginUnavailableError, match="certificate"):
            await oidc.fetch()
        assert services.said.calls["sts"] == 0


class TestAssumedRole:
    @pytest.mark.parametrize(
        "base",
        [
            Credentials("base-key", "base-secret"),
            Credentials("base-sts", "base-sts-secret", "base-token"),
        ],
        ids=["pair", "temporary"],
    )
    async def test_it_is_signed_with_the_base(self, sts, base):
        assert (await AssumedRole(sts, FixedCredentials(base)).fetch()).credentials == FIRST

    @pytest.mark.parametrize(
        ("base", "text"),
        [
            (Credentials("base-key", "wrong"), "SignatureDoesNotMatch"),
            (Credentials("nobody", "x"), "InvalidAccessKeyId"),
            (Credentials("base-sts", "base-sts-secret", "other"), "InvalidSecurityToken"),
        ],
    )
    async def test_a_wrong_base_is_refused(self, sts, base, text):
        with pytest.raises(AccessDeniedError, match=text):
            await AssumedRole(sts, FixedCredentials(base)).fetch()

    async def test_nobody_cannot_assume_a_role(self, sts):
        with pytest.raises(ConfigError, match="there are none"):
            await AssumedRole(sts, FixedCredentials(Credentials("", ""))).fetch()


class TestInstanceRole:
    async def test_version_2_is_asked_and_the_role_is_found(self, services, instance):
        services.said.hardened = True
        await instance.fetch()
        assert dict(services.said.calls) == {"token": 1, "roles": 1, "role": 1}

    async def test_a_role_that_is_named_is_not_searched_for(self, services):
        await InstanceRole(ROLE_NAME, url=services.metadata_url).fetch()
        assert services.said.calls["roles"] == 0

    async def test_version_1_does_where_version_2_does_not(self, services, instance):
        services.said.v2_works = False
        assert (await instance.fetch()).credentials == FIRST

    async def test_version_1_does_where_the_token_is_dropped_on_its_way(
        self, services, instance, monkeypatch
    ):
        monkeypatch.setattr(metadata, "TIMEOUT_S", 0.2)
        services.said.fault = ServiceFault("hang", on=frozenset(("token",)))
        assert (await instance.fetch()).credentials == FIRST

    async def test_version_1_is_not_asked_where_it_is_forbidden(self, services):
        services.said.v2_works = False
        instance = InstanceRole(url=services.metadata_url, v1_allowed=False)
        with pytest.raises(OriginUnavailableError, match="version 1 is forbidden"):
            await instance.fetch()
        assert services.said.calls["roles"] == 0

    async def test_a_machine_without_a_role_is_told(self, services, instance):
        services.said.has_role = False
        with pytest.raises(NotFoundError, match="HTTP 404"):
            await instance.fetch()

    async def test_a_machine_without_a_role_is_nobody_until_it_has_one(self, services, instance):
        services.said.has_role = False
        source = InstanceRoleIfAny(instance)
        nobody = await source.fetch()
        assert nobody.credentials.is_anonymous
        assert nobody.renew_in_s == metadata.ASK_AGAIN_S
        services.said.has_role = True
        assert (await source.fetch()).credentials == FIRST
        # From here on it has one: its loss is an error, not a silent 403 for everything.
        services.said.has_role = False
        with pytest.raises(NotFoundError):
            await source.fetch()

    async def test_a_service_that_is_there_and_fails_is_not_taken_for_none(
        self, services, instance
    ):
        services.said.fault = ServiceFault("status", 503)
        with pytest.raises(OriginUnavailableError, match="HTTP 503"):
            await InstanceRoleIfAny(instance).fetch()

    async def test_where_there_is_no_metadata_service_one_is_nobody(self):
        source = InstanceRoleIfAny(InstanceRole(url="http://127.0.0.1:1"))
        assert (await source.fetch()).credentials.is_anonymous


class TestUri:
    @pytest.mark.parametrize(
        "bad", ["", "ftp://x/", "http://", "http://[::1", "//x/y", "http://h:x"]
    )
    def test_what_is_no_address_is_refused_without_being_shown(self, bad):
        with pytest.raises(ConfigError, match="no http:// or https://"):
            CredentialsUri(bad)

    def test_its_name_holds_nothing_but_the_host(self):
        source = CredentialsUri("http://user:hush@h.example:81/hush?token=hush")
        assert source.name == "credentials URI at h.example:81"

    async def test_a_redirect_is_not_followed(self, services):
        services.said.fault = ServiceFault("status", 302)
        with pytest.raises(AccessDeniedError, match="HTTP 302"):
            await CredentialsUri(services.uri).fetch()


def test_the_lifetime_is_by_the_tellers_clock():
    told = {
        "AccessKeyId": "k", "AccessKeySecret": "s", "SecurityToken": "t",
        "Expiration": "2030-01-01T01:00:00Z",
    }  # fmt: skip
    at_s = 1_893_456_000  # 2030-01-01T00:00:00Z, whatever our clock says
    assert issued_from(told, at_s, "x").lifetime_s == 3600
    assert abs(at_s - time.time()) > 86_400


@pytest.mark.parametrize("expiration", [None, "soon", "", 5])
def test_an_expiration_that_is_none_is_told(expiration):
    told = {
        "AccessKeyId": "k", "AccessKeySecret": "s", "SecurityToken": "t", "Expiration": expiration
    }  # fmt: skip
    with pytest.raises(OriginUnavailableError, match="no time"):
        issued_from(told, 0.0, "x")


@every_source
async def test_nothing_blocks_the_loop(source):
    """Neither the exchange nor what it reads: a blocking call on the loop raises here."""
    with blockbuster_ctx():
        with pytest.raises(BlockingError):
            time.sleep(0.001)  # noqa: ASYNC251 the guard works
        assert (await source.fetch()).credentials == FIRST


async def test_the_loop_goes_on_while_a_service_hangs(services, instance):
    services.said.fault = ServiceFault("hang")
    asking = asyncio.create_task(instance.fetch())
    assert await asyncio.to_thread(services.said.hanging.wait, 30)
    assert not asking.done()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
