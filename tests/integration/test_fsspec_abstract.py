"""fsspec's own suite for filesystems, on the door over a real daemon.

Against the OSS stand-in, where writes go through ossfs, and against local files, where they go
through fsspec's own local filesystem and folders may be empty.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.tests import abstract

from gpufeed.cachefs import calls
from gpufeed.cachefs.fs import GpufeedFileSystem
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, SECRET
from gpufeed.cachefs.testing.standin.config import StandinConfig
from gpufeed.cachefs.testing.standin.process import StandinProcess


@contextlib.contextmanager
def running_node(*flags: str) -> Iterator[object]:
    """One daemon for all tests of a class, or the suite would mostly wait for daemons to start."""
    from node import Node

    place = Path(tempfile.mkdtemp(prefix="gn-"))
    (place / "buckets" / BUCKET).mkdir(parents=True)
    try:
        with StandinProcess(StandinConfig(root=str(place / "buckets"))) as standin:
            node = Node(standin, place)
            try:
                node.start(*flags)
                yield node
            finally:
                calls.close_shared()
                node.close()
    finally:
        shutil.rmtree(place)


class OnOss(abstract.AbstractFixtures):
    @pytest.fixture(scope="class")
    @classmethod
    def node(cls):
        with running_node() as node:
            yield node

    @pytest.fixture
    def fs(self, node):
        target = {"endpoint": node.standin.endpoint, "key": KEY, "secret": SECRET}
        return GpufeedFileSystem("oss", target, daemon=node.socket, skip_instance_cache=True)

    @pytest.fixture
    def fs_path(self):
        return f"{BUCKET}/suite"

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self):
        return False


class OnFiles(abstract.AbstractFixtures):
    @pytest.fixture(scope="class")
    @classmethod
    def node(cls):
        with running_node("--allow", "file://") as node:
            yield node

    @pytest.fixture
    def fs(self, node):
        options = {"auto_mkdir": True}
        return GpufeedFileSystem("file", options, daemon=node.socket, skip_instance_cache=True)

    @pytest.fixture
    def fs_path(self, tmp_path):
        (tmp_path / "suite").mkdir()
        return str(tmp_path / "suite")


class TestCopyOnOss(OnOss, abstract.AbstractCopyTests):
    pass


class TestGetOnOss(OnOss, abstract.AbstractGetTests):
    pass


class TestPutOnOss(OnOss, abstract.AbstractPutTests):
    pass


class TestOpenOnOss(OnOss, abstract.AbstractOpenTests):
    pass


class TestPipeOnOss(OnOss, abstract.AbstractPipeTests):
    pass


class TestCopyOnFiles(OnFiles, abstract.AbstractCopyTests):
    pass


class TestGetOnFiles(OnFiles, abstract.AbstractGetTests):
    pass


class TestPutOnFiles(OnFiles, abstract.AbstractPutTests):
    pass


class TestOpenOnFiles(OnFiles, abstract.AbstractOpenTests):
    pass


class TestPipeOnFiles(OnFiles, abstract.AbstractPipeTests):
    pass
