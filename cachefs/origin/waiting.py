"""Waits that cancellation does not cut short.

Memory that somebody may still write to must not be given back. Whoever is cancelled while a
transport or a thread holds it first makes that holder let go, then waits here, then ends.
"""

from __future__ import annotations

import asyncio
from typing import Any


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
