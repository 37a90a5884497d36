"""The services that give a cloud's machines their credentials, on loopback, in a thread.

One server over plain HTTP is the instance metadata service and a credentials address; another over
TLS is the token service (STS). They check what the real ones check: the metadata token, the pod's
OIDC token, the signature and age of AssumeRole. What they give is `issue`'s, so a test that hands
the same keys to an OSS stand-in has a whole small cloud. `fault` breaks answers.

Written apart from the client on purpose; the vendor's own client is the judge of both.

Threads: attributes are set by the test's thread and read by the server's, each at once.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import concurrent.futures
import datetime
import email.utils
import hashlib
import hmac
import itertools
import json
import ssl
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote_plus

from aiohttp import web

from gpufeed.cachefs.testing.standin.config import AccessKey

Kind = Literal["sts", "token", "roles", "role", "uri"]
FaultKind = Literal["status", "malformed", "empty", "expired", "hang", "long", "cut"]
ROLE_NAME = "gpufeed-reader"
ROLE_ARN = "acs:ram::1234567890123456:role/gpufeed-reader"
PROVIDER_ARN = "acs:ram::1234567890123456:oidc-provider/ack-rrsa-c1"
LIFETIME_S = 3600.0
AGE_MAX_S = 15 * 60
_EXPIRED = web.RequestKey("expired", bool)
START_TIMEOUT_S = 30.0


@dataclass(slots=True)
class ServiceFault:
    """What goes wrong.

    Attributes:
        kind: ``status`` refuses with `status`, `code` and `message`; ``malformed``, ``empty`` and
            ``long`` are answers that make no sense; ``expired`` gives credentials of yesterday;
            ``hang`` gives no answer; ``cut`` closes the connection.
        on: the kinds of calls that it strikes.
        times: how often; None = always.
    """

    kind: FaultKind
    status: int = 500
    code: str = "InternalError"
    message: str = "asked of the stand-in"
    on: frozenset[Kind] = frozenset(("sts", "role", "uri"))
    times: int | None = None


@dataclass(slots=True)
class _Answers:
    """What the handlers share with the test."""

    issue: Callable[[int], AccessKey]
    oidc_token: str
    base_keys: Mapping[str, AccessKey]
    hardened: bool = False
    v2_works: bool = True
    has_role: bool = True
    fault: ServiceFault | None = None
    calls: collections.Counter[str] = field(default_factory=collections.Counter)
    forms: list[dict[str, str]] = field(default_factory=list)
    hanging: threading.Event = field(default_factory=threading.Event)


class TokenServices:
    """See the top of the file; a context manager.

    Args:
        tls_files: certificate and key for ``localhost``, in PEM; None = no token service.
        issue: the credentials of the n-th exchange, from 1; their `expires_at_s` is told, an hour
            from now where it is None.
        oidc_token: the pod's token that is accepted.
        base_keys: who may assume the role.

    Attributes:
        said: what the test may change: `hardened` (version 1 of metadata is refused), `v2_works`,
            `has_role`, `fault`, `oidc_token`; and look at: `calls` by kind, `forms` of STS,
            `hanging` once a call hangs.
        metadata_url: of the metadata service, without a path.
        uri: of the credentials address.
        sts_host: ``localhost:port``.
    """

    def __init__(
        self,
        *,
        tls_files: tuple[str, str] | None = None,
        issue: Callable[[int], AccessKey] | None = None,
        oidc_token: str = "a-pods-token",  # noqa: S107 a test server's public default
        base_keys: tuple[AccessKey, ...] = (),
    ) -> None:
        self.said = _Answers(issue or _numbered, oidc_token, {key.key: key for key in base_keys})
        self.metadata_url = ""
        self.uri = ""
        self.sts_host = ""
        self._tls_files = tls_files
        self._issued = itertools.count(1)
        self._metadata_tokens: set[str] = set()
        self._nonces: set[str] = set()
        self._transports: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="token-services")
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stop = asyncio.Event()

    def __enter__(self) -> TokenServices:
        self._thread.start()
        self._ready.result(START_TIMEOUT_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    # --- the server's thread ------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        runner = web.AppRunner(
            self._app(), access_log=None, handle_signals=False, shutdown_timeout=0.0
        )
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
            self.metadata_url = f"http://127.0.0.1:{port}"
            self.uri = f"{self.metadata_url}/credentials"
            if self._tls_files:
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                context.load_cert_chain(*self._tls_files)
                await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
                self.sts_host = f"localhost:{runner.addresses[1][1]}"
        except BaseException as error:
            self._ready.set_exception(error)
            raise
        self._ready.set_result(None)
        await self._stop.wait()
        # A client's pool may keep a connection for ever; a polite end over TLS would wait for it.
        for transport in list(self._transports):
            transport.abort()
        await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application()
        folder = "/latest/meta-data/ram/security-credentials/"
        app.router.add_put("/latest/api/token", self._handler("token", self._metadata_token))
        app.router.add_get(folder, self._handler("roles", self._roles))
        app.router.add_get(f"{folder}{{role}}", self._handler("role", self._role))
        app.router.add_get("/credentials", self._handler("uri", self._uri_answer))
        app.router.add_route("*", "/", self._handler("sts", self._sts))
        return app

    def _handler(
        self, kind: Kind, answer: Callable[[web.Request, Mapping[str, str]], web.Response]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            assert request.transport is not None, "gone before it was served"
            self._transports.add(request.transport)
            self.said.calls[kind] += 1
            form = {name: str(value) for name, value in (await request.post()).items()}
            told = {**request.query, **form}
            if kind == "sts":
                self.said.forms.append(told)
            fault = self._striking(kind)
            request[_EXPIRED] = fault is not None and fault.kind == "expired"
            if fault is None or request[_EXPIRED]:
                return answer(request, told)
            return await self._broken(fault, request)

        return handle

    def _striking(self, kind: Kind) -> ServiceFault | None:
        fault = self.said.fault
        if fault is None or kind not in fault.on:
            return None
        if fault.times is not None:
            if fault.times == 0:
                return None
            fault.times -= 1
        return fault

    async def _broken(self, fault: ServiceFault, request: web.Request) -> web.Response:
        if fault.kind == "status":
            return _refusal(fault.status, fault.code, fault.message)
        if fault.kind == "malformed":
            return web.Response(text='{"Code": "Success", "AccessKeyId":')
        if fault.kind == "empty":
            return web.json_response({"Code": "Success", "Credentials": {}})
        if fault.kind == "long":
            return web.Response(text="x" * 1_000_000)
        if fault.kind == "hang":
            self.said.hanging.set()
            await self._stop.wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    # --- what is given ------------------------------------------------------------------------

    def _credentials(self, request: web.Request) -> dict[str, str]:
        key = self.said.issue(next(self._issued))
        expires_at_s = key.expires_at_s or time.time() + LIFETIME_S
        if request[_EXPIRED]:
            expires_at_s = time.time() - 86_400
        at = datetime.datetime.fromtimestamp(expires_at_s, datetime.UTC)
        return {
            "AccessKeyId": key.key,
            "AccessKeySecret": key.secret,
            "SecurityToken": key.token,
            "Expiration": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def _uri_answer(self, request: web.Request, _: Mapping[str, str]) -> web.Response:
        return web.json_response({"Code": "Success", **self._credentials(request)})

    def _metadata_token(self, request: web.Request, _: Mapping[str, str]) -> web.Response:
        lifetime = request.headers.get("X-aliyun-ecs-metadata-token-ttl-seconds", "")
        if not self.said.v2_works:
            return web.Response(status=404)
        if not lifetime.isdecimal() or not 1 <= int(lifetime) <= 21_600:
            return web.Response(status=400)
        token = f"metadata-token-{len(self._metadata_tokens)}"
        self._metadata_tokens.add(token)
        return web.Response(text=token)

    def _metadata_refusal(self, request: web.Request) -> web.Response | None:
        token = request.headers.get("X-aliyun-ecs-metadata-token")
        if token is None and self.said.hardened:
            return web.Response(status=403)
        if token is not None and token not in self._metadata_tokens:
            return web.Response(status=401)
        return None if self.said.has_role else web.Response(status=404)

    def _roles(self, request: web.Request, _: Mapping[str, str]) -> web.Response:
        return self._metadata_refusal(request) or web.Response(text=ROLE_NAME)

    def _role(self, request: web.Request, _: Mapping[str, str]) -> web.Response:
        refusal = self._metadata_refusal(request)
        if refusal is None and request.match_info["role"] != ROLE_NAME:
            refusal = web.Response(status=404)
        return refusal or web.json_response(
            {"Code": "Success", "LastUpdated": "2026-01-01T00:00:00Z", **self._credentials(request)}
        )

    def _sts(self, request: web.Request, told: Mapping[str, str]) -> web.Response:
        if told.get("Version") != "2015-04-01" or told.get("Format") != "JSON":
            return _refusal(400, "InvalidVersion", "Specified parameter Version is not valid.")
        duration = told.get("DurationSeconds", "3600")
        if not duration.isdecimal() or int(duration) < 900 or not told.get("RoleSessionName"):
            return _refusal(400, "InvalidParameter", "DurationSeconds or RoleSessionName.")
        if told.get("RoleArn") != ROLE_ARN:
            return _refusal(404, "EntityNotExist.Role", "The specified Role not exists.")
        checks = {"AssumeRoleWithOIDC": self._oidc_refusal, "AssumeRole": self._rpc_refusal}
        check = checks.get(told.get("Action", ""))
        if check is None:
            return _refusal(404, "InvalidAction.NotFound", "Specified api is not found.")
        return check(request, told) or web.json_response(
            {
                "RequestId": "0D0E0F",
                "AssumedRoleUser": {"Arn": f"{ROLE_ARN}/x", "AssumedRoleId": "1:x"},
                "Credentials": self._credentials(request),
            }
        )

    def _oidc_refusal(self, _: web.Request, told: Mapping[str, str]) -> web.Response | None:
        if told.get("OIDCProviderArn") != PROVIDER_ARN:
            return _refusal(400, "AuthenticationFail.OIDCProvider", "The provider is not known.")
        if told.get("OIDCToken") != self.said.oidc_token:
            return _refusal(
                400, "AuthenticationFail.OIDCToken.Expired", "This JSON Web Token has expired."
            )
        return None

    def _rpc_refusal(self, request: web.Request, told: Mapping[str, str]) -> web.Response | None:
        key = self.said.base_keys.get(told.get("AccessKeyId", ""))
        if key is None:
            return _refusal(
                404, "InvalidAccessKeyId.NotFound", "Specified access key is not found."
            )
        if told.get("SecurityToken", "") != key.token:
            return _refusal(400, "InvalidSecurityToken.Mismatch", "The token does not match.")
        stamp = told.get("Timestamp", "")
        age_s = time.time() - datetime.datetime.fromisoformat(stamp).timestamp()
        nonce = told.get("SignatureNonce", "")
        if abs(age_s) > AGE_MAX_S or not nonce or nonce in self._nonces:
            return _refusal(400, "SignatureNonceUsed", "The nonce or the time was used.")
        self._nonces.add(nonce)
        if not hmac.compare_digest(_signature(request.method, told, key.secret), told["Signature"]):
            return _refusal(400, "SignatureDoesNotMatch", "Specified signature is not matched.")
        return None


def _signature(method: str, told: Mapping[str, str], secret: str) -> str:
    """As the vendor's description of its RPC interfaces has it."""

    def encoded(text: str) -> str:
        return quote_plus(text).replace("+", "%20").replace("*", "%2A").replace("%7E", "~")

    names = sorted(name for name in told if name != "Signature")
    query = "&".join(f"{encoded(name)}={encoded(told[name])}" for name in names)
    text = "&".join((method, encoded("/"), encoded(query)))
    mac = hmac.new(f"{secret}&".encode(), text.encode(), hashlib.sha1)
    return base64.b64encode(mac.digest()).decode()


def _numbered(n: int) -> AccessKey:
    return AccessKey(f"STS.key-{n}", f"secret-{n}", f"token-{n}")


def _refusal(status: int, code: str, message: str) -> web.Response:
    body = json.dumps(
        {"RequestId": "0A0B0C", "HostId": "sts.aliyuncs.com", "Code": code, "Message": message}
    )
    return web.Response(
        status=status, text=body, content_type="application/json",
        headers={"Date": email.utils.formatdate(usegmt=True)},
    )  # fmt: skip
