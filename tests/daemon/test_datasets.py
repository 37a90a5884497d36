"""Opening datasets: what is asked for outlives whoever asked, but not the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from gpufeed.cachefs.clock import SystemClock
from gpufeed.cachefs.config import StoreConfig
from gpufeed.cachefs.errors import ConfigError, NotFoundError, UsageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.daemon.datasets import Datasets, Rights, Wanted

WANTED = Wanted(urls=("oss://bucket/a.tar",))


class HeldEngine:
    """Answers no HEAD until it is told to, and then that there is nothing."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.heads_count = 0

    async def head(self, url: str, options: Mapping[str, str] | None = None) -> ObjectInfo:
        self.heads_count += 1
        self.asked.set()
        await self.answer.wait()
        raise NotFoundError(f"{url} does not exist")


@pytest.fixture
def engine() -> HeldEngine:
    return HeldEngine()


@pytest.fixture
def datasets(engine: HeldEngine) -> Datasets:
    store = ShardStore.open(
        StoreConfig(), extent_bytes=1 << 20, metrics=Metrics(), clock=SystemClock()
    )
    rights = Rights(allow=("oss://",), endpoint="https://oss-cn-hangzhou-internal.aliyuncs.com")
    return Datasets(engine, store, rights, extent_bytes=1 << 20)


async def test_sessions_that_ask_for_the_same_share_one_answer(datasets, engine) -> None:
    asking = [asyncio.ensure_future(datasets.open(WANTED)) for _ in range(3)]
    await engine.asked.wait()
    engine.answer.set()
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [NotFoundError] * 3
    assert engine.heads_count == 1


async def test_a_file_whose_name_is_no_text_is_named(datasets, engine) -> None:
    async def found(url: str, options: Mapping[str, str] | None, *, limit_count: int) -> list:
        return [ObjectInfo(f"{url}a.tar", 10240, "1"), ObjectInfo(f"{url}b\udcff.tar", 10240, "1")]

    engine.list = found
    with pytest.raises(UsageError, match=r"b\\udcff\.tar' has a name that is not UTF-8"):
        await datasets.open(Wanted(urls=("oss://bucket/",)))


async def test_closing_ends_what_is_still_being_listed(datasets, engine) -> None:
    asking = asyncio.ensure_future(datasets.open(WANTED))
    await engine.asked.wait()
    asking.cancel()
    before = asyncio.all_tasks()
    await datasets.close()
    await asyncio.gather(asking, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert len(before) > 1


async def test_the_same_address_at_a_strange_endpoint_is_another_shard(datasets, engine) -> None:
    async def found(url: str, options: Mapping[str, str] | None, *, limit_count: int) -> list:
        return [ObjectInfo(f"{url}a.tar", 10240, "the etag that both say")]

    engine.list = found

    async def digest(**options: str) -> str:
        wanted = Wanted(urls=("oss://bucket/",), options=tuple(options.items()))
        return (await datasets.open(wanted)).sources[0].spec.digest

    own = await digest()
    assert await digest(endpoint="oss-cn-hangzhou.aliyuncs.com") == own
    assert await digest(key="k", secret="s") == own
    forged = await digest(endpoint="http://127.0.0.1:8080")
    assert forged != own
    assert await digest(endpoint="http://127.0.0.1:8081") not in (own, forged)
    with pytest.raises(ConfigError, match="no address"):
        await digest(endpoint="http://[")
