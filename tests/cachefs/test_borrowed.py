"""Two tenants want a cold shard: one fetch, a copy for the second, nobody waits for the other."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest
from cache_rig import make_tar
from tenants_rig import EXTENT, NodeRig

from gpufeed.cachefs.errors import AccessDeniedError, IntegrityError, OriginUnavailableError

DATA = make_tar(60)


async def together(node: NodeRig, source) -> tuple[object, object]:
    """Both read; the second begins when the first one's fill is under way."""
    node.b.access.note(source.spec.digest)
    node.engine.gate = asyncio.Event()
    first = asyncio.create_task(node.a.read(source))
    await node.engine.asked.wait()
    second = asyncio.create_task(node.b.read(source))
    for _ in range(20):
        await asyncio.sleep(0)
    node.engine.gate.set()
    found = await asyncio.gather(first, second, return_exceptions=True)
    return found[0], found[1]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("slots", [8, 64])
async def test_one_fetch_serves_both_and_each_from_its_own_memory(
    tmp_path: Path, cached: bool, slots: int
) -> None:
    node = NodeRig(tmp_path if cached else None, slots=slots)
    source = node.put("a.tar", DATA)

    assert await together(node, source) == (DATA, DATA)

    assert node.engine.bytes_by_url[source.spec.name] == len(DATA)
    assert node.metrics.get("tenant_copied_bytes_total") == len(DATA)
    await node.close()


async def test_whoever_comes_second_borrows(tmp_path: Path) -> None:
    node = NodeRig(tmp_path)
    node.a, node.b = node.b, node.a
    source = node.put("a.tar", DATA)

    assert await together(node, source) == (DATA, DATA)

    assert node.engine.bytes_by_url[source.spec.name] == len(DATA)
    await node.close()


async def test_several_readers_of_the_borrower_make_one_copy(tmp_path: Path) -> None:
    node = NodeRig(tmp_path, slots=64)
    source = node.put("a.tar", DATA)
    node.b.access.note(source.spec.digest)
    node.engine.gate = asyncio.Event()
    readers = [asyncio.create_task(node.a.read(source))]
    await node.engine.asked.wait()
    readers += [asyncio.create_task(node.b.read(source)) for _ in range(4)]
    for _ in range(20):
        await asyncio.sleep(0)
    node.engine.gate.set()

    assert await asyncio.gather(*readers) == [DATA] * 5

    assert node.metrics.get("tenant_copied_bytes_total") == len(DATA)
    await node.close()


async def test_nothing_is_lent_to_whoever_may_not_read_it(tmp_path: Path) -> None:
    node = NodeRig(tmp_path)
    source = node.put("a.tar", DATA)
    node.engine.denied.add("b")
    node.engine.gate = asyncio.Event()
    first = asyncio.create_task(node.a.read(source))
    await node.engine.asked.wait()

    with pytest.raises(AccessDeniedError, match="own credentials"):
        await node.b.read(source)
    reader = node.b.cache.open(node.b.wants(source))
    with pytest.raises(AccessDeniedError):
        await reader.extent(0)
    reader.close()

    node.engine.gate.set()
    assert await first == DATA
    assert node.metrics.get("tenant_copied_bytes_total") == 0
    await node.close()


@pytest.mark.parametrize("cached", [True, False])
async def test_the_lenders_failure_is_not_the_borrowers(tmp_path: Path, cached: bool) -> None:
    node = NodeRig(tmp_path if cached else None)
    source = node.put("a.tar", DATA)
    node.engine.fail_at = 3
    node.engine.failure = AccessDeniedError("the lender's key was withdrawn")

    first, second = await together(node, source)

    assert isinstance(first, AccessDeniedError)
    assert second == DATA
    await node.close()


