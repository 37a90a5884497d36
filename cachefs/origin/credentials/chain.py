"""Which credentials: the configuration's choice, or what the environment offers.

``origin.credentials`` names a kind; ``auto`` takes the first of

1. ``static``: origin.key and origin.secret (or storage_options);
2. ``env``: OSS_ACCESS_KEY_ID, OSS_ACCESS_KEY_SECRET, OSS_SESSION_TOKEN, or
   ALIBABA_CLOUD_ACCESS_KEY_ID, _ACCESS_KEY_SECRET, _SECURITY_TOKEN;
3. ``rrsa``: ALIBABA_CLOUD_ROLE_ARN, _OIDC_PROVIDER_ARN and _OIDC_TOKEN_FILE, as the cluster's
   webhook sets them;
4. ``ecs``, if ALIBABA_CLOUD_ECS_METADATA names a role;
5. ``uri``: ALIBABA_CLOUD_CREDENTIALS_URI;
6. ``ecs``, if the machine turns out to have a role, unless ALIBABA_CLOUD_ECS_METADATA_DISABLED;
7. ``anonymous``: requests go unsigned.

What somebody has set comes before what must be asked for. With ``origin.role_arn`` the credentials
found are those that the role is assumed with.

`CredentialBook` hands one provider to all who would ask the same service for the same thing.
Threads: any.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from gpufeed.cachefs.clock import Clock, SystemClock
from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.credentials.metadata import (
    METADATA_URL,
    InstanceRole,
    InstanceRoleIfAny,
)
from gpufeed.cachefs.origin.credentials.provider import (
    CredentialProvider,
    FixedCredentials,
    RenewedCredentials,
)
from gpufeed.cachefs.origin.credentials.source import Source
from gpufeed.cachefs.origin.credentials.sts import AssumedRole, OidcRole, Sts
from gpufeed.cachefs.origin.credentials.uri import CredentialsUri
from gpufeed.cachefs.origin.oss_sign import Credentials
from gpufeed.cachefs.origin.tls import client_context

_LOG = logging.getLogger("gpufeed.credentials")
_PREFIX = "ALIBABA_CLOUD_"
_KEY_VARIABLES = (
    ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", "OSS_SESSION_TOKEN"),
    (f"{_PREFIX}ACCESS_KEY_ID", f"{_PREFIX}ACCESS_KEY_SECRET", f"{_PREFIX}SECURITY_TOKEN"),
)
_RRSA_VARIABLES = ("ROLE_ARN", "OIDC_PROVIDER_ARN", "OIDC_TOKEN_FILE")
# What the service takes as a session's name.
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9.@_-]")
_NAME_CHARACTERS_MAX = 64
_BookKey = tuple[str, ...]


class CredentialBook:
    """See the top of the file.

    Args:
        environ: such as `os.environ`.
        metrics: for renewals.
        clock: for their times.
        metadata_url: of the instance metadata service.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        metrics: Metrics,
        *,
        clock: Clock | None = None,
        metadata_url: str = METADATA_URL,
    ) -> None:
        self._environ = environ
        self._metrics = metrics
        self._clock = clock or SystemClock()
        self._metadata_url = metadata_url
        self._lock = threading.Lock()
        self._providers: dict[_BookKey, CredentialProvider] = {}

    def provider(self, config: OriginConfig, region: str, *, internal: bool) -> CredentialProvider:
        """The credentials that the configuration asks for.

        Args:
            config: of the origin.
            region: where the token service of a role is asked, unless the environment says where.
            internal: whether the origin is reached by the cloud's own network.

        Raises:
            ConfigError: what the kind needs is not set.
        """
        key = (
            config.credentials, config.key, config.secret, config.token, config.role_arn,
            config.ca_file, region, str(internal),
        )  # fmt: skip
        with self._lock:
            found = self._providers.get(key)
            if found is None:
                found = self._providers[key] = self._chosen(config, region, internal)
                role = f", role {config.role_arn}" if config.role_arn else ""
                how = "" if config.credentials != "auto" else " (found by credentials = auto)"
                _LOG.info("origin credentials: %s%s%s", self._kind(config), role, how)
            return found

    def check(self, config: OriginConfig, region: str, *, internal: bool) -> bool:
        """Check what `provider` would, asking nobody.

        Returns:
            Whether requests will be signed; False also where that is not known before asking.

        Raises:
            ConfigError: what the kind needs is not set.
        """
        self._chosen(config, region, internal)
        return bool(config.role_arn) or self._kind(config) not in ("ecs-if-any", "anonymous")

    def _kind(self, config: OriginConfig) -> str:
        return config.credentials if config.credentials != "auto" else self._found(config)

    def _chosen(self, config: OriginConfig, region: str, internal: bool) -> CredentialProvider:
        def sts(role_arn: str) -> Sts:
            return Sts(
                host=self.sts_host(region, internal=internal),
                role_arn=role_arn,
                session_name=self._session_name(),
                tls=client_context(config.ca_file),
            )

        makers: Mapping[str, Callable[[], CredentialProvider]] = {
            "static": lambda: _fixed(config.key, config.secret, config.token),
            "env": self._from_environment,
            "rrsa": lambda: self._renewed(self._rrsa(sts)),
            "ecs": lambda: self._renewed(self._instance_role()),
            "ecs-if-any": lambda: self._renewed(InstanceRoleIfAny(self._instance_role())),
            "uri": lambda: self._renewed(self._uri(config)),
            "anonymous": lambda: _fixed("", "", ""),
        }
        provider = makers[self._kind(config)]()
        if config.role_arn:
            provider = self._renewed(AssumedRole(sts(config.role_arn), provider), provider)
        return provider

    def _found(self, config: OriginConfig) -> str:
        """The kind that ``auto`` stands for here."""
        if config.key:
            given = (config.key, config.secret, config.token)
            told = tuple(self._environ.get(name, "") for name in _KEY_VARIABLES[0])
            # The daemon's settings take these variables in as their weakest source.
            return "env" if given == told else "static"
        if any(self._environ.get(name) for names in _KEY_VARIABLES for name in names[:2]):
            return "env"
        if all(self._told(name) for name in _RRSA_VARIABLES):
            return "rrsa"
        metadata_allowed = not self._is_true("ECS_METADATA_DISABLED")
        if metadata_allowed and self._told("ECS_METADATA"):
            return "ecs"
        if self._told("CREDENTIALS_URI"):
            return "uri"
        return "ecs-if-any" if metadata_allowed else "anonymous"

    # --- the kinds ----------------------------------------------------------------------------

    def _renewed(
        self, source: Source, base: CredentialProvider | None = None
    ) -> CredentialProvider:
        return RenewedCredentials(source, clock=self._clock, metrics=self._metrics, base=base)

    def _from_environment(self) -> CredentialProvider:
        for names in _KEY_VARIABLES:
            key, secret, token = (self._environ.get(name, "") for name in names)
            if bool(key) != bool(secret):
                there, missing = names[:2] if key else names[1::-1]
                raise ConfigError(f"{there} is set, but {missing} is not: set both or neither")
            if key:
                return _fixed(key, secret, token)
        raise ConfigError(
            f"origin.credentials is env, but neither {_KEY_VARIABLES[0][0]} nor "
            f"{_KEY_VARIABLES[1][0]} is set"
        )

    def _rrsa(self, sts: Callable[[str], Sts]) -> Source:
        missing = [_PREFIX + name for name in _RRSA_VARIABLES if not self._told(name)]
        if missing:
            raise ConfigError(
                f"origin.credentials is rrsa, but {', '.join(missing)} is not set: the cluster's "
                "pod-identity webhook sets them in pods of an annotated service account"
            )
        return OidcRole(
            sts(self._told("ROLE_ARN")),
            provider_arn=self._told("OIDC_PROVIDER_ARN"),
            token_path=self._told("OIDC_TOKEN_FILE"),
        )

    def _instance_role(self) -> InstanceRole:
        if self._is_true("ECS_METADATA_DISABLED"):
            raise ConfigError(
                f"origin.credentials is ecs, but {_PREFIX}ECS_METADATA_DISABLED forbids it"
            )
        return InstanceRole(
            self._told("ECS_METADATA"),
            url=self._metadata_url,
            v1_allowed=not self._is_true("IMDSV1_DISABLED"),
        )

    def _uri(self, config: OriginConfig) -> Source:
        uri = self._told("CREDENTIALS_URI")
        if not uri:
            raise ConfigError(f"origin.credentials is uri, but {_PREFIX}CREDENTIALS_URI is not set")
        return CredentialsUri(uri, tls=client_context(config.ca_file))

    # --- the environment ----------------------------------------------------------------------

    def _told(self, name: str) -> str:
        return self._environ.get(_PREFIX + name, "").strip()

    def _is_true(self, name: str) -> bool:
        return self._told(name).lower() == "true"

    def _session_name(self) -> str:
        name = self._told("ROLE_SESSION_NAME") or f"gpufeed-{socket.gethostname()}"
        return _NOT_IN_A_NAME.sub("-", name)[:_NAME_CHARACTERS_MAX]

    def sts_host(self, region: str, *, internal: bool) -> str:
        """As told, else in the region that is told, else where the origin is, else the global.

        Raises:
            ConfigError: what is told is no host that speaks HTTPS.
        """
        told = self._told("STS_ENDPOINT")
        if told:
            return _https_host(f"{_PREFIX}STS_ENDPOINT", told)
        named = self._told("STS_REGION")
        if named:
            internal = self._is_true("VPC_ENDPOINT_ENABLED")
        elif not region or not internal:
            return "sts.aliyuncs.com"
        return f"sts{'-vpc' if internal else ''}.{named or region}.aliyuncs.com"


def _https_host(name: str, told: str) -> str:
    try:
        parts = urlsplit(told if "://" in told else f"https://{told}")
        port = f":{parts.port}" if parts.port else ""
        if parts.scheme == "https" and parts.hostname and not parts.path.strip("/"):
            return parts.hostname + port
    except ValueError:
        pass  # a port out of range, a broken IPv6 address
    raise ConfigError(
        f"{name} is {told!r}; it must be a host, host:port or https://host, for tokens are sent "
        "to it"
    )


def _fixed(key: str, secret: str, token: str) -> CredentialProvider:
    return FixedCredentials(Credentials(key, secret, token))
