"""Ranges of a large shard: no byte more than the extents touched, one request for neighbours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cache_rig import EXTENT, RANDOM, Rig, oss_rig, put_object, whole_object

from gpufeed.cachefs.cache import RangeReader, ShardSource
from gpufeed.cachefs.errors import OriginUnavailableError
from gpufeed.cachefs.model import ShardSpec, Source

COUNT = 40
DATA = RANDOM.randbytes(COUNT * EXTENT - 1000)


def plain(rig: Rig, data: bytes = DATA, name: str = "a.parquet") -> ShardSource:
    rig.engine.objects[f"mem://{name}"] = data
    info = rig.engine.info(f"mem://{name}")
    spec = ShardSpec(info.url, info.size_bytes, (Source(info, 0),))
    return ShardSource(spec=spec, make_indexer=lambda _: None)


async def read(rig: Rig, reader: RangeReader, *extents: int) -> set[str]:
    """Read them together and compare; returns their tiers."""
    found = await asyncio.gather(*(reader.extent(extent) for extent in extents))
    for extent, (slot, _) in zip(extents, found, strict=True):
        begin = extent * EXTENT
        view = rig.pool.view(slot)[: reader.length(extent)]
        assert view == DATA[begin : begin + EXTENT], extent
        rig.pool.drop(slot)
    return {tier for _, tier in found}


async def test_only_the_extents_touched_are_fetched_neighbours_in_one_request(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    source = plain(rig)
    reader = rig.cache.open_ranges(source)

    assert await read(rig, reader, 39) == {"origin"}
    assert await read(rig, reader, 7, 20, 8) == {"origin"}
    assert await read(rig, reader, 8, 39) == {"arena"}

    assert rig.engine.reads == 3
    assert rig.engine.bytes_by_url[source.spec.name] == 4 * EXTENT - 1000
    assert rig.metrics.get("range_bytes_total") == 4 * EXTENT - 1000
    assert rig.store.lookup(source.spec.digest) is None
    reader.close()
    await rig.close()


async def test_a_run_is_cut_into_parts(tmp_path: Path) -> None:
    rig = Rig(None)
    reader = rig.cache.open_ranges(plain(rig))

    await read(rig, reader, *range(10, 15))

    assert rig.engine.reads == 3  # of two extents at most
    reader.close()
    await rig.close()


async def test_many_readers_of_one_extent_make_one_request() -> None:
    rig = Rig(None)
    source = plain(rig)
    readers = [rig.cache.open_ranges(source) for _ in range(20)]

    await asyncio.gather(*(read(rig, reader, 5) for reader in readers))

    assert rig.engine.reads == 1
    for reader in readers:
        reader.close()
    await rig.close()


async def test_a_stored_shard_is_read_from_the_store(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    source = plain(rig)
    rig.cache.prefetch(source)
    await rig.cache.idle()
    rig.pool.forget(source.spec.digest)
    reads = rig.engine.reads
    reader = rig.cache.open_ranges(source)

    assert await read(rig, reader, 39, 0, 17) == {"nvme"}

    assert rig.engine.reads == reads
    reader.close()
    await rig.close()


@pytest.mark.parametrize("touches", [[0, 1, 2, 3, 4, 5], list(range(39, 15, -1))])
async def test_a_reader_that_wants_it_all_gets_a_fill_where_there_is_room(
    tmp_path: Path, touches: list[int]
) -> None:
    rig = Rig(tmp_path)
    source = plain(rig)
    reader = rig.cache.open_ranges(source)

    for extent in touches:
        await read(rig, reader, extent)
    await rig.cache.idle()

    assert rig.store.lookup(source.spec.digest) is not None
    reader.close()
    await rig.close()


async def test_without_room_ranges_stay_ranges() -> None:
    rig = Rig(None)
    source = plain(rig)
    reader = rig.cache.open_ranges(source)

    for extent in range(COUNT):
        await read(rig, reader, extent)

    assert rig.cache.fills_count == 0
    assert rig.engine.bytes_by_url[source.spec.name] == len(DATA)
    assert rig.engine.reads == COUNT
    reader.close()
    await rig.close()


async def test_a_fill_in_flight_is_joined(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    source = plain(rig)
    rig.engine.gate = asyncio.Event()
    rig.cache.prefetch(source)
    reader = rig.cache.open_ranges(source)
    reading = asyncio.create_task(read(rig, reader, 30, 3))
    await rig.engine.asked.wait()
    rig.engine.gate.set()

    assert await reading == {"origin"}

    await rig.cache.idle()
    assert rig.engine.bytes_by_url[source.spec.name] == len(DATA)
    reader.close()
    await rig.close()


async def test_a_shard_wrong_on_disk_comes_from_the_origin(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    source = plain(rig)
    rig.cache.prefetch(source)
    await rig.cache.idle()
    (path,) = [p for p in (tmp_path / "shards").rglob("*") if p.is_file()]
    with path.open("r+b") as file:
        file.seek(4096 + 20 * EXTENT)
        file.write(b"wrong")
    rig.pool.forget(source.spec.digest)
    reader = rig.cache.open_ranges(source)

    assert await read(rig, reader, 20) == {"origin"}

    assert rig.metrics.get("quarantined_total") == 1
    reader.close()
    await rig.close()


async def test_an_error_reaches_all_who_wait_once_and_the_next_try_is_right() -> None:
    rig = Rig(None)
    source = plain(rig)
    readers = [rig.cache.open_ranges(source) for _ in range(5)]
    rig.engine.fail_at = 1

    found = await asyncio.gather(*(r.extent(9) for r in readers), return_exceptions=True)

    assert {type(error) for error in found} == {OriginUnavailableError}
    assert len({id(error) for error in found}) == 5
    assert rig.engine.reads == 1
    await read(rig, readers[0], 9)
    for reader in readers:
        reader.close()
    await rig.close()


async def test_a_range_ends_with_its_last_waiter_and_who_comes_then_begins_anew() -> None:
    rig = Rig(None)
    source = plain(rig)
    reader = rig.cache.open_ranges(source)
    rig.engine.gate = asyncio.Event()
    first, second = (asyncio.create_task(reader.extent(9)) for _ in range(2))
    await rig.engine.asked.wait()

    first.cancel()
    await asyncio.wait([first])
    assert rig.in_flight.used_bytes == EXTENT
    second.cancel()
    third = asyncio.create_task(read(rig, reader, 9))
    await asyncio.wait([second])
    rig.engine.gate.set()

    assert await third == {"origin"}
    assert rig.engine.reads == 2
    reader.close()
    await rig.close()


async def test_closing_gives_up_what_is_under_way() -> None:
    rig = Rig(None)
    reader = rig.cache.open_ranges(plain(rig))
    rig.engine.gate = asyncio.Event()
    reading = asyncio.create_task(reader.extent(9))
    await rig.engine.asked.wait()

    closing = asyncio.create_task(rig.close())

    with pytest.raises(OriginUnavailableError):
        await reading
    await closing


async def test_loose_objects_are_read_as_ranges_too() -> None:
    rig = Rig(None, slots=32)
    objects = {f"{i:03d}.bin": RANDOM.randbytes(RANDOM.randrange(30000)) for i in range(60)}
    source = rig.loose(objects)[0]
    whole = bytearray(source.spec.size_bytes)
    for one in source.spec.sources:
        data = objects[one.info.url.removeprefix("mem://p/")]
        whole[one.offset_bytes : one.offset_bytes + len(data)] = data
    reader = rig.cache.open_ranges(source)

    found = await asyncio.gather(*(reader.extent(i) for i in range(reader.extent_count)))

    read_bytes = b""
    for extent, (slot, _) in enumerate(found):
        read_bytes += bytes(rig.pool.view(slot)[: reader.length(extent)])
        rig.pool.drop(slot)
    assert read_bytes == whole
    reader.close()
    await rig.close()


async def test_readers_at_random_beside_a_fill_get_right_bytes(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    source = plain(rig)

    async def at_random() -> None:
        reader = rig.cache.open_ranges(source)
        for _ in range(30):
            await read(rig, reader, RANDOM.randrange(COUNT))
        reader.close()

    async def whole() -> None:
        reader = rig.cache.open(source)
        found = b""
        for extent in range(reader.extent_count):
            slot, _ = await reader.extent(extent)
            found += bytes(rig.pool.view(slot)[: reader.length(extent)])
            rig.pool.drop(slot)
        await reader.finish()
        reader.close()
        assert found == DATA

    async with asyncio.timeout(60):
        await asyncio.gather(at_random(), whole(), at_random(), at_random())
    await rig.close()


async def test_bytes_at_a_real_origin(oss_standin) -> None:
    put_object(oss_standin, "a.parquet", DATA)
    rig = oss_rig(oss_standin, None)
    reader = rig.cache.open_ranges(await whole_object(rig, "a.parquet"))
    oss_standin.reset()

    await read(rig, reader, 39, 3, 4, 17)

    counters = oss_standin.counters()
    assert counters["bytes"] <= 1.05 * (4 * EXTENT - 1000)
    assert counters["requests"] == 3
    reader.close()
    await rig.close()
