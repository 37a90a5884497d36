"""Waits that cancellation does not cut short.

Memory that a transport or a thread may still write to must not be given back, and a commit must not
be left half-way. Whoever is cancelled meanwhile waits here to the end, and ends then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def until_done(future: asyncio.Future[Any]) -> None:
    """Wait until `future` is done, whatever its result, even if the waiting task is cancelled.

    The caller has already asked for the end of what it waits for, so the wait is short. It is
    called from an ``except CancelledError`` (or from a ``finally``) that re-raises afterwards;
    cancellations that arrive meanwhile add nothing.
    """
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue


async def finished(future: asyncio.Future[_Result]) -> _Result:
    """Await `future` to its end even if the caller is cancelled; the cancellation comes after."""
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        await until_done(future)
        if not future.cancelled():
            # Its error, if any, has nobody else to see it.
            future.exception()
        raise
    return future.result()


async def in_thread(threads: Executor, function: Callable[[threading.Event], _Result]) -> _Result:
    """Run `function` in a thread and end only after it has ended.

    When the caller is cancelled, the event that `function` was given is set: it should end soon.
    """
    stop = threading.Event()
    future = asyncio.get_running_loop().run_in_executor(threads, function, stop)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.set()
        await until_done(future)
        if not future.cancelled():
            future.exception()  # nobody else sees it
        raise
