"""A disk that does not answer while a shard is being filled: readers go on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from cache_rig import Rig, make_tar, members

from gpufeed.cachefs.store.files import DiskFiles


class HeldWrites(DiskFiles):
    """Writes nothing until `release`."""

    def __init__(self) -> None:
        self.held = threading.Event()
        self.goes_on = threading.Event()

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        self.held.set()
        assert self.goes_on.wait(60)
        super().write(descriptor, data, offset)


@pytest.fixture
def files():
    files = HeldWrites()
    yield files
    files.goes_on.set()


async def test_readers_of_a_shard_do_not_wait_for_the_disk(tmp_path: Path, files) -> None:
    rig = Rig(tmp_path / "cache", slots=64, files=files)
    data = make_tar(30)
    source = rig.tar("a.tar", data)
    first = asyncio.ensure_future(rig.read(source))
    assert await asyncio.to_thread(files.held.wait, 60)
    # While its file is stuck: who came with the fill, and who comes when it has passed.
    assert await first == members(data)
    assert await rig.read(source) == members(data)
    assert not files.goes_on.is_set()
    assert rig.cache.fills_count == 1

    files.goes_on.set()
    await rig.cache.idle()
    assert rig.metrics.get("store_reserved_bytes") == 0
    await rig.close()


async def test_a_slow_disk_that_answers_in_time_gets_its_shard(tmp_path: Path, files) -> None:
    rig = Rig(tmp_path / "cache", slots=64, files=files)
    data = make_tar(30)
    source = rig.tar("a.tar", data)
    assert await rig.read(source) == members(data)
    files.goes_on.set()
    await rig.cache.idle()
    assert rig.store.lookup(source.spec.digest) is not None
    tiers: set[str] = set()
    rig.pool.forget(source.spec.digest)
    assert await rig.read(source, tiers) == members(data)
    assert tiers == {"nvme"}
    await rig.close()


async def test_a_fill_whose_readers_left_while_the_disk_hung_has_not_failed(
    tmp_path: Path, files
) -> None:
    rig = Rig(tmp_path / "cache", slots=64, files=files)
    source = rig.tar("a.tar", make_tar(30))
    reader = rig.cache.open(source)
    for extent in range(reader.extent_count):
        slot, _ = await reader.extent(extent)
        rig.pool.drop(slot)
    await reader.finish()
    await reader._fill.decided()  # the disk is late: it streams past the store
    assert rig.metrics.get("store_degraded") == 1
    reader.close()

    files.goes_on.set()
    await rig.cache.idle()
    assert rig.metrics.get("fills_total") == 1
    assert rig.metrics.get("fills_failed_total") == 0
    await rig.close()
