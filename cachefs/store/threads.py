"""The store's disk threads.

A disk call works on memory and descriptors of the caller. So nobody who awaits one may go on before
it is over, not even when cancelled: the cancellation is raised afterwards. The one exception is a
call that is **late**: `DiskLateError` is raised at once, and carries the future that tells when the
disk has let go; until then its memory stays lent.

Late is what has run for its named time in its thread; waiting for a thread does not count, unless
every thread is held for that long by calls that do not end. Then, and once all of them are late
themselves, those who wait are taken back: they have touched nothing, and fail at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.errors import DiskLateError
from gpufeed.cachefs.tasks import finished, until_done

# The least time between two looks at one call, however little time it has.
LOOK_AGAIN_S = 0.001

_Result = TypeVar("_Result")


class DiskThreads:
    """A small pool for blocking disk calls. Used on the loop's thread."""

    def __init__(self, count: int, clock: Clock) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(count, "gpufeed-disk")
        self.count = count
        self._clock = clock
        self._calls: dict[asyncio.Future[Any], _Call[Any]] = {}
        self._late: set[asyncio.Future[Any]] = set()

    def submit(self, function: Callable[..., _Result], *args: object) -> asyncio.Future[_Result]:
        """Begin `function` in a thread. Whoever drops the future must be done with the memory."""
        call: _Call[_Result] = _Call(self._clock)
        self._calls[call.future] = call
        call.future.add_done_callback(self._over)
        call.job = self._executor.submit(call.run, function, *args)
        return call.future

    def _over(self, future: asyncio.Future[Any]) -> None:
        del self._calls[future]
        self._late.discard(future)
        # Shared results (an open descriptor) may have lost everybody who waited for them.
        _ = future.cancelled() or future.exception()

    @property
    def hangs(self) -> bool:
        """Every thread is held by a call that is late: whoever came now would only wait."""
        return self._all_hang

    async def run(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Run `function` in a thread, to the end however long that takes."""
        return await finished(self.submit(function, *args))

    async def run_in_time(
        self, late_s: float, function: Callable[..., _Result], *args: object
    ) -> _Result:
        """`submit` and `in_time`."""
        return await self.in_time(self.submit(function, *args), late_s)

    async def in_time(self, future: asyncio.Future[_Result], late_s: float) -> _Result:
        """Wait for a submitted call, but not longer than `late_s` from its beginning.

        Raises:
            DiskLateError: it is late, or never began because all threads have been held for
                `late_s`; its `over` is `future`, which is cancelled if it never began.
        """
        call = self._calls.get(future)
        if call is not None:
            await self._watch(future, call, late_s)
        if not future.done():
            raise DiskLateError(
                f"the cache disk has not answered for {late_s:g} s; the cache goes on without it: "
                "check the disk",
                future,
            )
        if future.cancelled():
            raise DiskLateError(
                f"the cache disk does not answer: {self.count} calls hang; the cache goes on "
                "without it: check the disk",
                future,
            )
        return future.result()

    async def _watch(self, future: asyncio.Future[Any], call: _Call[Any], late_s: float) -> None:
        loop = asyncio.get_running_loop()
        known: asyncio.Future[None] = loop.create_future()
        timers: list[asyncio.TimerHandle] = []

        def over(_: asyncio.Future[Any]) -> None:
            if not known.done():
                known.set_result(None)

        def look() -> None:
            left_s = self._left_s(call, late_s)
            if left_s <= 0 and not call.has_begun and not call.take_back():
                left_s = max(late_s, LOOK_AGAIN_S)  # a thread has just taken it up
            if left_s > 0:
                timers[:] = [loop.call_later(left_s, look)]
                return
            self._is_late(future)
            over(future)

        future.add_done_callback(over)
        timers[:] = [loop.call_later(late_s, look)]
        call.watchers_count += 1
        if self._all_hang:
            call.take_back()
        try:
            await known
        except asyncio.CancelledError:
            call.take_back()
            await until_done(future)
            raise
        finally:
            call.watchers_count -= 1
            future.remove_done_callback(over)
            timers[0].cancel()

    def _is_late(self, future: asyncio.Future[Any]) -> None:
        if future in self._calls:
            self._late.add(future)
        if self._all_hang:
            for call in list(self._calls.values()):
                if call.watchers_count:
                    call.take_back()

    def _left_s(self, call: _Call[Any], late_s: float) -> float:
        """How long until a call is late, or, before it began, until all threads are held so long.

        Whatever holds them may have more time itself: a sync does not hold up readers for its own.
        """
        if call.has_begun:
            return late_s - call.age_s
        ages_s = [other.age_s for other in self._calls.values() if other.has_begun]
        if len(ages_s) < self.count:
            return max(late_s, LOOK_AGAIN_S)  # a thread is about to take it up
        return late_s - min(ages_s)

    @property
    def _all_hang(self) -> bool:
        return len(self._late) >= self.count

    async def close(self) -> None:
        """Wait for the calls under way, and end the threads."""
        while self._calls:
            await asyncio.wait(set(self._calls))
        self._executor.shutdown()


class _Call(Generic[_Result]):
    """One call: when it began in its thread, what became of it, and who watches.

    Its result crosses to the loop in one step: `asyncio.wrap_future` takes three, which at 256
    extents a gigabyte is a tenth of what the loop has to do.
    """

    job: concurrent.futures.Future[None]

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None
        self.future: asyncio.Future[_Result] = self._loop.create_future()
        self.watchers_count = 0

    def run(self, function: Callable[..., _Result], *args: object) -> None:
        """In the thread."""
        self._began_s = self._clock.monotonic_s()
        try:
            result = function(*args)
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._fail, error)
        else:
            self._loop.call_soon_threadsafe(self._succeed, result)

    def _fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def _succeed(self, result: _Result) -> None:
        if not self.future.done():
            self.future.set_result(result)

    @property
    def has_begun(self) -> bool:
        """Whether a thread has taken it up."""
        return self._began_s is not None

    @property
    def age_s(self) -> float:
        """How long it has run."""
        return 0.0 if self._began_s is None else self._clock.monotonic_s() - self._began_s

    def take_back(self) -> bool:
        """Cancel it if no thread has begun it; whether that was so."""
        if self._began_s is not None or not self.job.cancel():
            return False
        self.future.cancel()
        return True
