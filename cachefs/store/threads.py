"""The store's disk threads.

A disk call works on memory and descriptors of the caller. So nobody who awaits one may go on before
it is over, not even when cancelled: the cancellation is raised afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.tasks import finished

_Result = TypeVar("_Result")


class DiskThreads:
    """A small pool for blocking disk calls. Used on the loop's thread."""

    def __init__(self, count: int, clock: Clock) -> None:
        self._executor = ThreadPoolExecutor(count, "gpufeed-disk")
        self._clock = clock
        self._running: set[asyncio.Future[Any]] = set()

    def submit(self, function: Callable[..., _Result], *args: object) -> asyncio.Future[_Result]:
        """Begin `function` in a thread. Whoever drops the future must be done with the memory."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        self._running.add(future)
        future.add_done_callback(self._over)
        return future

    def _over(self, future: asyncio.Future[Any]) -> None:
        self._running.discard(future)
        # Shared results (an open descriptor) may have lost everybody who waited for them.
        _ = future.cancelled() or future.exception()

    async def run(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Run `function` in a thread, to the end."""
        return await finished(self.submit(function, *args))

    async def run_watched(
        self, late_s: float, on_late: Callable[[], None], function: Callable[..., _Result],
        *args: object,
    ) -> _Result:  # fmt: skip
        """As `run`; calls `on_late` once if `function` itself (not its queue) takes `late_s`."""
        watch = _Watch(self._clock, late_s, on_late)
        try:
            return await self.run(watch.timed, function, *args)
        finally:
            watch.timer.cancel()

    async def close(self) -> None:
        """Wait for the calls under way, and end the threads."""
        while self._running:
            await asyncio.wait(set(self._running))
        self._executor.shutdown()


class _Watch:
    """Times one call from its start in the thread, and tells the loop once if it is late."""

    def __init__(self, clock: Clock, late_s: float, on_late: Callable[[], None]) -> None:
        self._clock = clock
        self._late_s = late_s
        self._on_late = on_late
        self._began_s: float | None = None
        self.timer = asyncio.get_running_loop().call_later(late_s, self._look)

    def timed(self, function: Callable[..., _Result], *args: object) -> _Result:
        self._began_s = self._clock.monotonic_s()
        return function(*args)

    def _look(self) -> None:
        began_s = self._began_s
        taken_s = 0.0 if began_s is None else self._clock.monotonic_s() - began_s
        if taken_s >= self._late_s:
            self._on_late()
        else:
            loop = asyncio.get_running_loop()
            self.timer = loop.call_later(self._late_s - taken_s, self._look)
