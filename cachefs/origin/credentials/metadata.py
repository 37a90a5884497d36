"""Credentials of the RAM role of this ECS instance, from its metadata service.

Version 2 of the service wants a token first. Where that cannot be had, from an old image or through
a proxy that drops it, version 1 is asked, unless that is forbidden.
"""

from __future__ import annotations

from urllib.parse import quote

from gpufeed.cachefs.errors import (
    AccessDeniedError,
    NotFoundError,
    OriginUnavailableError,
)
from gpufeed.cachefs.origin.credentials.coldhttp import Ask, Told, UnreachableError, ask
from gpufeed.cachefs.origin.credentials.source import Issued, issued_from
from gpufeed.cachefs.origin.oss_sign import Credentials

METADATA_URL = "http://100.100.100.200"
TOKEN_PATH = "/latest/api/token"  # noqa: S105 a path
ROLES_PATH = "/latest/meta-data/ram/security-credentials/"
TOKEN_LIFETIME_S = 21_600
# It is on the same host; where nothing takes the connection there is none.
CONNECT_TIMEOUT_S = 1.0
TIMEOUT_S = 3.0
# How often a machine without a role is asked whether it has got one.
ASK_AGAIN_S = 60.0
_WHO = "the instance metadata service"


class InstanceRole:
    """Satisfies `Source`.

    Args:
        role: its name; empty = the one that is attached.
        url: of the service, without a path.
        v1_allowed: whether version 1 is asked where version 2 does not work.
    """

    advice = (
        "that a RAM role is attached to the instance (or ALIBABA_CLOUD_ECS_METADATA, its name), "
        "and ALIBABA_CLOUD_IMDSV1_DISABLED"
    )

    def __init__(self, role: str = "", *, url: str = METADATA_URL, v1_allowed: bool = True) -> None:
        self.name = f"ECS instance role {role}".rstrip()
        self._role = role
        self._url = url
        self._v1_allowed = v1_allowed

    async def fetch(self) -> Issued:
        """See `Source`."""
        headers = await self._token_headers()
        role = self._role
        if not role:
            role = (await self._get("", headers)).text.strip().partition("\n")[0]
            if not role:
                raise NotFoundError("no RAM role is attached to this instance")
        told = await self._get(quote(role, safe=""), headers)
        return issued_from(told.table(), told.at_s, _WHO)

    async def _token_headers(self) -> dict[str, str]:
        """Version 2's header, or none for version 1."""
        try:
            told = await self._ask(
                "PUT",
                TOKEN_PATH,
                {"X-aliyun-ecs-metadata-token-ttl-seconds": str(TOKEN_LIFETIME_S)},
            )
            if told.status == 200 and told.text:
                return {"X-aliyun-ecs-metadata-token": told.text}
            failure = f"{_WHO} gave no token: {told.shown()}"
        except UnreachableError:
            raise
        except OriginUnavailableError as error:
            failure = str(error)
        if not self._v1_allowed:
            raise OriginUnavailableError(f"{failure}; version 1 is forbidden")
        return {}

    async def _get(self, name: str, headers: dict[str, str]) -> Told:
        told = await self._ask("GET", ROLES_PATH + name, headers)
        if told.status in (401, 403) and headers and self._v1_allowed:
            told = await self._ask("GET", ROLES_PATH + name, {})
        if told.status == 200:
            return told
        text = f"{_WHO} refused {ROLES_PATH}{name}: {told.shown()}"
        if told.status == 404:
            raise NotFoundError(text)
        if told.status in (401, 403):
            raise AccessDeniedError(text)
        raise OriginUnavailableError(text)

    async def _ask(self, method: str, path: str, headers: dict[str, str]) -> Told:
        return await ask(
            Ask(
                who=_WHO, method=method, url=self._url + path, headers=headers,
                connect_timeout_s=CONNECT_TIMEOUT_S, timeout_s=TIMEOUT_S,
            )
        )  # fmt: skip


class InstanceRoleIfAny:
    """Satisfies `Source`: the instance's role, or nobody's credentials where there is none.

    Only where there is no service, or it says that there is no role. A service that is there and
    fails is an error, and so is the loss of a role that there was: taken for nobody's, each read
    would be refused, and nothing would say why.
    """

    name = "ECS instance role, if any"
    advice = f"{InstanceRole.advice}; origin.credentials = anonymous is for public buckets"

    def __init__(self, role: InstanceRole) -> None:
        self._role = role
        self._had_one = False

    async def fetch(self) -> Issued:
        """See `Source`."""
        try:
            issued = await self._role.fetch()
        except (NotFoundError, UnreachableError):
            if self._had_one:
                raise
            return Issued(Credentials("", ""), renew_in_s=ASK_AGAIN_S)
        self._had_one = True
        return issued
