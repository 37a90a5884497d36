"""Every call that the cache makes fails once in turn, while two readers read a set of shards.

Whichever it is: right bytes or one clear error, then right bytes; nothing is left, the gauges are
at zero, and the capacity is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import zstandard
from cache_rig import EXTENT, Rig, make_tar, members

from gpufeed.cachefs.cache import ShardSource
from gpufeed.cachefs.errors import GpufeedError, OriginUnavailableError, StorageError
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.store.files import DiskFiles
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.testing.faulty_files import FaultyFiles
from gpufeed.cachefs.testing.memory_engine import MemoryEngine

CAPACITY = 24 * EXTENT
CALLS_MAX = 500
TARS = [make_tar(14), make_tar(30), make_tar(20)]
NAMES = ["a.tar", "b.tar.zst", "c.tar"]


class FaultyEngine(MemoryEngine):
    """Its n-th call, of either kind, fails."""

    def __init__(self, fail_at: int = 0) -> None:
        super().__init__()
        self.calls = 0
        self.fail_call = fail_at
        # So that the checksum has to be asked for, by a call of its own.
        self.tells_crc = False

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.fail_call:
            raise OriginUnavailableError("a fault that the test asked for")

    async def head(self, url: str, options: Mapping[str, str] | None = None) -> ObjectInfo:
        """See `Engine`."""
        self._count()
        return await super().head(url, options)

    async def read_into(
        self, info: ObjectInfo, begin_bytes: int, targets: Sequence[memoryview],
        on_target: Callable[[int], None], options: Mapping[str, str] | None = None, *,
        demand: bool = True,
    ) -> int | None:  # fmt: skip
        """See `Engine`."""
        self._count()
        return await super().read_into(
            info, begin_bytes, targets, on_target, options, demand=demand
        )


def sources_of(rig: Rig) -> list[ShardSource]:
    compress = zstandard.ZstdCompressor().compress
    return [
        rig.tar(name, compress(data) if name.endswith(".zst") else data)
        for name, data in zip(NAMES, TARS, strict=True)
    ]


async def read_twice(rig: Rig, sources: list[ShardSource]) -> list[GpufeedError]:
    """Two readers, two rounds, from opposite ends; errors are returned, wrong bytes are not."""
    expected = {s.spec.digest: members(data) for s, data in zip(sources, TARS, strict=True)}
    errors: list[GpufeedError] = []

    async def one(order: list[ShardSource]) -> None:
        for source in order * 2:
            try:
                found = await rig.read(source)
            except GpufeedError as error:
                errors.append(error)
            else:
                assert found == expected[source.spec.digest]
            assert rig.metrics.get("store_resident_bytes") <= CAPACITY

    async with asyncio.timeout(60):
        await asyncio.gather(one(sources), one(sources[::-1]))
        await rig.cache.idle()
    return errors


def check_disk(path: Path) -> None:
    """What is there is whole shards, within the capacity."""
    files = [p for p in path.rglob("*") if p.is_file()]
    assert not [p for p in files if p.suffix == ".tmp"]
    assert sum(p.stat().st_size for p in files if p.parent.parent.name == "shards") <= CAPACITY


async def test_every_call_to_the_origin_fails_once(tmp_path: Path) -> None:
    for n in range(1, CALLS_MAX):
        engine = FaultyEngine(n)
        rig = Rig(tmp_path / str(n), slots=8, capacity=CAPACITY, engine=engine)
        sources = sources_of(rig)

        errors = await read_twice(rig, sources)
        has_failed = engine.calls >= n
        engine.fail_call = 0
        assert not await read_twice(rig, sources)

        # One for each reader of the shard.
        assert len(errors) <= 2
        assert {type(error) for error in errors} <= {OriginUnavailableError}
        await rig.close()
        check_disk(tmp_path / str(n))
        if not has_failed:
            assert n > 2 * len(NAMES)
            return
    pytest.fail("never got through")


@pytest.mark.parametrize("method", ["write_extent", "commit", "read_extent", "sample_index"])
async def test_every_call_to_the_store_fails_once_and_no_reader_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    calls, fail_at = 0, 0
    true = getattr(ShardStore, method)

    async def faulty(store: ShardStore, *arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            if method == "commit":
                # It leaves nothing where it fails.
                await store.abort(arguments[0])
            raise StorageError("a fault that the test asked for")
        return await true(store, *arguments)

    monkeypatch.setattr(ShardStore, method, faulty)
    for fail_at in range(1, CALLS_MAX):
        calls = 0
        rig = Rig(tmp_path / str(fail_at), slots=8, capacity=CAPACITY, engine=FaultyEngine())

        assert not await read_twice(rig, sources_of(rig))

        await rig.close()
        check_disk(tmp_path / str(fail_at))
        if calls < fail_at:
            assert fail_at > 2
            return
    pytest.fail("never got through")


@pytest.mark.slow
@pytest.mark.parametrize("happens_anyway", [False, True])
async def test_every_call_to_the_disk_fails_once_and_no_reader_notices(
    tmp_path: Path, happens_anyway: bool
) -> None:
    for n in range(1, CALLS_MAX):
        files = FaultyFiles(DiskFiles(), happens_anyway=happens_anyway)
        path = tmp_path / str(n)
        rig = Rig(path, slots=8, capacity=CAPACITY, engine=FaultyEngine(), files=files)
        files.fail_at = files.calls_count + n

        assert not await read_twice(rig, sources_of(rig))

        has_failed = files.calls_count >= files.fail_at
        await rig.close()
        check_disk(path)
        if not has_failed:
            assert n > 2 * len(NAMES)
            return
    pytest.fail("never got through")
