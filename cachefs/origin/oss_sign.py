"""OSS signature version 4, client side. Pure.

The canonical request is method, ``/bucket/key`` (percent-encoded, slashes kept; the bucket is in it
also where it is in the host), sorted query, the ``x-oss-*`` headers, and the payload's hash, here
always ``UNSIGNED-PAYLOAD``. The key derived for a day and region is cached: a signature costs two
hashes.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

_ALGORITHM = "OSS4-HMAC-SHA256"
_PAYLOAD = "UNSIGNED-PAYLOAD"


@dataclass(frozen=True, slots=True)
class Credentials:
    """An access key pair, and a token if it is temporary."""

    key: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)

    @property
    def is_anonymous(self) -> bool:
        """No key: requests go unsigned."""
        return not self.key


@functools.lru_cache(maxsize=16)
def _day_key(secret: str, day: str, region: str) -> bytes:
    key = f"aliyun_v4{secret}".encode()
    for part in (day, region, "oss", "aliyun_v4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


@functools.lru_cache(maxsize=4)
def _stamp(second: int) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))


@functools.lru_cache(maxsize=1024)
def encode_path(bucket: str, key: str) -> str:
    """The canonical resource: what is signed, wherever the bucket is named."""
    return quote(f"/{bucket}/{key}" if bucket else "/", safe="/~")


def request_path(bucket: str, key: str, *, in_host: bool) -> str:
    """The path that is sent; without the bucket where the host names it."""
    resource = encode_path(bucket, key)
    # A bucket's name has no character that is encoded.
    return resource[1 + len(bucket) :] if in_host else resource


def encode_query(query: Mapping[str, str]) -> str:
    """The query, sorted and encoded, as it is sent and signed."""
    if not query:
        return ""
    pairs = sorted((quote(k, safe="~"), quote(v, safe="~")) for k, v in query.items())
    return "&".join(f"{k}={v}" if v else k for k, v in pairs)


def signed_headers(
    *,
    method: str,
    resource: str,
    query: str,
    headers: Mapping[str, str],
    credentials: Credentials,
    region: str,
    now_s: float,
) -> dict[str, str]:
    """`headers` with date, token and signature added.

    Args:
        method: for example ``GET``.
        resource: from `encode_path`.
        query: from `encode_query`.
        headers: lower-case names; the ``x-oss-*`` ones are signed.
        credentials: of whom.
        region: plain, for example ``cn-hangzhou``.
        now_s: seconds since the epoch by the server's clock.
    """
    if credentials.is_anonymous:
        return dict(headers)
    stamp = _stamp(int(now_s))
    day = stamp[:8]
    complete = {**headers, "x-oss-content-sha256": _PAYLOAD, "x-oss-date": stamp}
    if credentials.token:
        complete["x-oss-security-token"] = credentials.token
    signed = "".join(
        f"{name}:{complete[name].strip()}\n"
        for name in sorted(complete)
        if name.startswith("x-oss-") or name in ("content-type", "content-md5")
    )
    canonical = f"{method}\n{resource}\n{query}\n{signed}\n\n{_PAYLOAD}"
    scope = f"{day}/{region}/oss/aliyun_v4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = f"{_ALGORITHM}\n{stamp}\n{scope}\n{digest}"
    day_key = _day_key(credentials.secret, day, region)
    signature = hmac.digest(day_key, to_sign.encode(), "sha256").hex()
    complete["authorization"] = (
        f"{_ALGORITHM} Credential={credentials.key}/{scope},Signature={signature}"
    )
    return complete
