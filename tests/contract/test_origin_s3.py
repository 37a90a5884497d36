"""S3 through s3fs, against a real server that is not ours: the contract, and what is S3's own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os

import fsspec
import pytest

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    OriginUnavailableError,
)
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.origin.fsspec_origin import FsspecOrigin
from gpufeed.cachefs.testing import seaweed as server
from gpufeed.cachefs.testing.origin_contract import OriginContract, Reading, content

pytestmark = pytest.mark.slow
_numbers = itertools.count()


class S3Rig:
    counts_metrics = True

    def __init__(self, endpoint: str, files: fsspec.AbstractFileSystem) -> None:
        # One bucket: each costs this server volumes of its own.
        self.prefix = f"s3://bucket/{next(_numbers)}/"
        self.config = OriginConfig(
            endpoint=endpoint, region=server.REGION, key=server.KEY, secret=server.SECRET
        )
        self.files = files

    def make_engine(self, metrics: Metrics) -> OriginEngine:
        return OriginEngine(self.config, metrics)

    def put(self, name: str, data: bytes) -> None:
        self.files.pipe_file(self.prefix + name, data)

    def remove(self, name: str) -> None:
        self.files.rm_file(self.prefix + name)


@pytest.fixture(scope="module")
def files(seaweed):
    with server.s3_files(seaweed.endpoint) as files:
        files.mkdir("bucket")
        yield files


@pytest.fixture
def rig(seaweed, files):
    return S3Rig(seaweed.endpoint, files)


class TestS3(OriginContract):
    """The whole contract."""


@pytest.fixture
async def engine(rig):
    engine = rig.make_engine(Metrics())
    engine.start()
    yield engine
    await engine.close()


async def test_closing_ends_the_filesystems_connections(rig):
    """Left to the collector, they would be ended on whatever loop runs then, and fail."""
    rig.put("a", b"x" * 1000)
    loop, escaped = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: escaped.append(context))
    gc.collect()
    before = _socket_count()
    origin = FsspecOrigin("s3", rig.config, Metrics())
    await origin.head(rig.prefix + "a")
    assert _socket_count() > before, "no connection was made"

    await origin.close()

    assert _socket_count() == before
    del origin
    gc.collect()
    await asyncio.sleep(0)  # a task that the collector began would fail now
    assert escaped == []


def _socket_count():
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(name.startswith("socket:") for name in names)


@pytest.mark.parametrize(
    "wrong", [{"secret": "wrong"}, {"key": "nobody", "secret": "wrong"}], ids=["secret", "key"]
)
async def test_wrong_credentials_are_denied_for_each_kind_of_call(rig, engine, wrong):
    rig.put("a", b"data")
    info = await engine.head(rig.prefix + "a")
    options = {"key": server.KEY, **wrong}
    for call in (
        engine.head(info.url, options),
        engine.list(rig.prefix, options),
        engine.read_into(info, 0, Reading(4).targets, lambda _: None, options),
    ):
        with pytest.raises(AccessDeniedError):
            await call


async def test_a_missing_bucket_is_not_found(engine):
    with pytest.raises(NotFoundError, match="no-such-bucket"):
        await engine.head("s3://no-such-bucket/a")


async def test_a_listing_of_several_pages_is_complete(rig, engine):
    rig.files.pipe({f"{rig.prefix}many/{i:04d}": b"x" for i in range(1100)})
    infos = await engine.list(rig.prefix + "many/")
    assert [info.url for info in infos] == [f"{rig.prefix}many/{i:04d}" for i in range(1100)]


async def test_an_object_of_several_parts_is_read_in_parallel_ranges(rig, engine):
    data = content(12_000_000)
    rig.files.pipe_file(rig.prefix + "big", data, chunksize=5 * 2**20)
    info = await engine.head(rig.prefix + "big")
    assert info.etag.endswith("-3")  # uploaded in parts: the etag is no checksum of the whole
    readings = [Reading(1_000_000, 500_000) for _ in range(8)]
    await asyncio.gather(*(r.run(engine, info, i * 1_500_000) for i, r in enumerate(readings)))
    assert b"".join(r.memory for r in readings) == data


async def test_an_overwrite_while_parts_are_read_mixes_nothing(rig, engine):
    rig.put("a", content(400_000, 1))
    info = await engine.head(rig.prefix + "a")
    first = Reading(200_000)
    await first.run(engine, info, 0)
    rig.put("a", content(400_000, 2))
    second = Reading(200_000)
    with pytest.raises(Exception, match="was overwritten"):
        await second.run(engine, info, 200_000)
    assert second.reported == []


async def test_what_is_public_is_read_without_a_key_only_where_the_server_lets(rig):
    rig.put("a", b"data")
    config = OriginConfig(
        endpoint=rig.config.endpoint, region=server.REGION, credentials="anonymous"
    )
    engine = OriginEngine(config, Metrics())
    engine.start()
    try:
        with pytest.raises(AccessDeniedError):
            await engine.head(rig.prefix + "a")
    finally:
        await engine.close()


async def test_a_server_that_is_not_there_may_be_there_later(rig, engine):
    with pytest.raises(OriginUnavailableError, match="s3 filesystem failed"):
        await engine.head(rig.prefix + "a", {"endpoint": "http://127.0.0.1:1"})


async def test_a_scheme_without_a_filesystem_is_told(engine):
    with pytest.raises(ConfigError, match="nosuch:// needs a filesystem"):
        await engine.head("nosuch://a/b")
