"""A cache for tests: a real arena and store, over an engine of the test's choice."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import tarfile
from pathlib import Path

from gpufeed.cachefs.arena.memfd import Arena
from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.cache import KnownIndexer, ShardCache, ShardSource
from gpufeed.cachefs.clock import SystemClock
from gpufeed.cachefs.config import EXPANSION_RATIO_MAX, ArenaConfig, OriginConfig, StoreConfig
from gpufeed.cachefs.errors import PastEndError
from gpufeed.cachefs.filltools import Engine, FillTools
from gpufeed.cachefs.inflight import InFlight
from gpufeed.cachefs.listing import tar_shards, virtual_shards
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.store.files import Files
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.tarscan import TarIndexer
from gpufeed.cachefs.testing.memory_engine import MemoryEngine
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, REGION, SECRET
from gpufeed.cachefs.testing.standin.process import StandinProcess

EXTENT = 64 * 1024
GAUGES = ("fills_in_flight", "store_reserved_bytes", "arena_leased_slots", "in_flight_bytes")
RANDOM = random.Random(7)


def make_tar(count: int, size: int = 9000) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for i in range(count):
            for ext, data in (("jpg", RANDOM.randbytes(size + i)), ("cls", str(i % 7).encode())):
                info = tarfile.TarInfo(f"{i:05d}.{ext}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


class Rig:
    """A cache over a memory engine and a real arena and store."""

    def __init__(
        self, path: Path | None, *, slots: int = 16, capacity: int = 64 << 20,
        engine: Engine | None = None, metrics: Metrics | None = None, files: Files | None = None,
        expansion_ratio_max: float = EXPANSION_RATIO_MAX,
    ) -> None:  # fmt: skip
        self.metrics = metrics or Metrics()
        self.engine = engine or MemoryEngine()
        config = ArenaConfig(size_bytes=slots * EXTENT, extent_bytes=EXTENT)
        self.arena = Arena(config)
        self.in_flight = InFlight.of_arena(config, part_bytes=2 * EXTENT, metrics=self.metrics)
        self.pool = SlotPool(self.arena, self.metrics)
        self.store = ShardStore.open(
            StoreConfig(path=str(path or ""), capacity_bytes=capacity, free_floor_ratio=0.0),
            extent_bytes=EXTENT, metrics=self.metrics, clock=SystemClock(), files=files,
        )  # fmt: skip
        tools = FillTools(
            engine=self.engine, store=self.store, pool=self.pool, metrics=self.metrics,
            extent_bytes=EXTENT, part_bytes=2 * EXTENT,
            in_flight=self.in_flight, expansion_ratio_max=expansion_ratio_max,
        )  # fmt: skip
        self.cache = ShardCache(tools)

    def tar(self, name: str, data: bytes) -> ShardSource:
        self.engine.objects[f"mem://{name}"] = data
        (spec,) = tar_shards([self.engine.info(f"mem://{name}")])
        return ShardSource(spec=spec, make_indexer=lambda s: TarIndexer(s.name))

    def whole(self, url: str) -> ShardSource:
        """An object of any format, decompressed where its name says so."""
        (spec,) = tar_shards([self.engine.info(url)])
        return ShardSource(spec=spec, make_indexer=lambda _: None)

    async def read_bytes(self, source: ShardSource, *, pause: int = 0) -> bytes:
        """Everything of a shard, with so many turns of the loop between extents."""
        reader = self.cache.open(source)
        data, extent = b"", 0
        try:
            with contextlib.suppress(PastEndError):
                while True:
                    slot, _ = await reader.extent(extent)
                    data += bytes(self.pool.view(slot)[: reader.length(extent)])
                    self.pool.drop(slot)
                    extent += 1
                    for _ in range(pause):
                        await asyncio.sleep(0)
            await reader.finish()
        finally:
            reader.close()
        return data

    def loose(self, objects: dict[str, bytes]) -> list[ShardSource]:
        for name, data in objects.items():
            self.engine.objects[f"mem://p/{name}"] = data
        infos = [self.engine.info(f"mem://p/{name}") for name in sorted(objects)]
        shards = virtual_shards(
            infos, prefix="mem://p/", shard_bytes=4 * EXTENT, extent_bytes=EXTENT
        )
        return [
            ShardSource(spec=s.spec, make_indexer=lambda _, i=s.index: KnownIndexer(i))
            for s in shards
        ]

    async def read(self, source: ShardSource, tiers: set[str] | None = None) -> dict[str, bytes]:
        """Everything of a shard, as samples would be cut out of it: key.ext -> bytes."""
        reader = self.cache.open(source)
        try:
            data, samples, seen, extent = b"", [], 0, 0
            while True:
                try:
                    slot, tier = await reader.extent(extent)
                except PastEndError:
                    break
                if tiers is not None:
                    tiers.add(tier)
                data += bytes(self.pool.view(slot)[: reader.length(extent)])
                self.pool.drop(slot)
                for index in reader.samples(seen, extent + 1):
                    seen += len(index)
                    samples += list(index)
                extent += 1
            assert extent == reader.extent_count
            await reader.finish()
            for index in reader.samples(seen, reader.extent_count + 1):
                samples += list(index)
        finally:
            reader.close()
        return {
            f"{ref.key}.{m.ext}": data[m.offset_bytes : m.offset_bytes + m.size_bytes]
            for ref in samples
            for m in ref.members
        }

    async def close(self) -> None:
        await self.cache.close()
        self.pool.table.check()
        assert self.pool.table.held_count == 0
        assert self.cache.fills_count == 0
        for gauge in (
            "fills_in_flight",
            "store_reserved_bytes",
            "arena_leased_slots",
            "in_flight_bytes",
        ):
            assert self.metrics.get(gauge) == 0, gauge
        await self.store.close()
        self.arena.close()
        if isinstance(self.engine, OriginEngine):
            await self.engine.close()


def members(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}


def put_object(standin: StandinProcess, name: str, data: bytes) -> None:
    """An object in the stand-in's bucket."""
    Path(standin.root, BUCKET, name).write_bytes(data)


def oss_rig(standin: StandinProcess, path: Path | None, *, slots: int = 16) -> Rig:
    """A cache over a real engine; `close` ends that too."""
    metrics = Metrics()
    config = OriginConfig(endpoint=standin.endpoint, region=REGION, key=KEY, secret=SECRET)
    engine = OriginEngine(config, metrics)
    engine.start()
    return Rig(path, slots=slots, engine=engine, metrics=metrics)


async def whole_object(rig: Rig, name: str) -> ShardSource:
    """A tar of the stand-in's bucket as a shard, or any object, read as it is."""
    info = await rig.engine.head(f"oss://{BUCKET}/{name}")
    (spec,) = tar_shards([info])
    is_tar = name.endswith(".tar")
    return ShardSource(spec=spec, make_indexer=lambda s: TarIndexer(s.name) if is_tar else None)
