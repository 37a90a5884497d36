"""The vendor's own unmodified client is the judge of the token services and of ours.

Both ask the same service and must get the same. Its client reaches the metadata service, whose
address it has fixed, through ``HTTP_PROXY``; its token service by SSL_CERT_FILE.
"""

from __future__ import annotations

import asyncio

import pytest

from gpufeed.cachefs.origin.credentials.metadata import InstanceRole
from gpufeed.cachefs.origin.credentials.provider import FixedCredentials
from gpufeed.cachefs.origin.credentials.sts import AssumedRole, OidcRole, Sts
from gpufeed.cachefs.origin.credentials.uri import CredentialsUri
from gpufeed.cachefs.origin.oss_sign import Credentials
from gpufeed.cachefs.origin.tls import client_context
from gpufeed.cachefs.testing.standin.config import AccessKey
from gpufeed.cachefs.testing.tokenservices import (
    PROVIDER_ARN,
    ROLE_ARN,
    ROLE_NAME,
    ServiceFault,
    TokenServices,
)

ALWAYS = AccessKey("STS.same", "the-secret", "the-token")
BASE = AccessKey("base-key", "base-secret")


@pytest.fixture
def services(tls_files):
    files = (tls_files.certificate, tls_files.key)
    with TokenServices(tls_files=files, issue=lambda _: ALWAYS, base_keys=(BASE,)) as services:
        yield services


@pytest.fixture
def sts(services, tls_files, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", tls_files.authority)
    return Sts(
        host=services.sts_host, role_arn=ROLE_ARN, session_name="x",
        tls=client_context(tls_files.authority),
    )  # fmt: skip


@pytest.fixture
def token_path(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return str(path)


TOKEN = "a-pods-token"


def theirs(provider) -> Credentials:
    found = provider.get_credentials()
    return Credentials(
        found.get_access_key_id(), found.get_access_key_secret(), found.get_security_token()
    )


async def agree(source, provider_of) -> None:
    """Ours, theirs and their asynchronous one get the same."""
    ours = (await source.fetch()).credentials
    assert ours == Credentials(ALWAYS.key, ALWAYS.secret, ALWAYS.token)
    assert await asyncio.to_thread(lambda: theirs(provider_of())) == ours
    found = await (await asyncio.to_thread(provider_of)).get_credentials_async()
    assert found.get_security_token() == ours.token


async def test_rrsa(services, sts, token_path):
    from alibabacloud_credentials.provider import OIDCRoleArnCredentialsProvider

    await agree(
        OidcRole(sts, provider_arn=PROVIDER_ARN, token_path=token_path),
        lambda: OIDCRoleArnCredentialsProvider(
            role_arn=ROLE_ARN, oidc_provider_arn=PROVIDER_ARN, oidc_token_file_path=token_path,
            sts_endpoint=services.sts_host,
        ),
    )  # fmt: skip
    assert services.said.calls["sts"] == 3


async def test_a_role_that_is_assumed(services, sts):
    from alibabacloud_credentials.provider import RamRoleArnCredentialsProvider

    base = FixedCredentials(Credentials(BASE.key, BASE.secret))
    await agree(
        AssumedRole(sts, base),
        lambda: RamRoleArnCredentialsProvider(
            access_key_id=BASE.key, access_key_secret=BASE.secret, role_arn=ROLE_ARN,
            sts_endpoint=services.sts_host,
        ),
    )  # fmt: skip
    assert services.said.calls["sts"] == 3


@pytest.mark.parametrize("way", ["version 2", "version 1"])
async def test_the_instances_role(services, monkeypatch, way):
    from alibabacloud_credentials.provider import EcsRamRoleCredentialsProvider

    monkeypatch.setattr(
        "alibabacloud_credentials.provider.ecs_ram_role.au.environment_ecs_metadata_disabled",
        "false",
    )
    monkeypatch.setenv("HTTP_PROXY", services.metadata_url)
    services.said.hardened = way == "version 2"
    services.said.v2_works = way == "version 2"
    await agree(
        InstanceRole(url=services.metadata_url),
        lambda: EcsRamRoleCredentialsProvider(async_update_enabled=False),
    )
    await agree(
        InstanceRole(ROLE_NAME, url=services.metadata_url),
        lambda: EcsRamRoleCredentialsProvider(role_name=ROLE_NAME, async_update_enabled=False),
    )
    assert services.said.calls["role"] == 6


async def test_a_credentials_address(services):
    from alibabacloud_credentials.provider import URLCredentialsProvider

    await agree(CredentialsUri(services.uri), lambda: URLCredentialsProvider(uri=services.uri))
    assert services.said.calls["uri"] == 3


@pytest.mark.parametrize("kind", ["status", "malformed", "empty"])
async def test_what_is_no_answer_is_none_to_both(services, kind):
    from alibabacloud_credentials.provider import URLCredentialsProvider

    services.said.fault = ServiceFault(kind, 403)
    with pytest.raises(Exception, match=r"HTTP 403|JSON|without AccessKeyId"):
        await CredentialsUri(services.uri).fetch()
    provider = URLCredentialsProvider(uri=services.uri)
    with pytest.raises(Exception, match=r"403|Expecting value|retrieving credentials"):
        await asyncio.to_thread(provider.get_credentials)