async def test_bytes_found_wrong_are_wrong_for_both(tmp_path: Path) -> None:
    node = NodeRig(tmp_path)
    source = node.put("a.tar", DATA)
    node.engine.corrupt.add(source.spec.name)

    first, second = await together(node, source)

    assert isinstance(first, IntegrityError)
    assert isinstance(second, IntegrityError)
    assert node.store.lookup(source.spec.digest) is None
    await node.close()


async def test_a_lender_whose_reader_leaves_does_not_take_the_shard_along(tmp_path: Path) -> None:
    node = NodeRig(None)
    source = node.put("a.tar", DATA)
    node.b.access.note(source.spec.digest)
    node.engine.gate = asyncio.Event()
    first = asyncio.create_task(node.a.read(source))
    await node.engine.asked.wait()
    second = asyncio.create_task(node.b.read(source))
    for _ in range(20):
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    node.engine.gate.set()

    assert await second == DATA
    assert node.engine.bytes_by_url[source.spec.name] == len(DATA)
    await node.close()


async def test_a_borrower_that_stands_still_holds_nothing_of_the_lenders(tmp_path: Path) -> None:
    node = NodeRig(tmp_path, slots=8)
    source = node.put("a.tar", DATA)
    assert len(DATA) > 8 * EXTENT
    node.b.access.note(source.spec.digest)
    node.engine.gate = asyncio.Event()
    first = asyncio.create_task(node.a.read(source))
    await node.engine.asked.wait()
    go_on = asyncio.Event()
    arrived = asyncio.Event()

    def before(extent: int):
        if extent == 1:
            arrived.set()
            return go_on.wait()
        return None

    second = asyncio.create_task(node.b.read(source, before=before))
    node.engine.gate.set()

    assert await first == DATA
    await arrived.wait()
    await node.a.cache.idle()
    assert node.a.pool.table.held_count == 0
    go_on.set()
    assert await second == DATA
    assert node.engine.bytes_by_url[source.spec.name] == len(DATA)
    await node.close()


async def test_what_lies_behind_a_shards_end_is_not_copied(tmp_path: Path) -> None:
    node = NodeRig(None)
    secret = node.put("secret.bin", b"S" * (4 * EXTENT))
    assert len(await node.a.read(secret)) == 4 * EXTENT
    for extent in range(4):
        node.a.pool.disown(secret.spec.digest, extent)
    short = node.put("short.bin", b"x" * 100)

    assert await together(node, short) == (b"x" * 100,) * 2

    slot = node.b.pool.table.find(short.spec.digest, 0)
    assert node.metrics.get("tenant_copied_bytes_total") == 100
    assert bytes(node.b.pool.view(slot)[100:]) == bytes(EXTENT - 100)
    await node.close()


async def test_a_compressed_shard_is_decompressed_once_for_both(tmp_path: Path) -> None:
    node = NodeRig(tmp_path, slots=64)
    source = node.put("a.tar.gz", gzip.compress(DATA))

    assert await together(node, source) == (DATA, DATA)

    assert node.engine.bytes_by_url[source.spec.name] == len(gzip.compress(DATA))
    assert node.metrics.get("tenant_copied_bytes_total") > 0
    await node.close()


async def test_a_compressed_stream_past_the_store_is_not_lent(tmp_path: Path) -> None:
    node = NodeRig(None, slots=64)
    source = node.put("a.tar.gz", gzip.compress(DATA))

    assert await together(node, source) == (DATA, DATA)

    assert node.metrics.get("tenant_copied_bytes_total") == 0
    await node.close()


async def test_an_outage_ends_both_with_its_own_words(tmp_path: Path) -> None:
    node = NodeRig(tmp_path)
    source = node.put("a.tar", DATA)

    async def down(*_, **__) -> None:
        node.engine.asked.set()
        await node.engine.gate.wait()
        raise OriginUnavailableError("the origin is down")

    node.engine.read_into = down
    found = await together(node, source)

    assert [str(error) for error in found] == ["the origin is down"] * 2
    await node.close()
