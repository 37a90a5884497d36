"""Open descriptors: shared, limited, and closed by the last reader."""

from __future__ import annotations

import os
from pathlib import Path

from gpufeed.cachefs import layout
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.store.descriptors import Descriptors
from gpufeed.cachefs.store.files import DiskFiles
from gpufeed.cachefs.store.threads import DiskThreads
from gpufeed.cachefs.testing.clock import ManualClock
from gpufeed.cachefs.testing.shards import make_spec


def made(name: str) -> ShardSpec:
    return make_spec(int.from_bytes(name.encode()), 10)


class Place:
    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.threads = DiskThreads(2, ManualClock())
        self.descriptors = Descriptors(DiskFiles(), self.threads, limit=limit)

    async def borrow(self, name: str):
        spec = made(name)
        trailer = layout.pack_trailer(spec, [1], None)
        header = layout.pack_header(spec, 4096, trailer, None)
        (self.path / name).write_bytes(header + bytes(4096) + trailer)
        shard = self.descriptors.borrow(spec.digest, str(self.path / name))
        await shard.opening
        return shard

    def open_count(self) -> int:
        count = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                count += os.readlink(f"/proc/self/fd/{name}").startswith(str(self.path))
            except FileNotFoundError:
                continue
        return count

    async def close(self) -> None:
        await self.descriptors.close()
        await self.threads.close()
        assert self.open_count() == 0


async def test_readers_share_one_descriptor_and_a_lease_keeps_it(tmp_path: Path) -> None:
    place = Place(tmp_path, 8)
    first, second = await place.borrow("a"), await place.borrow("a")
    assert first is second
    place.descriptors.give_back(first, keep=True)
    place.descriptors.give_back(second, keep=True)
    assert place.open_count() == 1

    place.descriptors.release(made("a").digest)

    assert place.open_count() == 0
    await place.close()


async def test_no_more_than_the_limit_are_kept_and_the_oldest_idle_goes(tmp_path: Path) -> None:
    place = Place(tmp_path, 2)
    busy = await place.borrow("busy")
    for name in "abcd":
        place.descriptors.give_back(await place.borrow(name), keep=True)

    assert place.open_count() == len(place.descriptors) == 2
    place.descriptors.give_back(busy, keep=False)
    await place.close()


async def test_a_condemned_shards_descriptor_is_closed_by_its_last_reader(tmp_path: Path) -> None:
    place = Place(tmp_path, 8)
    old, also_old = await place.borrow("a"), await place.borrow("a")

    closed = place.descriptors.condemn(made("a").digest)
    new = await place.borrow("a")
    assert new is not old
    place.descriptors.give_back(old, keep=True)
    assert not closed.done()
    place.descriptors.give_back(also_old, keep=True)
    assert closed.done()
    assert place.open_count() == 1

    place.descriptors.give_back(new, keep=False)
    await place.close()


async def test_a_file_that_cannot_be_opened_is_not_kept(tmp_path: Path) -> None:
    place = Place(tmp_path, 8)
    shard = place.descriptors.borrow("a", str(tmp_path / "missing"))
    while not shard.opening.done():
        await place.threads.run(int)
    place.descriptors.give_back(shard, keep=True)
    assert len(place.descriptors) == 0
    await place.close()
