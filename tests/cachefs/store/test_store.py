"""The store on a real directory: commit, read, evict, recover, and what a bad disk does."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

import pytest

from gpufeed.cachefs import checksum
from gpufeed.cachefs.config import StoreConfig
from gpufeed.cachefs.errors import IntegrityError, OperatorError, StorageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo, ShardSpec, Source
from gpufeed.cachefs.sampleindex import Member, SampleIndexBuilder
from gpufeed.cachefs.store.files import DiskFiles
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.testing.clock import ManualClock

EXTENT = 64 * 1024


def make_spec(number: int, size: int = 2 * EXTENT + 5000) -> ShardSpec:
    info = ObjectInfo(f"oss://b/{number}", size, f"e{number}")
    return ShardSpec(info.url, size, (Source(info, 0),))


def content(spec: ShardSpec) -> bytes:
    return random.Random(spec.digest).randbytes(spec.size_bytes)


def slot_with(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, EXTENT)
    memory.write(data)
    return memoryview(memory)


class FailingFiles(DiskFiles):
    """Fails the n-th call of those that change the disk."""

    def __init__(self, fail_at: int) -> None:
        self.calls = 0
        self.fail_at = fail_at

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise StorageError("a fault that the test asked for")

    def create(self, path, size_bytes):
        self._count()
        return super().create(path, size_bytes)

    def write(self, descriptor, data, offset):
        self._count()
        super().write(descriptor, data, offset)

    def sync(self, descriptor):
        self._count()
        super().sync(descriptor)

    def publish(self, source, target):
        self._count()
        super().publish(source, target)


class Rig:
    """A store over a directory, and the usual moves."""

    def __init__(self, path: Path, capacity: int = 4 * 1024 * 1024, files=None) -> None:
        self.path = path
        self.metrics = Metrics()
        self.clock = ManualClock()
        config = StoreConfig(path=str(path), capacity_bytes=capacity, free_floor_ratio=0.0)
        self.capacity = capacity
        self.store = ShardStore.open(
            config, extent_bytes=EXTENT, metrics=self.metrics, clock=self.clock, files=files
        )

    async def fill(self, spec: ShardSpec, wanted=lambda _: False, index: bytes | None = None):
        reservation = self.store.reserve(spec, wanted=wanted)
        if reservation is None:
            return None
        data = content(spec)
        crcs = []
        try:
            for extent in range(spec.extent_count(EXTENT)):
                piece = data[extent * EXTENT : (extent + 1) * EXTENT]
                crcs.append(checksum.crc64(piece))
                await self.store.write_extent(reservation, extent, slot_with(piece), len(piece))
        except StorageError:
            await self.store.abort(reservation)
            raise
        return await self.store.commit(reservation, crcs, index)

    async def read(self, spec: ShardSpec) -> bytes:
        self.store.lease(spec.digest)
        try:
            data = b""
            for extent in range(spec.extent_count(EXTENT)):
                target = slot_with(b"")
                length = await self.store.read_extent(spec.digest, extent, target)
                data += bytes(target[:length])
            return data
        finally:
            self.store.release(spec.digest)

    def check(self) -> None:
        """Nothing reserved, no temporary file, and the disk holds no more than the limit."""
        files = [p for p in (self.path / "shards").rglob("*") if p.is_file()]
        assert not [p for p in files if p.suffix == ".tmp"]
        used = sum(p.stat().st_blocks * 512 for p in files)
        assert used <= self.capacity
        assert self.metrics.get("store_reserved_bytes") == 0
        assert len(files) == self.metrics.get("store_resident_shards")


async def test_a_committed_shard_reads_back_and_survives_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    spec = make_spec(1)
    builder = SampleIndexBuilder()
    builder.add("k", [Member("jpg", 0, 5)])
    encoded = builder.build().encode()

    stored = await rig.fill(spec, index=encoded)
    assert stored is not None
    assert stored.sample_count == 1
    assert await rig.read(spec) == content(spec)
    rig.check()
    await rig.store.close()

    rig = Rig(tmp_path)
    assert rig.store.lookup(spec.digest) == stored
    assert rig.store.sample_index(spec.digest) == encoded
    assert await rig.read(spec) == content(spec)
    await rig.store.close()


async def test_the_index_is_rebuilt_from_the_files_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    spec = make_spec(1)
    await rig.fill(spec)
    await rig.store.close()
    for file in (tmp_path / "index").iterdir():
        file.unlink()

    rig = Rig(tmp_path)

    assert await rig.read(spec) == content(spec)
    await rig.store.close()


async def test_a_wrong_byte_is_never_served(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    spec = make_spec(1)
    for trial in range(30):
        await rig.fill(spec)
        (path,) = [p for p in (tmp_path / "shards").rglob("*") if p.is_file()]
        at = 4096 + random.Random(trial).randrange(spec.size_bytes)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))
        with pytest.raises(IntegrityError):
            await rig.read(spec)
        assert rig.store.lookup(spec.digest) is None
    assert rig.metrics.get("quarantined_total") == 30
    await rig.store.close()


async def test_wanted_and_leased_shards_stay_and_the_newcomer_passes_by(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity=480 * 1024)
    first, second, third = (make_spec(i) for i in range(3))
    await rig.fill(first)
    await rig.fill(second)

    assert await rig.fill(third, wanted=lambda _: True) is None
    rig.store.lease(first.digest)
    assert await rig.fill(third) is not None

    assert rig.store.lookup(first.digest) is not None
    assert rig.store.lookup(second.digest) is None
    rig.store.release(first.digest)
    await rig.store.close()
    rig.check()


async def test_every_failing_disk_call_leaves_nothing_behind(tmp_path: Path) -> None:
    spec = make_spec(1)
    for n in range(1, 50):
        files = FailingFiles(n)
        rig = Rig(tmp_path / str(n), files=files)
        try:
            await rig.fill(spec)
        except StorageError:
            assert rig.store.lookup(spec.digest) is None
            assert rig.store.reserve(make_spec(2), wanted=lambda _: False) is None
            assert rig.metrics.get("store_degraded") == 1
            rig.clock.advance(60)
            await rig.store.close()
            rig.check()
            assert rig.metrics.get("store_resident_bytes") == 0
        else:
            await rig.store.close()
            assert files.calls == n - 1
            assert n > 6
            return
    pytest.fail("the fill never got through")


async def test_a_degraded_disk_is_probed_and_comes_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path, files=FailingFiles(1))
    with pytest.raises(StorageError):
        await rig.fill(make_spec(1))
    assert await rig.fill(make_spec(1)) is None

    rig.clock.advance(31)

    assert await rig.fill(make_spec(1)) is not None
    assert rig.metrics.get("store_degraded") == 0
    await rig.store.close()


async def test_an_abort_gives_the_room_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    spec = make_spec(1)
    reservation = rig.store.reserve(spec, wanted=lambda _: False)
    await rig.store.write_extent(reservation, 0, slot_with(b"x" * EXTENT), EXTENT)

    await rig.store.abort(reservation)

    rig.check()
    await rig.store.close()


async def test_two_daemons_on_one_directory_are_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with pytest.raises(OperatorError, match="another gpufeed daemon"):
        Rig(tmp_path)
    await rig.store.close()


async def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")

    with pytest.raises(OperatorError, match="not empty"):
        Rig(tmp_path)

    assert os.listdir(tmp_path) == ["thesis.tex"]


async def test_modes_are_private(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "cache")
    await rig.fill(make_spec(1))
    await rig.store.close()
    for path in (tmp_path / "cache").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
