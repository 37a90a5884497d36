"""Fill and cache: one fetch however many read, right bytes from every tier, nothing left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cache_rig import (
    EXTENT,
    RANDOM,
    Rig,
    make_tar,
    members,
    oss_rig,
    put_object,
    whole_object,
)

from gpufeed.cachefs.errors import GpufeedError, IntegrityError, OriginUnavailableError
from gpufeed.cachefs.testing.pytest_plugin import BUCKET


async def test_a_shard_is_streamed_cached_and_served_without_the_origin(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=8)
    data = make_tar(60)
    source = rig.tar("a.tar", data)
    tiers: set[str] = set()

    assert await rig.read(source, tiers) == members(data)
    assert "origin" in tiers
    await rig.cache.idle()
    reads = rig.engine.reads
    tiers.clear()
    assert await rig.read(source, tiers) == members(data)

    assert tiers in ({"nvme", "arena"}, {"nvme"})
    assert rig.engine.reads == reads
    assert rig.engine.bytes_by_url[source.spec.name] == len(data)
    await rig.close()


async def test_loose_objects_become_samples_and_are_fetched_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    objects = {
        f"c{i % 3}/{i:03d}.jpg": RANDOM.randbytes(RANDOM.randrange(20000)) for i in range(90)
    }
    sources = rig.loose(objects)

    for _ in range(2):
        found: dict[str, bytes] = {}
        for source in sources:
            found |= await rig.read(source)
        assert found == objects
        await rig.cache.idle()

    assert sum(rig.engine.bytes_by_url.values()) == sum(map(len, objects.values()))
    await rig.close()


@pytest.mark.parametrize("cached", [True, False])
async def test_many_readers_of_a_cold_shard_make_one_fetch(tmp_path: Path, cached: bool) -> None:
    rig = Rig(tmp_path if cached else None, slots=64)
    data = make_tar(60)
    source = rig.tar("a.tar", data)

    results = await asyncio.gather(*(rig.read(source) for _ in range(20)))

    assert all(result == members(data) for result in results)
    assert rig.engine.bytes_by_url[source.spec.name] == len(data)
    assert rig.metrics.get("coalesced_total") == 19
    await rig.close()


async def test_a_shard_larger_than_the_arena_streams_past_it(tmp_path: Path) -> None:
    rig = Rig(None, slots=8)
    data = make_tar(200)
    assert len(data) > 16 * EXTENT

    assert await rig.read(rig.tar("a.tar", data)) == members(data)

    await rig.close()


async def test_a_reader_that_dies_does_not_end_the_fill(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    data = make_tar(60)
    source = rig.tar("a.tar", data)
    rig.engine.gate = asyncio.Event()
    first = asyncio.create_task(rig.read(source))
    second = asyncio.create_task(rig.read(source))
    await rig.engine.asked.wait()

    first.cancel()
    await asyncio.wait([first])
    rig.engine.gate.set()

    assert await second == members(data)
    assert rig.engine.bytes_by_url[source.spec.name] == len(data)
    await rig.close()


async def test_a_fill_into_the_store_goes_on_when_all_its_readers_are_gone(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    data = make_tar(60)
    source = rig.tar("a.tar", data)
    rig.engine.gate = asyncio.Event()
    readers = [asyncio.create_task(rig.read(source)) for _ in range(3)]
    await rig.engine.asked.wait()

    for reader in readers:
        reader.cancel()
    await asyncio.wait(readers)
    rig.engine.gate.set()
    await rig.cache.idle()

    assert rig.store.lookup(source.spec.digest) is not None
    assert rig.engine.bytes_by_url[source.spec.name] == len(data)
    await rig.close()


async def test_what_a_prefetch_has_not_asked_yet_is_demand_once_a_reader_joins(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, slots=16)
    data = make_tar(120)
    source = rig.tar("a.tar", data)
    rig.engine.gate = asyncio.Event()
    rig.cache.prefetch(source)
    await rig.engine.asked.wait()
    before = len(rig.engine.demanded)
    reading = asyncio.create_task(rig.read(source))
    await asyncio.sleep(0)
    rig.engine.gate.set()

    assert await reading == members(data)

    assert not any(rig.engine.demanded[:before])
    assert all(rig.engine.demanded[before:])
    assert len(rig.engine.demanded) > before > 0
    assert rig.engine.bytes_by_url[source.spec.name] == len(data)
    await rig.close()


async def test_an_uncached_fill_ends_with_its_last_reader() -> None:
    rig = Rig(None)
    source = rig.tar("a.tar", make_tar(60))
    rig.engine.gate = asyncio.Event()
    reading = asyncio.create_task(rig.read(source))
    await rig.engine.asked.wait()

    reading.cancel()
    await asyncio.wait([reading])

    await rig.close()


@pytest.mark.parametrize("kind", ["tar", "loose"])
async def test_wrong_bytes_raise_in_every_reader_and_nothing_is_kept(
    tmp_path: Path, kind: str
) -> None:
    rig = Rig(tmp_path)
    if kind == "tar":
        source = rig.tar("a.tar", make_tar(60))
    else:
        (source, *_) = rig.loose({f"{i}.bin": RANDOM.randbytes(9000) for i in range(20)})
    rig.engine.corrupt.add(source.spec.sources[0].info.url)

    results = await asyncio.gather(*(rig.read(source) for _ in range(5)), return_exceptions=True)

    assert {type(result) for result in results} == {IntegrityError}
    assert source.spec.sources[0].info.url in str(results[0])
    assert rig.store.lookup(source.spec.digest) is None
    rig.engine.corrupt.clear()
    assert await rig.read(source)
    await rig.close()


@pytest.mark.parametrize("cached", [True, False])
async def test_each_failing_read_leaves_nothing_and_the_next_try_is_right(
    tmp_path: Path, cached: bool
) -> None:
    data = make_tar(60)
    for n in range(1, 30):
        rig = Rig(tmp_path / str(n) if cached else None)
        source = rig.tar("a.tar", data)
        rig.engine.fail_at = n
        try:
            result = await rig.read(source)
        except OriginUnavailableError:
            assert rig.engine.reads >= n
            rig.engine.fail_at = 0
            assert await rig.read(source) == members(data)
            await rig.close()
        else:
            assert result == members(data)
            assert n > 3
            await rig.close()
            return
    pytest.fail("never got through")


async def test_a_wrong_byte_on_disk_is_refilled_without_the_reader_noticing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=8)
    data = make_tar(100)
    source = rig.tar("a.tar", data)
    await rig.read(source)
    await rig.cache.idle()
    (path,) = [p for p in (tmp_path / "shards").rglob("*") if p.is_file()]
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 100)
    rig.pool.forget(source.spec.digest)

    assert await rig.read(source) == members(data)

    assert rig.metrics.get("quarantined_total") == 1
    assert rig.engine.bytes_by_url[source.spec.name] == 2 * len(data)
    await rig.close()


async def test_a_truncated_tar_is_refused_and_not_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    source = rig.tar("a.tar", make_tar(60)[:200_000])

    with pytest.raises(GpufeedError, match=r"a\.tar"):
        await rig.read(source)

    assert rig.store.lookup(source.spec.digest) is None
    await rig.close()


async def test_prefetched_shards_are_hits(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    data = make_tar(60)
    source = rig.tar("a.tar", data)

    assert rig.cache.prefetch(source)
    assert not rig.cache.prefetch(source)
    await rig.cache.idle()

    assert rig.store.lookup(source.spec.digest) is not None
    assert await rig.read(source) == members(data)
    assert rig.engine.bytes_by_url[source.spec.name] == len(data)
    await rig.close()


@pytest.mark.parametrize("slots", [8, 16])
async def test_readers_of_all_speeds_get_a_bypassed_shard_right(slots: int) -> None:
    rig = Rig(None, slots=slots)
    data = make_tar(120)
    source = rig.tar("a.tar", data)
    expected = members(data)

    async def read(start: int, pause: int) -> None:
        for _ in range(start):
            await asyncio.sleep(0)
        for _ in range(3):
            reader = rig.cache.open(source)
            found = b""
            for extent in range(reader.extent_count):
                slot, _tier = await reader.extent(extent)
                found += bytes(rig.pool.view(slot)[: reader.length(extent)])
                for _ in range(pause):
                    await asyncio.sleep(0)
                rig.pool.drop(slot)
            await reader.finish()
            chunks = reader.samples(0, reader.extent_count + 1)
            assert {r.key for index in chunks for r in index} == {name[:5] for name in expected}
            reader.close()
            assert found == data

    async with asyncio.timeout(60):
        await asyncio.gather(*(read(7 * i, (0, 3, 40, 11)[i]) for i in range(4)))
    await rig.close()


async def test_a_reader_that_comes_as_the_last_one_leaves_gets_a_fill_of_its_own() -> None:
    rig = Rig(None)
    data = make_tar(60)
    source = rig.tar("a.tar", data)
    for steps in range(40):
        first = asyncio.create_task(rig.read(source))
        for _ in range(steps):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])

        assert await rig.read(source) == members(data)
    await rig.close()


@pytest.mark.parametrize("damage", ["cut", "removed", "wrong"])
async def test_a_file_damaged_in_many_places_at_once_is_filled_anew_once(
    tmp_path: Path, damage: str
) -> None:
    rig = Rig(tmp_path, slots=8)
    data = make_tar(120)
    source = rig.tar("a.tar", data)
    await rig.read(source)
    await rig.cache.idle()
    (path,) = [p for p in (tmp_path / "shards").rglob("*") if p.is_file()]
    if damage == "removed":
        path.unlink()
    elif damage == "cut":
        with path.open("r+b") as file:
            file.truncate(20_000)
    else:
        with path.open("r+b") as file:
            for extent in range(len(data) // EXTENT):
                file.seek(4096 + extent * EXTENT + 100)
                file.write(b"wrong")
    rig.pool.forget(source.spec.digest)

    reader = rig.cache.open(source)
    found = await asyncio.gather(*(reader.extent(i) for i in range(4)))
    for slot, _tier in found:
        rig.pool.drop(slot)
    reader.close()
    assert await rig.read(source) == members(data)

    assert rig.metrics.get("quarantined_total") == 1
    await rig.close()


async def test_samples_are_known_at_once_after_a_refill(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=8)
    source = rig.tar("a.tar", make_tar(120))
    whole = len(await rig.read(source)) // 2
    await rig.cache.idle()
    reader = rig.cache.open(source)

    reader._reattach(reader._attachment, 0)
    rig.pool.drop((await reader.extent(0))[0])

    assert [len(index) for index in reader.samples(0, reader.extent_count)] == [whole]
    reader.close()
    await rig.close()


async def test_empty_objects_alone_are_samples_too(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    (source,) = rig.loose({"a.txt": b"", "b.txt": b""})

    assert await rig.read(source) == {"a.txt": b"", "b.txt": b""}
    await rig.close()


async def test_a_part_larger_than_the_free_arena_does_not_lock_fills_up() -> None:
    rig = Rig(None, slots=8)
    sources = [rig.tar(f"{i}.tar", make_tar(60)) for i in range(4)]

    async with asyncio.timeout(60):
        await asyncio.gather(*(rig.read(source) for source in sources))
    await rig.close()


async def test_a_turn_that_is_not_taken_is_passed_on() -> None:
    rig = Rig(None, slots=8)
    held = [await rig.pool.allocate("x", i) for i in range(8)]
    first = asyncio.create_task(rig.pool.allocate("a", 0))
    same = asyncio.create_task(rig.pool.allocate("a", 0))
    other = asyncio.create_task(rig.pool.allocate("b", 0))
    await asyncio.sleep(0)
    rig.pool.drop(held[0])
    await first
    rig.pool.drop(held[1])

    async with asyncio.timeout(10):
        assert await same is None
        assert await other is not None
    for slot in [*held[2:], first.result(), other.result()]:
        rig.pool.drop(slot)
    await rig.close()


async def test_eighty_staggered_cold_readers_cost_the_origin_one_fetch(
    oss_standin, tmp_path: Path
) -> None:
    data = make_tar(100)
    put_object(oss_standin, "a.tar", data)
    rig = oss_rig(oss_standin, tmp_path / "cache", slots=128)
    source = await whole_object(rig, "a.tar")
    oss_standin.reset()

    async def late(turns: int) -> dict[str, bytes]:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await rig.read(source)

    results = await asyncio.gather(*(late(3 * i) for i in range(80)))

    expected = members(data)
    assert all(result == expected for result in results)
    fetched = oss_standin.counters()["by_key"][f"{BUCKET}/a.tar"]
    assert fetched["bytes"] == len(data)
    assert fetched["requests"] == -(-len(data) // (2 * EXTENT))
    assert rig.metrics.get("misses_total") == 1
    await rig.close()
