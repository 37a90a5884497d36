"""What a stand-in serves and to whom. Frozen; see `gpufeed standin --help` for the command line."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpufeed.cachefs.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AccessKey:
    """One credential. With a token it is temporary; `expires_at_s` is seconds since the epoch."""

    key: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)
    expires_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StandinConfig:
    """The server.

    Attributes:
        root: directory with one folder a bucket.
        host: address to listen on.
        port: 0 = any free one.
        region: the plain region that V4 signatures must name.
        keys: who may come.
        public_buckets: buckets that may be read without a signature.
        scenario: shaping and faults as a mapping, see `scenario.py`.
    """

    root: str
    host: str = "127.0.0.1"
    port: int = 0
    region: str = "cn-hangzhou"
    keys: tuple[AccessKey, ...] = (AccessKey("test-key", "test-secret"),)
    public_buckets: tuple[str, ...] = ()
    scenario: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: a port out of range or no key.
        """
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be 0 to 65535")
        if not self.keys:
            raise ConfigError("the stand-in needs at least one access key")
