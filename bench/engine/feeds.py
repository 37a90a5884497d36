"""gpufeed's own rows: the origin engine alone, and a cold fill to the disk, end to end.

`EngineClient` receives parts into the arena, as a fill has them received. `FillClient` is a daemon
in this process, on a loop that has nothing else to do, that is asked to prefetch shards which it
does not have: receive, find the samples, checksum, write past the page cache, commit durably. What
it stored is then read back from the disk and compared.

Both tell how late timers of the calling loop were meanwhile: that is the loop of the sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from gpufeed.bench.engine.clients import (
    LoopClient,
    Memory,
    Part,
    Setting,
    require_crc,
    touch,
)
from gpufeed.bench.engine.lateness import TimerLateness
from gpufeed.bench.engine.objects import (
    ACCESS_KEY,
    ACCESS_SECRET,
    BUCKET,
    REGION,
    Source,
    StoredObject,
)
from gpufeed.cachefs.arena.memfd import Arena
from gpufeed.cachefs.cache import ShardSource
from gpufeed.cachefs.checksum import CRC64_EMPTY, crc64
from gpufeed.cachefs.config import ArenaConfig, OriginConfig, StoreConfig
from gpufeed.cachefs.errors import IntegrityError, StorageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo, ShardSpec
from gpufeed.cachefs.model import Source as ShardPart
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.sources import Indexer
from gpufeed.cachefs.tarscan import TarIndexer
from gpufeed.cachefs.units import BLOCK_BYTES, GIB, MIB, round_up
from gpufeed.daemon.config import DaemonConfig, Settings
from gpufeed.daemon.listen import listening
from gpufeed.daemon.supervisor import running

EXTENT_BYTES = 4 * MIB
ARENA_BYTES = 256 * MIB
# As many as keep eight requests under way while nobody waits for a shard.
FILLS_IN_FLIGHT = 2
# An arena has at least this many slots.
_SLOTS_MIN = 8


def origin_config(setting: Setting) -> OriginConfig:
    """How the origin engine is told to reach the source."""
    return OriginConfig(
        endpoint=setting.source.endpoint,
        region=REGION,
        key=ACCESS_KEY,
        secret=ACCESS_SECRET,
        part_bytes=setting.part_bytes,
        connections_max=setting.connections,
        threads=setting.origin_threads,
        requests_per_s_max=1e6,
    )


def url_of(item: StoredObject) -> str:
    """The object's address."""
    return f"oss://{BUCKET}/{item.key}"


class ArenaMemory(Memory):
    """The arena's memory for the objects of a lap: a sealed memfd, locked as it is touched."""

    def __init__(self, count: int, each_bytes: int) -> None:
        self._arena = Arena(
            ArenaConfig(
                size_bytes=max(count, _SLOTS_MIN) * round_up(each_bytes, EXTENT_BYTES),
                extent_bytes=round_up(each_bytes, EXTENT_BYTES),
            )
        )
        for number in range(count):
            touch(self._arena.slot(number))

    def of(self, number: int, size_bytes: int) -> memoryview:
        """See `Memory`."""
        return self._arena.slot(number)[:size_bytes]

    def close(self) -> None:
        """See `Memory`."""
        self._arena.close()


class EngineClient(LoopClient):
    """See the top of the file."""

    new_loop = uvloop.new_event_loop

    def make_memory(self, count: int, each_bytes: int) -> Memory:
        """See `BufferClient`."""
        return ArenaMemory(count, each_bytes)

    async def start(self) -> None:
        """See `LoopClient`."""
        self._lateness = TimerLateness()
        self._engine = OriginEngine(origin_config(self.setting), Metrics())
        self._engine.start()
        self._infos = {
            item.key: await self._engine.head(url_of(item)) for item in self.setting.source.objects
        }

    async def run_lap(self, parts: Iterator[Part]) -> None:
        """See `LoopClient`."""
        self._lateness.start()
        try:
            await super().run_lap(parts)
        finally:
            self._lateness.stop()

    async def get(self, part: Part) -> None:
        """See `LoopClient`."""
        targets = [
            part.target[begin : begin + EXTENT_BYTES]
            for begin in range(0, len(part.target), EXTENT_BYTES)
        ]
        info = self._infos[part.item.key]
        await self._engine.read_into(info, part.begin_bytes, targets, _ignore)

    async def stop(self) -> None:
        """See `LoopClient`."""
        await self._engine.close()

    def notes(self) -> dict[str, float]:
        """See `Client`."""
        return self._lateness.milliseconds()


