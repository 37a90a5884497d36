"""Verifies OSS signatures, versions 4 and 1, in headers and in query strings. Pure but for a cache.

Written apart from the client's signer on purpose: two readings of the same documents that must
agree, with the vendor's SDKs as the judges of both.
"""

from __future__ import annotations

import base64
import calendar
import email.utils
import functools
import hashlib
import hmac
import time
from collections.abc import Sequence
from urllib.parse import quote

from gpufeed.cachefs.testing.standin.config import AccessKey
from gpufeed.cachefs.testing.standin.replies import OssError, Request

SKEW_S_MAX = 15 * 60
PRESIGNED_S_MAX = 7 * 24 * 3600
_V4 = "OSS4-HMAC-SHA256"
# Query arguments that are part of the V1 resource.
_SUBRESOURCES = frozenset(
    [
        "acl",
        "append",
        "asyncFetch",
        "bucketInfo",
        "callback",
        "callback-var",
        "cname",
        "comp",
        "continuation-token",
        "cors",
        "delete",
        "encryption",
        "endTime",
        "group",
        "inventory",
        "inventoryId",
        "lifecycle",
        "link",
        "live",
        "location",
        "logging",
        "metaQuery",
        "objectInfo",
        "objectMeta",
        "partNumber",
        "policy",
        "policyStatus",
        "position",
        "publicAccessBlock",
        "qos",
        "qosInfo",
        "referer",
        "replication",
        "replicationLocation",
        "replicationProgress",
        "requestPayment",
        "resourceGroup",
        "response-cache-control",
        "response-content-disposition",
        "response-content-encoding",
        "response-content-language",
        "response-content-type",
        "response-expires",
        "restore",
        "rtc",
        "security-token",
        "sequential",
        "startTime",
        "stat",
        "status",
        "style",
        "styleName",
        "symlink",
        "tagging",
        "transferAcceleration",
        "uploadId",
        "uploads",
        "versionId",
        "versioning",
        "versions",
        "vod",
        "website",
        "worm",
        "wormExtend",
        "wormId",
        "x-oss-ac-forward-allow",
        "x-oss-ac-source-ip",
        "x-oss-ac-subnet-mask",
        "x-oss-ac-vpc-id",
        "x-oss-async-process",
        "x-oss-process",
        "x-oss-request-payer",
        "x-oss-traffic-limit",
        "x-oss-write-get-object-response",
    ]
)


