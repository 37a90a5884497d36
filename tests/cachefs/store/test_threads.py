"""Late calls: told at once, owned until they end; what waits behind them is taken back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpufeed.cachefs.clock import SystemClock
from gpufeed.cachefs.errors import DiskLateError, StorageError
from gpufeed.cachefs.store.threads import DiskThreads


async def test_a_late_call_is_an_error_that_says_when_it_is_over() -> None:
    threads, gate = DiskThreads(1, SystemClock()), threading.Event()

    with pytest.raises(DiskLateError) as caught:
        await threads.run_in_time(0.01, gate.wait)

    assert not caught.value.over.done()
    gate.set()
    assert await caught.value.over is True
    assert await threads.run_in_time(30.0, int) == 0
    await threads.close()


async def test_calls_behind_late_ones_fail_at_once_and_never_begin() -> None:
    threads, gate = DiskThreads(2, SystemClock()), threading.Event()
    ran: list[int] = []
    queued = [
        asyncio.ensure_future(threads.run_in_time(0.01, gate.wait)),
        asyncio.ensure_future(threads.run_in_time(0.01, gate.wait)),
        asyncio.ensure_future(threads.run_in_time(30.0, ran.append, 1)),
    ]
    await asyncio.sleep(0)  # they are submitted in this order
    unwatched = threads.submit(ran.append, 2)
    found = await asyncio.gather(*queued, return_exceptions=True)

    assert [type(error) for error in found] == [DiskLateError] * 3
    assert [error.over.cancelled() for error in found] == [False, False, True]
    assert not unwatched.done()
    gate.set()
    await unwatched
    assert ran == [2]
    await threads.close()


async def test_calls_that_come_while_all_threads_hang_fail_at_once() -> None:
    threads, gate = DiskThreads(1, SystemClock()), threading.Event()
    with pytest.raises(DiskLateError) as caught:
        await threads.run_in_time(0.01, gate.wait)

    with pytest.raises(StorageError, match="1 calls hang"):
        await asyncio.wait_for(threads.run_in_time(30.0, int), 10)

    gate.set()
    await caught.value.over
    assert await threads.run_in_time(30.0, int) == 0
    await threads.close()


async def test_who_waits_for_a_thread_waits_no_longer_than_its_own_time() -> None:
    threads, gate = DiskThreads(1, SystemClock()), threading.Event()
    patient = asyncio.ensure_future(threads.run_in_time(30.0, gate.wait))
    await asyncio.sleep(0)

    with pytest.raises(DiskLateError) as caught:
        await threads.run_in_time(0.01, int)

    assert caught.value.over.cancelled()
    assert not patient.done()
    gate.set()
    assert await patient is True
    assert await threads.run_in_time(30.0, int) == 0
    await threads.close()


async def test_one_late_call_of_two_threads_holds_up_nobody() -> None:
    threads, gate = DiskThreads(2, SystemClock()), threading.Event()
    with pytest.raises(DiskLateError):
        await threads.run_in_time(0.01, gate.wait)

    assert await asyncio.gather(*(threads.run_in_time(30.0, int) for _ in range(8))) == [0] * 8
    gate.set()
    await threads.close()


async def test_a_cancelled_call_ends_first_unless_it_never_began() -> None:
    threads, gate = DiskThreads(1, SystemClock()), threading.Event()
    running = asyncio.ensure_future(threads.run_in_time(30.0, gate.wait))
    queued = asyncio.ensure_future(threads.run_in_time(30.0, int))
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    await threads.close()
