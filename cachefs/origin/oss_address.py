"""Where a bucket is reached, derived from the endpoint once. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import ConfigError, UsageError
from gpufeed.cachefs.origin.dial import Endpoint
from gpufeed.cachefs.urls import split_bucket

_REGION = re.compile(r"(?:s3\.)?oss-([a-z]{2}-[a-z0-9-]+?)(?:-internal)?\.aliyuncs\.com")
_DUAL_STACK = re.compile(r"([a-z]{2}-[a-z0-9-]+)\.oss\.aliyuncs\.com")
_PUBLIC = re.compile(r"((?:s3\.)?oss-[a-z]{2}-[a-z0-9-]+?(?<!-internal))\.aliyuncs\.com")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# Nearest points of the cloud's own network, all buckets of all regions.
_ACCELERATED = frozenset({"oss-accelerate.aliyuncs.com", "oss-accelerate-overseas.aliyuncs.com"})


@dataclass(frozen=True, slots=True)
class Address:
    """An endpoint taken apart.

    Attributes:
        text: the endpoint as it was configured, for messages.
        host: without the bucket.
        port: where to connect.
        tls: whether to speak https.
        path_style: the bucket stands in the path, since the host cannot carry it.
        region: what signatures name; empty if it cannot be told.
    """

    text: str
    host: str
    port: int
    tls: bool
    path_style: bool
    region: str

    @classmethod
    def of(cls, config: OriginConfig) -> Address:
        """Read the endpoint.

        Raises:
            ConfigError: none is set, or it is no address.
        """
        text = config.endpoint
        if not text:
            raise ConfigError(
                "no endpoint for oss:// addresses: set origin.endpoint (or OSS_ENDPOINT, or "
                "endpoint in storage_options), for example oss-cn-hangzhou-internal.aliyuncs.com"
            )
        scheme, host, port = _split(text)
        numeric = host == "localhost" or _is_ip(host)
        # Inside the region's network TLS doubles the cost of a byte; outside it is a must.
        plain = numeric or "-internal." in host
        tls = scheme == "https" or (not scheme and not plain)
        # The endpoint knows: what it serves is in its region, and only there are signatures good.
        region = _region(host) or config.region
        return cls(text, host, port or (443 if tls else 80), tls, numeric, region)

    @property
    def internal(self) -> bool:
        """Whether it is reached by the cloud's own network."""
        return "-internal." in self.host

    def endpoint(self, bucket: str) -> Endpoint:
        """Where to connect for this bucket."""
        host = self.host if self.path_style else f"{bucket}.{self.host}"
        return Endpoint(host, self.port, self.tls, host)

    def host_header(self, bucket: str) -> str:
        """The ``Host`` to name."""
        host = self.endpoint(bucket).host
        host = f"[{host}]" if ":" in host else host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def bucket_and_key(url: str) -> tuple[str, str]:
    """Bucket and key; the key may be empty.

    Raises:
        UsageError: no bucket could have that name.
    """
    _, bucket, key = split_bucket(url)
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(
            f"{url!r}: {bucket!r} is no bucket's name (3 to 63 of a-z, 0-9 and -); write "
            "oss://bucket/key"
        )
    return bucket, key


def foreign_origin(endpoint: str, configured: str) -> str:
    """What tells an endpoint's objects from those of the configured one; empty: they are the same.

    Bucket names are one namespace at the cloud itself, however it is reached; anywhere else, two
    endpoints may have different objects under one address, and either may say any etag of them.

    Raises:
        ConfigError: one of them is no address.
    """
    if not endpoint or endpoint == configured:
        return ""
    _, host, port = _split(endpoint)
    if configured:
        _, own_host, own_port = _split(configured)
        if (host, port) == (own_host, own_port):
            return ""
        if _is_cloud(host) and _is_cloud(own_host):
            return ""
    return f"{host}:{port}" if port else host


def is_cloud(endpoint: str) -> bool:
    """Whether it is the object storage of the cloud itself.

    Raises:
        ConfigError: it is no address.
    """
    return _is_cloud(_split(endpoint)[1])


def _is_cloud(host: str) -> bool:
    # Not whatever ends like it: customers' functions and gateways have such names too.
    return bool(_region(host)) or host in _ACCELERATED


def region_of(endpoint: str) -> str:
    """The region that an endpoint's name tells; empty if it does not.

    Raises:
        ConfigError: it is no address.
    """
    return _region(_split(endpoint)[1])


def cautions(address: Address, config: OriginConfig) -> list[str]:
    """What will do, but costs money or time; one sentence each."""
    found = []
    public = _PUBLIC.fullmatch(address.host)
    if public:
        found.append(
            f"{address.host} is a public endpoint: its traffic is slow and charged; on machines of "
            f"that region set origin.endpoint to {public.group(1)}-internal.aliyuncs.com"
        )
    if config.region and config.region != address.region:
        found.append(
            f"origin.region is {config.region}, but the endpoint {address.host} is in "
            f"{address.region}, which is taken; correct origin.region or origin.endpoint"
        )
    return found


def settings_for(endpoint: str) -> str:
    """What to set for a bucket that is at `endpoint`, as a clause."""
    public = _PUBLIC.fullmatch(endpoint)
    inside = f" ({public.group(1)}-internal.aliyuncs.com on machines there)" if public else ""
    region = _region(endpoint)
    also = f" and origin.region to {region}" if region else ""
    return f"set origin.endpoint to {endpoint}{inside}{also}"


def _split(text: str) -> tuple[str, str, int | None]:
    """Scheme (empty if there is none), host and port."""
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        port, host = parts.port, parts.hostname
        known = parts.scheme in ("", "http", "https") and not text.endswith(":")
        if host and known and not parts.path.strip("/"):
            return parts.scheme, host, port
    except ValueError:
        pass  # a port out of range, a broken IPv6 address
    raise ConfigError(f"the endpoint {text!r} is no address; write host, host:port or https://host")


def _region(host: str) -> str:
    found = _REGION.fullmatch(host) or _DUAL_STACK.fullmatch(host)
    return found.group(1) if found else ""


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