class Verifier:
    """Knows the keys and the region."""

    def __init__(self, keys: Sequence[AccessKey], region: str) -> None:
        self._keys = {key.key: key for key in keys}
        self._region = region

    def check(self, request: Request, now_s: float, *, tokens_expired: bool = False) -> None:
        """Accept a signed request.

        Args:
            request: as addressed.
            now_s: seconds since the epoch.
            tokens_expired: treat every security token as expired, whatever its time.

        Raises:
            OssError: 403, with the code that OSS gives for the reason.
        """
        authorization = request.headers.get("authorization", "")
        if authorization.startswith(_V4):
            self._check_v4(request, authorization, now_s, tokens_expired)
        elif authorization.startswith("OSS "):
            self._check_v1(request, authorization[4:], now_s, tokens_expired)
        elif request.argument("x-oss-signature-version"):
            self._check_v4_query(request, now_s, tokens_expired)
        elif request.argument("OSSAccessKeyId"):
            self._check_v1_query(request, now_s, tokens_expired)
        else:
            raise OssError(
                403, "AccessDenied", "You have no right to access this object because of bucket "
                "acl.", "0003-00000001",
            )  # fmt: skip

    # --- keys ---------------------------------------------------------------------------------

    def _key(self, name: str, token: str | None, now_s: float, expired: bool) -> AccessKey:
        key = self._keys.get(name)
        if key is None:
            raise OssError(
                403, "InvalidAccessKeyId",
                "The OSS Access Key Id you provided does not exist in our records.",
                "0002-00000902", OSSAccessKeyId=name,
            )  # fmt: skip
        if key.token and not token:
            raise OssError(403, "AccessDenied", "The security token is missing.", "0002-00000003")
        if token and token != key.token and any(k.token == token for k in self._keys.values()):
            raise OssError(
                403, "AccessKeyIdAndSecurityTokenNotMatch",
                "The security token belongs to another access key id.",
            )  # fmt: skip
        if token and token != key.token:
            raise OssError(
                403, "InvalidSecurityToken", "The security token you provided is invalid.",
                "0002-00000008",
            )  # fmt: skip
        late = key.expires_at_s is not None and now_s >= key.expires_at_s
        if key.token and (late or expired):
            raise OssError(
                403, "SecurityTokenExpired", "The security token you provided has expired.",
                "0002-00000007",
            )  # fmt: skip
        return key

    # --- version 4 ----------------------------------------------------------------------------

    def _check_v4(self, request: Request, authorization: str, now_s: float, expired: bool) -> None:
        fields = dict(
            part.strip().partition("=")[::2]
            for part in authorization[len(_V4) :].strip().split(",")
        )
        stamp = request.headers.get("x-oss-date", "")
        token = request.headers.get("x-oss-security-token")
        scope = self._scope(fields.get("Credential", ""))
        _check_skew(_iso(stamp), now_s)
        key = self._key(scope[0], token, now_s, expired)
        additional = [n for n in fields.get("AdditionalHeaders", "").split(";") if n]
        canonical = _canonical(request, request.query, additional)
        self._compare_v4(key, scope, stamp, canonical, fields.get("Signature", ""))
        _check_rights(key, request)

    def _check_v4_query(self, request: Request, now_s: float, expired: bool) -> None:
        stamp = request.argument("x-oss-date") or ""
        begin = _iso(stamp)
        expires = request.argument("x-oss-expires") or "0"
        lasts_s = int(expires) if expires.isdecimal() else PRESIGNED_S_MAX + 1
        if lasts_s > PRESIGNED_S_MAX or not begin <= now_s + SKEW_S_MAX:
            raise _denied("Invalid signing date or expiry in the query.")
        if now_s > begin + lasts_s:
            raise _denied("Request has expired.")
        scope = self._scope(request.argument("x-oss-credential") or "")
        key = self._key(scope[0], request.argument("x-oss-security-token"), now_s, expired)
        named = request.argument("x-oss-additional-headers") or ""
        query = tuple(pair for pair in request.query if pair[0] != "x-oss-signature")
        canonical = _canonical(request, query, [n for n in named.split(";") if n])
        self._compare_v4(key, scope, stamp, canonical, request.argument("x-oss-signature") or "")
        _check_rights(key, request)

    def _scope(self, credential: str) -> tuple[str, str, str]:
        parts = credential.split("/")
        if len(parts) != 5 or parts[3:] != ["oss", "aliyun_v4_request"]:
            raise OssError(
                400, "InvalidArgument", f"The credential {credential!r} is malformed.",
                "0002-00000219",
            )  # fmt: skip
        if parts[2] != self._region:
            raise OssError(
                400, "InvalidArgument",
                f"Invalid signing region in Authorization header: {parts[2]}; this bucket is in "
                f"{self._region}.", "0002-00000220",
            )  # fmt: skip
        return parts[0], parts[1], parts[2]

    def _compare_v4(
        self, key: AccessKey, scope: tuple[str, str, str], stamp: str, canonical: str, given: str
    ) -> None:
        _, day, region = scope
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        to_sign = f"{_V4}\n{stamp}\n{day}/{region}/oss/aliyun_v4_request\n{digest}"
        day_key = _v4_day_key(key.secret, day, region)
        expected = hmac.digest(day_key, to_sign.encode(), "sha256").hex()
        if not stamp.startswith(day) or not hmac.compare_digest(expected, given.lower()):
            raise _mismatch(key.key, given, StringToSign=to_sign, CanonicalRequest=canonical)

    # --- version 1 ----------------------------------------------------------------------------

    def _check_v1(self, request: Request, value: str, now_s: float, expired: bool) -> None:
        name, _, given = value.partition(":")
        date = request.headers.get("x-oss-date") or request.headers.get("date", "")
        try:
            at = email.utils.parsedate_to_datetime(date).timestamp()
        except (ValueError, OverflowError):
            raise _denied("OSS authentication requires a valid Date.") from None
        _check_skew(at, now_s)
        # The second SDK sends the token of version 1 under a name that is not signed.
        headers = request.headers
        token = headers.get("x-oss-security-token") or headers.get("security-token")
        key = self._key(name.strip(), token, now_s, expired)
        self._compare_v1(key, request, date, given)
        _check_rights(key, request)

    def _check_v1_query(self, request: Request, now_s: float, expired: bool) -> None:
        until = request.argument("Expires") or "0"
        if not until.isdecimal() or now_s > int(until):
            raise _denied("Request has expired.")
        token = request.argument("security-token")
        key = self._key(request.argument("OSSAccessKeyId") or "", token, now_s, expired)
        self._compare_v1(key, request, until, request.argument("Signature") or "")
        _check_rights(key, request)

    def _compare_v1(self, key: AccessKey, request: Request, date: str, given: str) -> None:
        headers = request.headers
        own = sorted((n, v.strip()) for n, v in headers.items() if n.startswith("x-oss-"))
        resource = f"/{request.bucket}/{request.key}" if request.bucket else "/"
        arguments = sorted(pair for pair in request.query if pair[0] in _SUBRESOURCES)
        if arguments:
            resource += "?" + "&".join(f"{n}={v}" if v else n for n, v in arguments)
        to_sign = "\n".join(
            (
                request.method,
                headers.get("content-md5", ""),
                headers.get("content-type", ""),
                date,
                "".join(f"{n}:{v}\n" for n, v in own) + resource,
            )
        )
        digest = hmac.digest(key.secret.encode(), to_sign.encode(), "sha1")
        expected = base64.b64encode(digest).decode()
        if not hmac.compare_digest(expected, given.strip()):
            raise _mismatch(key.key, given, StringToSign=to_sign)


