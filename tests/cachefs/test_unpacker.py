"""Compressed shards: decompressed once, kept and served as what they hold; or refused, whole."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest
import zstandard
from cache_rig import EXTENT, RANDOM, Rig, make_tar, members

from gpufeed.cachefs.cache import ShardSource
from gpufeed.cachefs.errors import (
    CapacityError,
    CorruptSampleError,
    GpufeedError,
    IntegrityError,
    PastEndError,
    UsageError,
)

TAR = make_tar(60)


def gz(data: bytes) -> bytes:
    half = len(data) // 2
    # Without the time of day: the same object twice is the same bytes.
    return gzip.compress(data[:half], 1, mtime=0) + gzip.compress(data[half:], 1, mtime=0)


def zst(data: bytes) -> bytes:
    half = len(data) // 2
    compressor = zstandard.ZstdCompressor()
    return compressor.compress(data[:half]) + compressor.compress(data[half:])


PACKERS = {"a.tar.gz": gz, "a.tgz": gz, "a.tar.zst": zst}
by_name = pytest.mark.parametrize("name", ["a.tar.gz", "a.tar.zst"])


def packed(rig: Rig, name: str, data: bytes = TAR) -> ShardSource:
    return rig.tar(name, PACKERS[name](data))


def stored_files(path: Path) -> list[Path]:
    return [p for p in (path / "shards").rglob("*") if p.is_file()]


@pytest.mark.parametrize("name", PACKERS)
async def test_it_is_decompressed_once_and_served_from_the_store(tmp_path: Path, name: str) -> None:
    rig = Rig(tmp_path, slots=8)
    source = packed(rig, name)
    tiers: set[str] = set()

    assert await rig.read(source, tiers) == members(TAR)
    await rig.cache.idle()
    reads, expanded = rig.engine.reads, rig.metrics.get("decompressed_bytes_total")
    rig.pool.forget(source.spec.digest)
    tiers.clear()
    assert await rig.read(source, tiers) == members(TAR)

    assert tiers == {"nvme"}
    assert rig.engine.reads == reads
    assert rig.metrics.get("decompressed_bytes_total") == expanded == len(TAR)
    assert rig.store.lookup(source.spec.digest).size_bytes == len(TAR)
    await rig.close()


@by_name
async def test_a_new_store_on_the_same_directory_serves_it(tmp_path: Path, name: str) -> None:
    rig = Rig(tmp_path)
    await rig.read(packed(rig, name))
    await rig.cache.idle()
    await rig.close()

    rig = Rig(tmp_path)
    source = packed(rig, name)
    assert await rig.read(source) == members(TAR)

    assert rig.engine.reads == 0
    await rig.close()


@by_name
@pytest.mark.parametrize("slots", [8, 32])
async def test_many_readers_without_a_store_share_one_fetch(name: str, slots: int) -> None:
    rig = Rig(None, slots=slots)
    source = packed(rig, name)

    results = await asyncio.gather(*(rig.read(source) for _ in range(4)))

    assert all(result == members(TAR) for result in results)
    assert rig.engine.bytes_by_url[source.spec.name] == len(rig.engine.objects[source.spec.name])
    await rig.close()


@by_name
async def test_readers_that_come_late_to_a_streamed_shard_get_a_stream_of_their_own(
    name: str,
) -> None:
    rig = Rig(None, slots=16)
    source = packed(rig, name)

    async def late(turns: int) -> dict[str, bytes]:
        for _ in range(turns):
            await asyncio.sleep(0)
        return await rig.read(source)

    async with asyncio.timeout(60):
        results = await asyncio.gather(*(late(40 * i) for i in range(6)))

    assert all(result == members(TAR) for result in results)
    await rig.close()


@by_name
@pytest.mark.parametrize("length", [EXTENT, 3 * EXTENT, 3 * EXTENT + 1, 5])
async def test_any_length_of_any_object_is_found(tmp_path: Path, name: str, length: int) -> None:
    rig = Rig(tmp_path)
    data = RANDOM.randbytes(length)
    url = "mem://a" + name.removeprefix("a.tar")
    rig.engine.objects[url] = PACKERS[name](data)
    source = rig.whole(url)

    for _ in range(2):
        assert await rig.read_bytes(source) == data
        await rig.cache.idle()

    assert rig.store.lookup(source.spec.digest).size_bytes == length
    await rig.close()


@by_name
async def test_a_cut_or_wrong_stream_is_refused_and_not_kept(tmp_path: Path, name: str) -> None:
    rig = Rig(tmp_path)
    whole = PACKERS[name](TAR)
    rig.engine.tells_crc = False
    for wrong in (whole[:-9], whole[: len(whole) // 2 - 100], whole + b"garbage!", b"x" * 500):
        source = rig.tar(name, wrong)

        with pytest.raises(IntegrityError, match=rf"{name}: byte \d+ of {len(wrong)}"):
            await rig.read(source)

        assert rig.store.lookup(source.spec.digest) is None
    await rig.cache.idle()
    assert stored_files(tmp_path) == []
    await rig.close()


@by_name
async def test_the_object_is_compared_with_what_the_origin_says(tmp_path: Path, name: str) -> None:
    rig = Rig(tmp_path)
    source = packed(rig, name, RANDOM.randbytes(9 * EXTENT))
    rig.engine.corrupt.add(source.spec.name)

    with pytest.raises(IntegrityError):
        await rig.read(source)

    assert rig.store.lookup(source.spec.digest) is None
    await rig.close()


@by_name
async def test_a_tar_that_ends_too_soon_is_refused(tmp_path: Path, name: str) -> None:
    rig = Rig(tmp_path)
    source = packed(rig, name, TAR[:200_000])

    with pytest.raises(CorruptSampleError, match="truncated"):
        await rig.read(source)

    assert rig.store.lookup(source.spec.digest) is None
    await rig.close()


@by_name
async def test_what_expands_too_far_is_refused(tmp_path: Path, name: str, monkeypatch) -> None:
    monkeypatch.setattr("gpufeed.cachefs.unpacker.EXPANSION_FLOOR_BYTES", 4 * EXTENT)
    rig = Rig(tmp_path, expansion_ratio_max=10.0)
    source = packed(rig, name, bytes(400 * EXTENT))

    with pytest.raises(CapacityError, match=r"store\.expansion_ratio_max"):
        await rig.read(source)

    limit = max(4 * EXTENT, 10 * len(rig.engine.objects[source.spec.name]))
    assert limit < rig.metrics.get("decompressed_bytes_total") <= limit + EXTENT
    await rig.close()


@by_name
async def test_what_outgrows_the_store_is_streamed_and_reserved_for_the_next_time(
    tmp_path: Path, name: str
) -> None:
    data = bytes(RANDOM.randbytes(100)) * 40_000  # 4 MB out of some kB
    small = Rig(tmp_path / "small", capacity=1 << 20)
    url = "mem://a" + name.removeprefix("a.tar")
    small.engine.objects[url] = PACKERS[name](data)
    source = small.whole(url)

    for _ in range(2):
        assert await small.read_bytes(source) == data
        await small.cache.idle()

    assert small.store.lookup(source.spec.digest) is None
    assert small.metrics.get("bypass_total") == 2
    assert stored_files(tmp_path / "small") == []
    assert small.metrics.get("store_reserved_bytes") == 0
    await small.close()


@by_name
async def test_readers_survive_that_the_room_ends_before_the_stream(
    tmp_path: Path, name: str
) -> None:
    data = bytes(RANDOM.randbytes(100)) * 40_000
    rig = Rig(tmp_path, capacity=2 << 20, slots=8)
    url = "mem://a" + name.removeprefix("a.tar")
    rig.engine.objects[url] = PACKERS[name](data)
    source = rig.whole(url)

    async with asyncio.timeout(60):
        found = await asyncio.gather(*(rig.read_bytes(source, pause=20 * i) for i in range(4)))

    assert all(one == data for one in found)
    await rig.close()


@by_name
async def test_a_reader_that_is_overtaken_by_anothers_stream_knows_where_the_shard_ends(
    name: str,
) -> None:
    data = bytes(RANDOM.randbytes(3 * EXTENT + 777))
    rig = Rig(None, slots=64)
    url = "mem://a" + name.removeprefix("a.tar")
    rig.engine.objects[url] = PACKERS[name](data)
    source = rig.whole(url)
    slow = rig.cache.open(source)
    slot, _ = await slow.extent(0)
    rig.pool.drop(slot)
    # It comes too late for the first stream; its own one leaves every extent in the arena.
    assert await rig.read_bytes(source) == data

    found, extent, ended = data[:EXTENT], 1, False
    while not ended:
        try:
            slot, _ = await slow.extent(extent)
        except PastEndError:
            ended = True
            continue
        found += bytes(rig.pool.view(slot)[: slow.length(extent)])
        rig.pool.drop(slot)
        extent += 1
    slow.close()
    assert found == data
    await rig.close()


@by_name
async def test_a_reader_that_dies_ends_a_streamed_fill_and_not_a_cached_one(
    tmp_path: Path, name: str
) -> None:
    for path in (None, tmp_path):
        rig = Rig(path)
        source = packed(rig, name)
        rig.engine.gate = asyncio.Event()
        reading = asyncio.create_task(rig.read(source))
        await rig.engine.asked.wait()

        reading.cancel()
        await asyncio.wait([reading])
        rig.engine.gate.set()
        await rig.cache.idle()

        assert (rig.store.lookup(source.spec.digest) is not None) == (path is not None)
        await rig.close()


@by_name
async def test_closing_ends_a_stream_whose_thread_waits_for_input(name: str) -> None:
    rig = Rig(None)
    source = packed(rig, name)
    rig.engine.gate = asyncio.Event()
    reading = asyncio.create_task(rig.read(source))
    await rig.engine.asked.wait()

    async with asyncio.timeout(30):
        await rig.cache.close()

    with pytest.raises(GpufeedError, match="given up"):
        await reading
    await rig.close()


@by_name
async def test_a_stream_that_is_cancelled_twice_keeps_its_slot_until_the_thread_is_done(
    name: str,
) -> None:
    rig = Rig(None)
    source = packed(rig, name)
    rig.engine.gate = asyncio.Event()
    reading = asyncio.create_task(rig.read(source))
    await rig.engine.asked.wait()

    reading.cancel()  # its last reader leaves: the fill is given up
    await asyncio.wait([reading])
    async with asyncio.timeout(30):
        await rig.cache.close()  # and once more

    await rig.close()


@by_name
async def test_a_slow_streams_room_goes_to_others(name: str) -> None:
    rig = Rig(None, slots=8)
    slow = rig.cache.open(packed(rig, name, make_tar(90)))
    slot, _ = await slow.extent(0)
    rig.pool.drop(slot)

    other = rig.tar("b.tar", TAR)
    async with asyncio.timeout(60):
        assert await rig.read(other) == members(TAR)

    async with asyncio.timeout(60):
        for extent in range(1, 8):
            slot, _ = await slow.extent(extent)
            rig.pool.drop(slot)
    slow.close()
    await rig.close()


async def test_ranges_of_a_compressed_shard_are_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    with pytest.raises(UsageError, match="compressed"):
        rig.cache.open_ranges(packed(rig, "a.tar.gz"))

    await rig.close()