def _ignore(_: int) -> None:
    """Nobody waits for a single extent here."""


class FillClient:
    """See the top of the file. Satisfies `Client`; a lap is everything.

    Args:
        setting: of the run.
        finds_samples: the shards are tars whose samples are looked up as they stream by.
    """

    def __init__(self, setting: Setting, *, finds_samples: bool = False) -> None:
        self.setting = setting
        self._finds_samples = finds_samples
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._parts = AsyncExitStack()
        self._lateness = TimerLateness()

    def open(self) -> None:
        """See `Client`."""
        self._runner.run(self._open())
        self.receive(self.setting.source.objects[:1])
        self.check(self.setting.source.objects[:1])

    async def _open(self) -> None:
        settings = daemon_settings(self.setting)
        listener = self._parts.enter_context(listening(settings.daemon.socket_path, wait=False))
        daemon = await self._parts.enter_async_context(running(settings, listener, embedded=True))
        self._cache = daemon.cache
        arena = self._cache.tools.pool.arena
        for slot in range(arena.slot_count):
            touch(arena.slot(slot))
        self._shards = {
            item.key: self._shard(await self._cache.tools.engine.head(url_of(item)))
            for item in self.setting.source.objects
        }

    def _shard(self, info: ObjectInfo) -> ShardSource:
        spec = ShardSpec(name=info.url, size_bytes=info.size_bytes, sources=(ShardPart(info, 0),))

        def indexer(spec: ShardSpec) -> Indexer | None:
            return TarIndexer(spec.name) if self._finds_samples else None

        return ShardSource(spec=spec, make_indexer=indexer)

    def laps(self) -> Iterator[Sequence[StoredObject]]:
        """See `Client`."""
        yield self.setting.source.measured

    def receive(self, lap: Sequence[StoredObject]) -> None:
        """See `Client`."""
        self._runner.run(self._fill(iter(lap)))

    async def _fill(self, items: Iterator[StoredObject]) -> None:
        async def one_at_a_time() -> None:
            for item in items:
                task = self._cache.prefetch(self._shards[item.key])
                if task is None:
                    raise StorageError(f"{item.key}: the store has no room; free space on the disk")
                await task

        self._lateness.start()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(FILLS_IN_FLIGHT):
                    group.create_task(one_at_a_time())
        finally:
            self._lateness.stop()

    def check(self, lap: Sequence[StoredObject]) -> None:
        """See `Client`: from the disk, past the arena."""
        self._runner.run(self._check(lap))

    async def _check(self, lap: Sequence[StoredObject]) -> None:
        pool = self._cache.tools.pool
        for item in lap:
            source = self._shards[item.key]
            digest = source.spec.digest
            if self._cache.tools.store.lookup(digest) is None:
                raise StorageError(
                    f"{item.key} was received but not kept; the cache disk at "
                    f"{self.setting.directory} is full or refuses writes"
                )
            pool.forget(digest)
            reader = self._cache.open(source)
            found = CRC64_EMPTY
            for extent in range(source.spec.extent_count(EXTENT_BYTES)):
                slot, tier = await reader.extent(extent)
                found = crc64(pool.view(slot)[: reader.length(extent)], found)
                pool.drop(slot)
                if tier != "nvme":
                    raise IntegrityError(f"{item.key}: extent {extent} came from {tier}, not nvme")
            reader.close()
            require_crc(item, found)

    def notes(self) -> dict[str, float]:
        """See `Client`."""
        return self._lateness.milliseconds()

    def close(self) -> None:
        """See `Client`."""
        self._runner.run(self._parts.aclose())
        self._runner.close()


def daemon_settings(setting: Setting) -> Settings:
    """A daemon of the usual kind, with its cache in the engine's directory."""
    directory = Path(setting.directory)
    return Settings(
        origin=origin_config(setting),
        store=StoreConfig(
            path=str(directory / "store"), capacity_bytes=capacity_needed(setting.source)
        ),
        arena=ArenaConfig(size_bytes=ARENA_BYTES, extent_bytes=EXTENT_BYTES),
        daemon=DaemonConfig(socket_path=setting.socket_path, http_port=-1),
    )


def capacity_needed(source: Source) -> int:
    """Bytes of the cache that hold all objects, their descriptions and padding."""
    held = sum(round_up(item.size_bytes, BLOCK_BYTES) + MIB for item in source.objects)
    return held + GIB // 16
