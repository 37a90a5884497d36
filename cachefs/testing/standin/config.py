"""What a stand-in serves and to whom. Frozen; see `gpufeed standin --help` for the command line."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpufeed.cachefs.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AccessKey:
    """One credential. With a token it is temporary; `expires_at_s` is seconds since the epoch.

    `reads` are prefixes of ``bucket/key`` whose objects it may get and head; None: all. What it may
    list is not restricted: a policy that grants listing and not reading is a common slip.
    """

    key: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)
    expires_at_s: float | None = None
    reads: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StandinConfig:
    """The server.

    Attributes:
        root: directory with one folder a bucket.
        host: address to listen on.
        port: 0 = any free one; with TLS it is the one that speaks it.
        region: the plain region that V4 signatures must name.
        keys: who may come.
        public_buckets: buckets that may be read without a signature.
        scenario: shaping and faults as a mapping, see `scenario.py`.
        tls_certificate: PEM file with a certificate chain; with it the endpoint is https.
        tls_key: PEM file with its key.
        other_regions: buckets that lie elsewhere, by the region's name.
    """

    root: str
    host: str = "127.0.0.1"
    port: int = 0
    region: str = "cn-hangzhou"
    keys: tuple[AccessKey, ...] = (AccessKey("test-key", "test-secret"),)
    public_buckets: tuple[str, ...] = ()
    scenario: dict[str, object] = field(default_factory=dict)
    tls_certificate: str = ""
    tls_key: str = ""
    other_regions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: a port out of range, no key, or half of TLS.
        """
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError("TLS needs both a certificate and its key")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be 0 to 65535")
        if not self.keys:
            raise ConfigError("the stand-in needs at least one access key")
