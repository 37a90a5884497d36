"""Small asyncio helpers that several parts need."""

from __future__ import annotations

import asyncio
from typing import TypeVar

_Result = TypeVar("_Result")


async def finished(future: asyncio.Future[_Result]) -> _Result:
    """Await `future` to its end even if the caller is cancelled; the cancellation comes after.

    For work that must not be abandoned half-way, and for threads that use the caller's memory.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            # Its error, if any, has nobody else to see it.
            future.exception()
        raise cancelled
    return future.result()
