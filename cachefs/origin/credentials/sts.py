"""Credentials of a role, from the security token service (STS).

`OidcRole` is RRSA: a pod's service-account token, read from its file anew on every exchange since
the cluster replaces it, is exchanged for the role's credentials. `AssumedRole` asks with the
credentials of somebody else. Both always speak HTTPS; parameters go in the body, so that no token
stands in anybody's log.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import ssl
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from gpufeed.cachefs.errors import AccessDeniedError, ConfigError, OriginUnavailableError
from gpufeed.cachefs.origin.credentials.coldhttp import Ask, Told, ask
from gpufeed.cachefs.origin.credentials.provider import CredentialProvider
from gpufeed.cachefs.origin.credentials.source import Issued, issued_from

DURATION_S = 3600
# What the service takes for a token; a file that is longer is another file.
TOKEN_CHARACTERS_MAX = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sts:
    """A role, and the service to ask for it. `host` may carry a port."""

    host: str
    role_arn: str
    session_name: str
    duration_s: int = DURATION_S
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    async def exchange(
        self, action: str, query: Mapping[str, str], form: Mapping[str, str]
    ) -> Issued:
        """One call of the service.

        Raises:
            AccessDeniedError, OriginUnavailableError.
        """
        who = f"the token service {self.host}"
        told = await ask(
            Ask(
                who=who, method="POST", url=f"https://{self.host}/", query=query, form=form,
                tls=self.tls,
            )
        )  # fmt: skip
        if told.status != 200:
            raise self._refusal(action, told)
        found = told.table().get("Credentials")
        return issued_from(found if isinstance(found, dict) else {}, told.at_s, who)

    def _refusal(self, action: str, told: Told) -> AccessDeniedError | OriginUnavailableError:
        text = f"{told.who} refused {action} of {self.role_arn}: {told.shown()}"
        if told.status >= 500 or told.status == 429 or "Throttling" in told.text:
            return OriginUnavailableError(text)
        return AccessDeniedError(text)

    def common(self, action: str) -> dict[str, str]:
        """The parameters of every call."""
        return {
            "Action": action,
            "Format": "JSON",
            "Version": "2015-04-01",
            "Timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def role(self) -> dict[str, str]:
        """The parameters that name the role."""
        return {
            "RoleArn": self.role_arn,
            "RoleSessionName": self.session_name,
            "DurationSeconds": str(self.duration_s),
        }


class OidcRole:
    """Satisfies `Source`: RRSA, AssumeRoleWithOIDC."""

    advice = (
        "ALIBABA_CLOUD_ROLE_ARN, ALIBABA_CLOUD_OIDC_PROVIDER_ARN and ALIBABA_CLOUD_OIDC_TOKEN_FILE "
        "of the pod, the role's trust policy, and ALIBABA_CLOUD_STS_ENDPOINT"
    )

    def __init__(self, sts: Sts, *, provider_arn: str, token_path: str) -> None:
        self.name = f"RRSA role {sts.role_arn}"
        self._sts = sts
        self._provider_arn = provider_arn
        self._token_path = token_path

    async def fetch(self) -> Issued:
        """See `Source`."""
        token = await asyncio.to_thread(self._token)
        action = "AssumeRoleWithOIDC"
        form = {"OIDCProviderArn": self._provider_arn, "OIDCToken": token, **self._sts.role()}
        return await self._sts.exchange(action, self._sts.common(action), form)

    def _token(self) -> str:
        try:
            with open(self._token_path, encoding="ascii") as file:
                token = file.read(TOKEN_CHARACTERS_MAX + 1).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"the service-account token {self._token_path} cannot be read: {error}"
            ) from None
        if not token or len(token) > TOKEN_CHARACTERS_MAX:
            raise ConfigError(
                f"{self._token_path} has {len(token)} characters; a token has 1 to "
                f"{TOKEN_CHARACTERS_MAX}"
            )
        return token


class AssumedRole:
    """Satisfies `Source`: AssumeRole with the credentials of `base`."""

    advice = "origin.role_arn, its trust policy, and the credentials that it is asked for with"

    def __init__(self, sts: Sts, base: CredentialProvider) -> None:
        self.name = f"role {sts.role_arn}"
        self._sts = sts
        self._base = base

    async def fetch(self) -> Issued:
        """See `Source`."""
        base = await self._base.get()
        if base.is_anonymous:
            raise ConfigError("a role needs credentials to be asked for with, and there are none")
        action = "AssumeRole"
        form = {
            **self._sts.common(action), **self._sts.role(),
            "AccessKeyId": base.key, "SignatureMethod": "HMAC-SHA1", "SignatureVersion": "1.0",
            "SignatureNonce": uuid.uuid4().hex,
        }  # fmt: skip
        if base.token:
            form["SecurityToken"] = base.token
        form["Signature"] = rpc_signature("POST", form, base.secret)
        return await self._sts.exchange(action, {}, form)


def rpc_signature(method: str, parameters: Mapping[str, str], secret: str) -> str:
    """The signature of Alibaba Cloud's RPC interfaces, version 1.0: HMAC-SHA1, base64."""
    pairs = sorted((quote(n, safe="~"), quote(v, safe="~")) for n, v in parameters.items())
    canonical = "&".join(f"{name}={value}" for name, value in pairs)
    to_sign = f"{method}&%2F&{quote(canonical, safe='~')}"
    digest = hmac.digest(f"{secret}&".encode(), to_sign.encode(), "sha1")
    return base64.b64encode(digest).decode()
