"""Which engines there are, what each needs, and how it is made."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from gpufeed.bench.engine.clients import Client, Setting
from gpufeed.cachefs.errors import UsageError

_NAMESPACE_TIMEOUT_S = 10.0

Make = Callable[[Setting], Client]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One engine.

    Attributes:
        summary: what it is, for people.
        load: imports what is needed and returns the maker; called in the engine's own process.
        module: what must be installed, besides what the bench itself needs.
        needs_vendor_host: its endpoint must look like the vendor's: it runs in a mount namespace
            where that name leads to loopback.
    """

    summary: str
    load: Callable[[], Make]
    module: str = ""
    needs_vendor_host: bool = False

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed; pip install 'gpufeed[dev]'"
        if self.needs_vendor_host and not _has_mount_namespaces():
            return "its endpoint must look real, which needs a mount namespace (root)"
        return None


def _has_mount_namespaces() -> bool:
    script = "mount --bind /etc/hosts /etc/hosts"
    try:
        done = subprocess.run(  # noqa: S603 a fixed command
            ["unshare", "--mount", "sh", "-c", script],  # noqa: S607 where PATH says
            capture_output=True,
            timeout=_NAMESPACE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _raw() -> Make:
    from gpufeed.bench.engine.raw import RawClient  # noqa: PLC0415 see `Kind.load`

    return RawClient


def _library(name: str) -> Callable[[], Make]:
    def load() -> Make:
        from gpufeed.bench.engine import libraries  # noqa: PLC0415 see `Kind.load`

        make: Make = getattr(libraries, name)
        return make

    return load


def _engine() -> Make:
    from gpufeed.bench.engine.feeds import EngineClient  # noqa: PLC0415 see `Kind.load`

    return EngineClient


def _fill() -> Make:
    from gpufeed.bench.engine.feeds import FillClient  # noqa: PLC0415 see `Kind.load`

    return FillClient


def _tar_fill() -> Make:
    from gpufeed.bench.engine.feeds import FillClient  # noqa: PLC0415 see `Kind.load`

    return functools.partial(FillClient, finds_samples=True)


KINDS: dict[str, Kind] = {
    "raw": Kind(summary="blocking recv_into, a thread a connection: the limit", load=_raw),
    "gpufeed": Kind(summary="gpufeed's origin engine, into arena slots", load=_engine),
    "gpufeed-fill": Kind(
        summary="gpufeed, cold fill: receive, CRC-64, O_DIRECT write, commit", load=_fill
    ),
    "gpufeed-fill-tar": Kind(summary="the same, finding the tars' samples", load=_tar_fill),
    "aiohttp": Kind(summary="aiohttp, chunks of 1 MiB", load=_library("AiohttpClient")),
    "obstore": Kind(
        summary="obstore's S3 client", load=_library("ObstoreClient"), module="obstore"
    ),
    "opendal": Kind(
        summary="OpenDAL's OSS service", load=_library("OpendalClient"), module="opendal"
    ),
    "oss2": Kind(
        summary="the vendor's SDK V1, CRC off", load=_library("Oss2Client"), module="oss2"
    ),
    "oss-v2": Kind(
        summary="the vendor's SDK V2, CRC off",
        load=_library("OssV2Client"),
        module="alibabacloud_oss_v2",
    ),
    "osstorchconnector": Kind(
        summary="the vendor's connector for PyTorch",
        load=_library("ConnectorClient"),
        module="osstorchconnector",
        needs_vendor_host=True,
    ),
    "ossfs": Kind(
        summary="ossfs, cat_file in threads", load=_library("OssfsClient"), module="ossfs"
    ),
}


def kind_of(name: str) -> Kind:
    """The engine of that name.

    Raises:
        UsageError: there is none.
    """
    kind = KINDS.get(name)
    if kind is None:
        raise UsageError(f"there is no engine {name!r}; there are {', '.join(KINDS)}")
    return kind