def _check_rights(key: AccessKey, request: Request) -> None:
    if key.reads is None or not request.key or request.method not in ("GET", "HEAD"):
        return
    if not f"{request.bucket}/{request.key}".startswith(tuple(key.reads)):
        raise OssError(
            403, "AccessDenied", "You have no right to access this object.", "0003-00000001"
        )


def _canonical(
    request: Request, query: Sequence[tuple[str, str]], additional: Sequence[str]
) -> str:
    resource = f"/{request.bucket}/{request.key}" if request.bucket else "/"
    pairs = sorted((quote(n, safe=""), quote(v, safe="")) for n, v in query)
    names = sorted(
        name
        for name in request.headers
        if name.startswith("x-oss-")
        or name in ("content-type", "content-md5")
        or name in additional
    )
    headers = "".join(f"{name}:{request.headers[name].strip()}\n" for name in names)
    payload = request.headers.get("x-oss-content-sha256", "UNSIGNED-PAYLOAD")
    return "\n".join(
        (
            request.method,
            quote(resource, safe="/"),
            "&".join(f"{n}={v}" if v else n for n, v in pairs),
            headers,
            ";".join(sorted(additional)),
            payload,
        )
    )


@functools.lru_cache(maxsize=64)
def _v4_day_key(secret: str, day: str, region: str) -> bytes:
    key = ("aliyun_v4" + secret).encode()
    for step in (day, region, "oss", "aliyun_v4_request"):
        key = hmac.digest(key, step.encode(), "sha256")
    return key


@functools.lru_cache(maxsize=64)
def _iso(stamp: str) -> float:
    try:
        return calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ"))
    except ValueError:
        raise _denied(f"Invalid x-oss-date {stamp!r}.") from None


def _check_skew(at_s: float, now_s: float) -> None:
    if abs(at_s - now_s) > SKEW_S_MAX:
        raise OssError(
            403, "RequestTimeTooSkewed",
            "The difference between the request time and the current time is too large.",
            "0002-00000504", MaxAllowedSkewMilliseconds=str(SKEW_S_MAX * 1000),
        )  # fmt: skip


def _denied(message: str) -> OssError:
    return OssError(403, "AccessDenied", message, "0002-00000069")


def _mismatch(key: str, given: str, **details: str) -> OssError:
    return OssError(
        403, "SignatureDoesNotMatch",
        "The request signature we calculated does not match the signature you provided. Check "
        "your key and signing method.", "0002-00000040", OSSAccessKeyId=key,
        SignatureProvided=given, **details,
    )  # fmt: skip
