"""The read API under asyncio, against a real daemon."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
from node import Node, wait_until_gone
from reading_rig import EXTENT, SAMPLES, SHARDS, URL

from gpufeed.cachefs.client import open_async_client
from gpufeed.cachefs.errors import DaemonUnavailableError, NotFoundError, UsageError
from gpufeed.cachefs.testing.pytest_plugin import BUCKET
from gpufeed.cachefs.units import MIB


async def read_all(client, dataset, data, order=None) -> list[str]:
    keys = []
    async for sample in client.samples(dataset, order):
        assert {name: bytes(view) for name, view in sample.items()} == data[sample.key]
        keys.append(sample.key)
    return keys


async def test_tasks_read_streams_side_by_side(node: Node, data) -> None:
    async with open_async_client(node.socket, window_bytes=MIB) as client:
        dataset = await client.open(URL)
        orders = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 2, 2, 2, 2, 2]]
        found = await asyncio.gather(*(read_all(client, dataset, data, one) for one in orders))
        for order, keys in zip(orders, found, strict=True):
            assert keys == [f"{shard:02d}{i:05d}" for shard in order for i in range(SAMPLES)]
        assert client.stats.samples_count == 3 * SHARDS * SAMPLES
    wait_until_gone(node)


async def test_holding_every_sample_never_stalls(node: Node, data) -> None:
    async with open_async_client(node.socket, window_bytes=MIB) as client:
        dataset = await client.open(URL)
        held = [sample async for sample in client.samples(dataset)]
        assert client.stats.copied_count > 0
    gc.collect()
    for sample in held:
        assert {name: bytes(view) for name, view in sample.items()} == data[sample.key]


async def test_a_view_dropped_by_a_thread_wakes_a_task_that_waits(node: Node, data) -> None:
    async with open_async_client(node.socket, window_bytes=2 * EXTENT) as client:
        dataset = await client.open(URL)
        count = 0
        async for sample in client.samples(dataset):
            timer = threading.Timer(0, sample._fields.clear)
            del sample
            timer.start()
            count += 1
        assert count == SHARDS * SAMPLES


async def test_many_ranges_at_once(node: Node, data) -> None:
    whole = (node.bucket / "train-001.tar").read_bytes()
    url = f"oss://{BUCKET}/train-001.tar"
    async with open_async_client(node.socket, window_bytes=4 * MIB) as client:
        asked = [(url, i * 5000, i * 5000 + 9000) for i in range(150)]
        for (_, begin, end), view in zip(asked, await client.read_many(asked), strict=True):
            assert view == whole[begin:end]
            assert view.readonly
        assert await client.read(url) == whole
        assert await client.read(url, len(whole), len(whole) + 1) == b""
        with pytest.raises(NotFoundError):
            await client.read(f"oss://{BUCKET}/nothing", 0, 1)
        with pytest.raises(UsageError, match=r"\[5, 2\)"):
            await client.read(url, 5, 2)
        del view
    wait_until_gone(node)


async def test_cancelled_reads_give_back_what_they_were_lent(node: Node, data) -> None:
    url = f"oss://{BUCKET}/train-001.tar"
    whole = (node.bucket / "train-001.tar").read_bytes()
    async with open_async_client(node.socket, window_bytes=MIB) as client:
        await client.read(url, 0, 1)
        for turns in range(40):
            task = asyncio.ensure_future(client.read(url, 0, 3 * EXTENT))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del task
        # A window of four: it would stall if anything were left lent.
        for _ in range(3):
            assert await client.read(url) == whole
    wait_until_gone(node)


async def test_a_daemon_that_is_replaced_is_found_again(node: Node, data) -> None:
    async with open_async_client(node.socket, window_bytes=MIB) as client:
        dataset = await client.open(URL)
        held, keys = [], []
        async for sample in client.samples(dataset):
            keys.append(sample.key)
            if len(keys) % 9 == 0:
                held.append(sample)
            if len(keys) in (1, 70, 200):
                node.stop(node.processes[-1], 9)
                node.start()
                assert len(await client.read(f"oss://{BUCKET}/train-001.tar", 5, 9)) == 4
        assert keys == list(data)
        assert client.stats.reconnects_count >= 3
        for sample in held:
            assert {name: bytes(view) for name, view in sample.items()} == data[sample.key]


async def test_one_stream_has_one_task(node: Node, data) -> None:
    async with open_async_client(node.socket) as client:
        stream = client.samples(await client.open(URL))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="two tasks"):
            await anext(stream)
        await first
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_nobody_listens_is_said_at_once(node: Node) -> None:
    async with open_async_client(node.socket) as client:
        with pytest.raises(DaemonUnavailableError):
            await client.open(URL)
        with pytest.raises(DaemonUnavailableError):
            await client.read(f"oss://{BUCKET}/train-001.tar", 5, 9)
