"""What every origin must do, as tests: derive from `OriginContract` and say how objects get there.

::

    class TestMine(OriginContract):
        @pytest.fixture
        def rig(self, tmp_path):
            yield MyRig(...)

The origin is driven through an `OriginEngine`, as the daemon does it.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Protocol

import pytest

from gpufeed.cachefs import checksum
from gpufeed.cachefs.errors import NotFoundError, ShardChangedError, UsageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.origin.engine import OriginEngine


class OriginRig(Protocol):
    """A place with an origin in front.

    Attributes:
        prefix: an address that ends with ``/``; the contract uses what is below it.
        counts_metrics: whether the origin counts requests and bytes.
    """

    prefix: str
    counts_metrics: bool

    def make_engine(self, metrics: Metrics) -> OriginEngine:
        """An engine that reads `prefix`; not started."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Create or overwrite the object ``prefix + name``."""
        ...

    def remove(self, name: str) -> None:
        """Delete it."""
        ...


def content(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that do not repeat."""
    return random.Random(seed).randbytes(size_bytes)  # noqa: S311 repeatable on purpose


class Reading:
    """Targets of the given lengths, one piece of memory, and the order of their reports."""

    def __init__(self, *lengths_bytes: int) -> None:
        self.memory = bytearray(sum(lengths_bytes))
        view = memoryview(self.memory)
        self.targets = []
        for length in lengths_bytes:
            self.targets.append(view[:length])
            view = view[length:]
        self.reported: list[int] = []

    async def run(self, engine: OriginEngine, info: ObjectInfo, begin_bytes: int) -> int | None:
        """Read."""
        return await engine.read_into(info, begin_bytes, self.targets, self.reported.append)


class OriginContract:
    """The tests. `rig` is the deriving class's fixture."""

    @pytest.fixture
    def metrics(self) -> Metrics:
        """Of the engine under test."""
        return Metrics()

    @pytest.fixture
    async def engine(self, rig: OriginRig, metrics: Metrics) -> AsyncIterator[OriginEngine]:
        """Started, and closed after the test."""
        engine = rig.make_engine(metrics)
        engine.start()
        yield engine
        await engine.close()

    async def test_head_tells_size_and_a_version(
        self, rig: OriginRig, engine: OriginEngine
    ) -> None:
        """Also a checksum, where there is one, that is right."""
        data = content(1000)
        rig.put("a", data)
        info = await engine.head(rig.prefix + "a")
        assert (info.url, info.size_bytes) == (rig.prefix + "a", 1000)
        assert info.etag
        assert '"' not in info.etag
        assert info.crc64 in (None, checksum.crc64(data))

    async def test_head_of_nothing_says_so(self, rig: OriginRig, engine: OriginEngine) -> None:
        """With the address in the message."""
        with pytest.raises(NotFoundError, match="nothing-here"):
            await engine.head(rig.prefix + "nothing-here")

    async def test_a_listing_is_complete_sorted_and_agrees_with_head(
        self, rig: OriginRig, engine: OriginEngine
    ) -> None:
        """Folders are searched to the bottom; odd characters in names survive."""
        names = ["b/2", "b/10", "a", "b/é ü+%41.bin", "c/d/e"]
        for i, name in enumerate(names):
            rig.put(name, content(10 + i, i))
        infos = await engine.list(rig.prefix)
        assert [info.url for info in infos] == sorted(rig.prefix + name for name in names)
        for info in infos:
            head = await engine.head(info.url)
            assert (head.size_bytes, head.etag) == (info.size_bytes, info.etag)
            reading = Reading(info.size_bytes)
            await reading.run(engine, info, 0)
            assert reading.memory == content(info.size_bytes, info.size_bytes - 10)

    async def test_a_listing_is_of_the_prefix_alone(
        self, rig: OriginRig, engine: OriginEngine
    ) -> None:
        """A prefix need not end at a slash."""
        for name in ("train-1", "train-2", "test-1", "trainer/x"):
            rig.put(name, b"x")
        infos = await engine.list(rig.prefix + "train-")
        assert [info.url for info in infos] == [rig.prefix + "train-1", rig.prefix + "train-2"]

    async def test_a_folder_is_listed_one_level_deep(
        self, rig: OriginRig, engine: OriginEngine
    ) -> None:
        """Objects as a head tells them, folders once each, siblings with the same start apart."""
        for name in ("f/a", "f/sub/1", "f/sub/2", "f/sub/deep/3", "f/sub.x", "fg"):
            rig.put(name, content(10, len(name)))
        folder = rig.prefix + "f/"
        found = [info for info in await engine.list_folder(folder) if info.url != folder]
        assert sorted(info.url for info in found) == [
            f"{folder}a",
            f"{folder}sub.x",
            f"{folder}sub/",
        ]
        for info in found:
            if not info.url.endswith("/"):
                head = await engine.head(info.url)
                assert (head.size_bytes, head.etag) == (info.size_bytes, info.etag)
        assert await engine.has_folder(folder)
        assert await engine.has_folder(f"{folder}sub/")
        assert not await engine.has_folder(rig.prefix + "no-such-folder/")
        assert await engine.list_folder(rig.prefix + "no-such-folder/") == []
        with pytest.raises(UsageError, match="more than 2"):
            await engine.list_folder(folder, limit_count=2)

    async def test_a_listing_of_nothing_is_empty(
        self, rig: OriginRig, engine: OriginEngine
    ) -> None:
        """Who asked decides what that means."""
        rig.put("a", b"x")
        assert await engine.list(rig.prefix + "no-such-folder/") == []

    async def test_a_listing_beyond_the_limit_is_refused(
        self, rig: OriginRig, engine: OriginEngine
    ) -> None:
        """Memory is bounded."""
        for i in range(3):
            rig.put(f"{i}", b"x")
        assert len(await engine.list(rig.prefix, limit_count=3)) == 3
        with pytest.raises(UsageError, match="more than 2"):
            await engine.list(rig.prefix, limit_count=2)

    @pytest.mark.parametrize("begin_bytes", [0, 1, 70_000])
    async def test_a_range_lands_in_the_targets_in_order(
        self, rig: OriginRig, engine: OriginEngine, begin_bytes: int
    ) -> None:
        """Also in empty ones; each is reported once, before the call ends."""
        data = content(300_000)
        rig.put("a", data)
        info = await engine.head(rig.prefix + "a")
        reading = Reading(0, 100_000, 1, 0, 4096, 0)
        await reading.run(engine, info, begin_bytes)
        assert reading.memory == data[begin_bytes : begin_bytes + 104_097]
        assert reading.reported == list(range(6))

    async def test_a_whole_object_and_its_last_byte_can_be_read(
        self, rig: OriginRig, engine: OriginEngine, metrics: Metrics
    ) -> None:
        """The checksum told, if any, is the whole object's."""
        data = content(200_000)
        rig.put("a", data)
        info = await engine.head(rig.prefix + "a")
        whole, last = Reading(200_000), Reading(1)
        assert await whole.run(engine, info, 0) in (None, checksum.crc64(data))
        await last.run(engine, info, 199_999)
        assert whole.memory == data
        assert last.memory == data[-1:]
        if rig.counts_metrics:
            assert metrics.get("origin_requests_total") >= 2
            assert metrics.get("origin_bytes_total") == 200_001
        assert metrics.get("origin_in_flight") == 0

    async def test_an_empty_object_can_be_read(self, rig: OriginRig, engine: OriginEngine) -> None:
        """Its target is reported too."""
        rig.put("a", b"")
        info = await engine.head(rig.prefix + "a")
        reading = Reading(0)
        await reading.run(engine, info, 0)
        assert (info.size_bytes, reading.reported) == (0, [0])

    async def test_an_overwritten_object_is_an_error_with_both_versions(
        self, rig: OriginRig, engine: OriginEngine
    ) -> None:
        """Nothing of the new version is reported as the old one."""
        rig.put("a", content(5000, 1))
        info = await engine.head(rig.prefix + "a")
        rig.put("a", content(6000, 2))
        now = await engine.head(rig.prefix + "a")
        assert now.etag != info.etag
        reading = Reading(5000)
        with pytest.raises(ShardChangedError) as caught:
            await reading.run(engine, info, 0)
        assert info.etag in str(caught.value)
        assert now.etag in str(caught.value)
        assert reading.reported == []

    async def test_a_removed_object_is_not_found(
        self, rig: OriginRig, engine: OriginEngine
    ) -> None:
        """Not a changed one."""
        rig.put("a", b"abc")
        info = await engine.head(rig.prefix + "a")
        rig.remove("a")
        with pytest.raises(NotFoundError):
            await Reading(3).run(engine, info, 0)
