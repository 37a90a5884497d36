"""The engine's two sides: callers on any loop, origins on its own, and ends in order."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import (
    ConfigError,
    NotFoundError,
    OriginUnavailableError,
    UsageError,
)
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin import thread as thread_module
from gpufeed.cachefs.origin.engine import OriginEngine
from gpufeed.cachefs.testing.faulty_origin import FaultyOrigin, OriginFault
from gpufeed.cachefs.testing.memory_origin import MemoryOrigin
from gpufeed.cachefs.testing.origin_contract import Reading, content

URL = "held://place/a"
DATA = content(1000)


@pytest.fixture
def origin():
    return MemoryOrigin({URL: DATA})


@pytest.fixture
async def engine(origin):
    engine = OriginEngine(OriginConfig(), Metrics(), origins={"held": lambda _: origin})
    engine.start()
    yield engine
    await engine.close()


async def test_targets_are_told_on_the_callers_thread_in_order(engine):
    told: list[tuple[int, int]] = []
    reading = Reading(*[100] * 10)
    info = await engine.head(URL)
    await engine.read_into(
        info, 0, reading.targets, lambda i: told.append((i, threading.get_ident()))
    )
    assert told == [(i, threading.get_ident()) for i in range(10)]
    assert reading.memory == DATA


async def test_many_reads_at_once_each_get_their_own(engine):
    info = await engine.head(URL)
    readings = [Reading(10, 0, 5) for _ in range(300)]
    await asyncio.gather(*(r.run(engine, info, i) for i, r in enumerate(readings)))
    for i, reading in enumerate(readings):
        assert reading.memory == DATA[i : i + 15]
        assert reading.reported == [0, 1, 2]


async def test_loops_of_several_threads_share_an_engine(engine):
    info = await engine.head(URL)

    def elsewhere() -> bytes:
        reading = Reading(500)
        asyncio.run(reading.run(engine, info, 0))
        return bytes(reading.memory)

    found = await asyncio.gather(*(asyncio.to_thread(elsewhere) for _ in range(4)))
    assert found == [DATA[:500]] * 4


async def test_targets_received_before_a_failure_are_told_before_it(origin):
    fault = OriginFault("read_into", at=1, after_targets=2)
    faulty = FaultyOrigin(origin, [fault])
    engine = OriginEngine(OriginConfig(), Metrics(), origins={"held": lambda _: faulty})
    engine.start()
    info = await engine.head(URL)
    reading = Reading(100, 100, 100)
    with pytest.raises(OriginUnavailableError, match="asked for"):
        await reading.run(engine, info, 0)
    assert reading.reported == [0, 1]
    await reading.run(engine, info, 0)
    await engine.close()
    assert origin.closed


async def test_a_cancelled_call_ends_after_its_origin_has_let_go(engine, origin):
    info = await engine.head(URL)
    origin.gate.clear()
    running = asyncio.create_task(Reading(10).run(engine, info, 0))
    await asyncio.to_thread(origin.asked.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert origin.cancelled_count == 1
    origin.gate.set()
    assert (await engine.head(URL)).size_bytes == 1000


async def test_a_call_cancelled_before_it_began_ends(engine):
    info = await engine.head(URL)
    for _ in range(100):
        running = asyncio.create_task(Reading(10).run(engine, info, 0))
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_closing_gives_up_what_is_under_way(engine, origin):
    info = await engine.head(URL)
    origin.gate.clear()
    running = asyncio.create_task(Reading(10).run(engine, info, 0))
    await asyncio.to_thread(origin.asked.wait)
    await engine.close()
    with pytest.raises(OriginUnavailableError, match="closed"):
        await running
    assert origin.closed
    origin.gate.set()
    with pytest.raises(OriginUnavailableError, match="not running"):
        await engine.head(URL)
    await engine.close()


async def test_an_engine_never_started_closes(origin):
    await OriginEngine(OriginConfig(), Metrics()).close()


async def test_options_make_another_origin_and_override_the_configuration():
    made: list[OriginConfig] = []

    def make(config: OriginConfig) -> MemoryOrigin:
        made.append(config)
        return MemoryOrigin({URL: DATA})

    config = OriginConfig(endpoint="e1", key="k1", secret="s1", token="t1")
    engine = OriginEngine(config, Metrics(), origins={"held": make})
    engine.start()
    for options in (
        None,
        {},
        {"endpoint": ""},
        {"endpoint": "e2", "unknown": "x"},
        {"endpoint": "e2"},
        {"key": "k2", "secret": "s2"},
    ):
        await engine.head(URL, options)
    await engine.close()
    assert [(c.endpoint, c.key, c.secret, c.token) for c in made] == [
        ("e1", "k1", "s1", "t1"),
        ("e2", "k1", "s1", "t1"),
        ("e1", "k2", "s2", ""),
    ]


async def test_half_a_key_pair_in_the_options_is_refused(engine):
    with pytest.raises(ConfigError, match="belong together"):
        await engine.head(URL, {"key": "k2"})


async def test_too_many_sets_of_options_are_refused(engine, monkeypatch):
    monkeypatch.setattr(thread_module, "ORIGINS_MAX", 2)
    await engine.head(URL)
    await engine.head(URL, {"region": "a"})
    with pytest.raises(UsageError, match="2 different"):
        await engine.head(URL, {"region": "b"})
    await engine.head(URL)


async def test_a_scheme_that_nobody_serves_is_said(engine):
    with pytest.raises(ConfigError, match="unheard"):
        await engine.head("unheard://a/b")


async def test_without_an_endpoint_oss_says_what_to_set(engine):
    with pytest.raises(ConfigError, match=r"origin\.endpoint.*storage_options"):
        await engine.head("oss://bucket/key")


async def test_a_file_is_read_and_a_missing_one_is_named(engine, tmp_path):
    path = tmp_path / "a b.tar"
    path.write_bytes(DATA)
    info = await engine.head(f"file://{path}")
    reading = Reading(500, 500)
    await reading.run(engine, info, 0)
    assert reading.memory == DATA
    with pytest.raises(NotFoundError, match="missing"):
        await engine.head(f"file://{tmp_path}/missing")
    with pytest.raises(NotFoundError, match="not a file"):
        await engine.head(f"file://{tmp_path}")
