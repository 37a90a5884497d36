"""Every origin passes the contract, driven through the engine as in the daemon."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import fsspec
import pytest

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.testing.memory_origin import MemoryOrigin
from gpufeed.cachefs.testing.origin_contract import OriginContract
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, REGION, SECRET


class FolderRig:
    """Objects that are files below a folder."""

    counts_metrics = True

    def __init__(self, folder: Path, prefix: str, config: OriginConfig) -> None:
        self.folder = folder
        self.prefix = prefix
        self.config = config

    def make_engine(self, metrics: Metrics) -> OriginEngine:
        return OriginEngine(self.config, metrics)

    def put(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{uuid.uuid4().hex}")
        new.write_bytes(data)
        os.replace(new, path)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()


class TestLocal(OriginContract):
    @pytest.fixture
    def rig(self, tmp_path):
        folder = tmp_path / "objects"
        folder.mkdir()
        return FolderRig(folder, f"file://{folder}/", OriginConfig())


class TestOss(OriginContract):
    @pytest.fixture(params=[1, 3], ids=["one-thread", "three-threads"])
    def rig(self, oss_standin, request):
        config = OriginConfig(
            endpoint=oss_standin.endpoint, region=REGION, key=KEY, secret=SECRET,
            threads=request.param,
        )  # fmt: skip
        folder = Path(oss_standin.root, BUCKET, "below")
        folder.mkdir()
        return FolderRig(folder, f"oss://{BUCKET}/below/", config)


class FsspecMemoryRig:
    counts_metrics = True

    def __init__(self) -> None:
        self.prefix = f"memory://{uuid.uuid4().hex}/"
        self.files = fsspec.filesystem("memory")

    def make_engine(self, metrics: Metrics) -> OriginEngine:
        return OriginEngine(OriginConfig(), metrics)

    def put(self, name: str, data: bytes) -> None:
        self.files.pipe_file(self.prefix + name, data)

    def remove(self, name: str) -> None:
        self.files.rm_file(self.prefix + name)


class TestFsspecMemory(OriginContract):
    @pytest.fixture
    def rig(self):
        rig = FsspecMemoryRig()
        yield rig
        if rig.files.exists(rig.prefix):
            rig.files.rm(rig.prefix, recursive=True)


class MemoryRig:
    prefix = "held://place/"
    counts_metrics = False

    def __init__(self) -> None:
        self.origin = MemoryOrigin()

    def make_engine(self, metrics: Metrics) -> OriginEngine:
        return OriginEngine(OriginConfig(), metrics, origins={"held": lambda _: self.origin})

    def put(self, name: str, data: bytes) -> None:
        self.origin.objects[self.prefix + name] = data

    def remove(self, name: str) -> None:
        del self.origin.objects[self.prefix + name]


class TestMemory(OriginContract):
    @pytest.fixture
    def rig(self):
        return MemoryRig()
