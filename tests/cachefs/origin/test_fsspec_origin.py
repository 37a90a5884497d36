"""The fsspec door's own side: what a filesystem is made with, and what it keeps."""

from __future__ import annotations

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.origin.fsspec_origin import _s3_options


class Named(MemoryFileSystem):
    """By another scheme than memory's own."""

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix(f"{cls.protocol}://"))


class Picky(Named):
    """As sftp's: hands every argument on to a client that knows its own alone."""

    protocol = "picky"
    store: dict = {}  # noqa: RUF012 as its base has it
    pseudo_dirs = [""]  # noqa: RUF012

    def __init__(self, **options):
        super().__init__()
        assert not options, f"a client that does not know {options}"


class Remembering(Named):
    """Keeps listings, and believes them when it is asked for one of them."""

    protocol = "remembering"
    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    def find(self, path, **named):
        found = super().find(path, **named)
        self.dircache[path] = list(found.values())
        return found

    def info(self, path, **named):
        folder = path.rpartition("/")[0]
        if folder in self.dircache:
            for entry in self.dircache[folder]:
                if entry["name"] == path:
                    return entry
        return super().info(path, **named)


@pytest.fixture
async def engine():
    engine = OriginEngine(OriginConfig(), Metrics())
    engine.start()
    yield engine
    await engine.close()


async def test_a_filesystem_is_made_with_nothing_that_it_may_not_know(engine):
    fsspec.register_implementation("picky", Picky, clobber=True)
    Picky().pipe_file("/a/b", b"data")
    assert (await engine.head("picky:///a/b")).size_bytes == 4


async def test_a_listing_is_not_what_a_later_look_is_answered_from(engine):
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    files = Remembering()
    files.pipe_file("/a/b", b"data")
    assert [info.size_bytes for info in await engine.list("remembering:///a/")] == [4]
    files.pipe_file("/a/b", b"longer data")
    assert (await engine.head("remembering:///a/b")).size_bytes == 11


def test_what_is_not_set_is_left_to_the_client():
    assert _s3_options(OriginConfig()) == {
        "anon": False, "client_kwargs": {}, "config_kwargs": {"max_pool_connections": 16}
    }  # fmt: skip
    config = OriginConfig(
        endpoint="https://s3", region="r", key="k", secret="s", token="t", ca_file="/ca.pem"
    )
    assert _s3_options(config) == {
        "key": "k", "secret": "s", "token": "t", "anon": False,
        "client_kwargs": {"endpoint_url": "https://s3", "region_name": "r", "verify": "/ca.pem"},
        "config_kwargs": {"max_pool_connections": 16},
    }  # fmt: skip
    assert _s3_options(OriginConfig(credentials="anonymous"))["anon"] is True
