"""Who may have what others have cached: seen by the tenant's own credentials, kept a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tenants_rig import NodeRig

from gpufeed.cachefs import access as access_module
from gpufeed.cachefs.access import OUTAGE_PROOF_S, PROOF_S
from gpufeed.cachefs.errors import (
    AccessDeniedError,
    OriginUnavailableError,
    ShardChangedError,
)
from gpufeed.cachefs.model import ShardSpec, Source

DATA = bytes(range(256)) * 1000


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NodeRig]:
    node = NodeRig(tmp_path)
    yield node
    await node.close()


async def cached(node: NodeRig):
    source = node.put("x.bin", DATA)
    assert await node.a.read(source) == DATA
    await node.a.cache.idle()
    assert node.store.lookup(source.spec.digest) is not None
    return source


async def test_a_cached_shard_is_refused_to_whoever_may_not_read_it(node) -> None:
    source = await cached(node)
    node.engine.denied.add("b")

    with pytest.raises(AccessDeniedError, match=r"x\.bin is cached, but this tenant's own"):
        await node.b.read(source)

    assert node.metrics.get("access_refused_total") == 1
    assert await node.a.read(source) == DATA


async def test_a_reader_that_nobody_permitted_fetches_with_its_own_credentials(node) -> None:
    source = await cached(node)
    node.engine.denied.add("b")
    reader = node.b.cache.open(node.b.wants(source))
    with pytest.raises(AccessDeniedError):
        await reader.extent(0)
    reader.close()

    ranges = node.b.cache.open_ranges(node.b.wants(source))
    with pytest.raises(AccessDeniedError):
        await ranges.extent(1)
    ranges.close()


async def test_with_permission_it_comes_from_the_store_and_is_looked_up_once(node) -> None:
    source = await cached(node)
    reads = node.engine.reads

    found = await asyncio.gather(*(node.b.read(source) for _ in range(5)))

    assert found == [DATA] * 5
    assert node.engine.reads == reads
    assert node.engine.heads == node.metrics.get("access_checks_total") == 1
    assert await node.b.read(source) == DATA
    assert node.engine.heads == 1


async def test_what_the_own_credentials_fetched_needs_no_further_proof(node) -> None:
    source = await cached(node)
    assert await node.a.read(source) == DATA
    assert node.engine.heads == 0


async def test_a_proof_ages_and_a_refusal_ends_it(node) -> None:
    source = await cached(node)
    await node.b.read(source)
    node.engine.denied.add("b")
    node.clock.advance(PROOF_S - 1)
    assert await node.b.read(source) == DATA
    node.clock.advance(2)
    with pytest.raises(AccessDeniedError):
        await node.b.read(source)


async def test_an_outage_does_not_stop_who_was_let_in_before_it_for_a_while(node) -> None:
    source = await cached(node)
    node.engine.head_failure = OriginUnavailableError("down")
    with pytest.raises(OriginUnavailableError):
        await node.b.read(source)

    node.engine.head_failure = None
    await node.b.read(source)
    node.engine.head_failure = OriginUnavailableError("down")
    node.clock.advance(PROOF_S + 1)
    await node.b.cache.permit(node.b.wants(source))

    node.clock.advance(OUTAGE_PROOF_S)
    with pytest.raises(OriginUnavailableError):
        await node.b.cache.permit(node.b.wants(source))


async def test_another_version_proves_nothing(node) -> None:
    source = await cached(node)
    node.engine.objects["mem://x.bin"] = DATA[::-1]
    with pytest.raises(ShardChangedError, match="overwritten"):
        await node.b.read(source)


async def test_each_object_of_a_shard_is_looked_up(node) -> None:
    infos = []
    for i in range(3):
        url = f"mem://part{i}"
        node.engine.objects[url] = bytes([i]) * 1000
        infos.append(node.engine.info(url))
    spec = ShardSpec("three", 3000, tuple(Source(info, 1000 * i) for i, info in enumerate(infos)))
    source = replace(node.put("any", b"x"), spec=spec)
    await node.a.read(source)
    await node.a.cache.idle()

    assert len(await node.b.read(source)) == 3000
    assert node.engine.heads == 3


async def test_proofs_are_bounded(node, monkeypatch) -> None:
    monkeypatch.setattr(access_module, "PROOFS_MAX", 2)
    for digest in ("one", "two", "three"):
        node.a.access.note(digest)
    assert [node.a.access.is_proven(d) for d in ("one", "two", "three")] == [False, True, True]
