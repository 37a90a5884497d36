"""One call's way from the caller's event loop to the engine's and back.

It costs one `call_soon_threadsafe` each way, since at thousands of small objects a second the
wake-ups are what a read costs most. Targets that arrive earlier than the answer are told in
batches, as many as there are when the caller's loop comes to it; the last comes with the answer.

Invariants: `run` ends only after the task on the engine's loop has ended, also when its caller is
cancelled (the cancellation is passed on and waited for); every target is told before it ends.

Threads: `run`, `_settle` and `_tell` are the caller's; `arrived`, `_begin`, `_stop` and `_done` the
engine's. They share a deque and flags, each written by one side at a time under the interpreter's
lock.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from gpufeed.cachefs.errors import OriginUnavailableError
from gpufeed.cachefs.tasks import until_done

_Result = TypeVar("_Result")
Make = Callable[["Crossing[_Result]"], Coroutine[Any, Any, _Result]]


class Crossing(Generic[_Result]):
    """See the top of the file. Made and run on the caller's loop, once.

    Args:
        there: the engine's loop.
        tasks: the engine's tasks under way; the call's own is in it while it lasts.
        make: called on the engine's loop, gives the coroutine to run there.
        on_target: is told the numbers given to `arrived`, on the caller's loop.
        target_count: how many there will be.
    """

    __slots__ = (
        "_arrived",
        "_ended",
        "_here",
        "_is_settled",
        "_is_telling",
        "_make",
        "_on_target",
        "_outcome",
        "_target_count",
        "_task",
        "_tasks",
        "_there",
    )

    def __init__(
        self,
        there: asyncio.AbstractEventLoop,
        tasks: set[asyncio.Task[Any]],
        make: Make[_Result],
        on_target: Callable[[int], None] | None = None,
        target_count: int = 0,
    ) -> None:
        self._here = asyncio.get_running_loop()
        self._there = there
        self._tasks = tasks
        self._make = make
        self._on_target = on_target
        self._target_count = target_count
        self._arrived: collections.deque[int] = collections.deque()
        self._is_telling = False
        self._is_settled = False
        self._task: asyncio.Task[_Result] | None = None
        self._outcome: asyncio.Future[_Result] = self._here.create_future()
        self._ended: asyncio.Future[None] | None = None

    # --- the caller's thread ------------------------------------------------------------------

    async def run(self) -> _Result:
        """Do the call.

        Raises:
            OriginUnavailableError: the engine was closed meanwhile; otherwise what the call raises.
        """
        self._there.call_soon_threadsafe(self._begin)
        try:
            return await self._outcome
        except asyncio.CancelledError:
            if not self._is_settled:
                self._ended = self._here.create_future()
                with contextlib.suppress(RuntimeError):  # the engine's loop has just closed
                    self._there.call_soon_threadsafe(self._stop)
                await until_done(self._ended)
            raise

    def _tell(self) -> None:
        # Lowered first: what arrives from here on is either seen below or told next time.
        self._is_telling = False
        arrived, on_target = self._arrived, self._on_target
        assert on_target is not None, "no target was promised"
        while arrived:
            on_target(arrived.popleft())

    def _settle(self) -> None:
        task, outcome = self._task, self._outcome
        assert task is not None, "settled before it began"
        self._is_settled = True
        try:
            if self._arrived:
                self._tell()
        finally:
            error = None if task.cancelled() else task.exception()
            if self._ended is not None:
                self._ended.set_result(None)
            if outcome.done():
                pass  # the caller was cancelled
            elif task.cancelled():
                outcome.set_exception(OriginUnavailableError("the origin engine was closed"))
            elif error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

    # --- the engine's thread ------------------------------------------------------------------

    def arrived(self, i: int) -> None:
        """Target `i` holds its bytes."""
        self._arrived.append(i)
        if i + 1 < self._target_count and not self._is_telling:
            self._is_telling = True
            self._here.call_soon_threadsafe(self._tell)

    def _begin(self) -> None:
        task = self._there.create_task(self._call())
        self._task = task
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def _call(self) -> _Result:
        # Within the task, so that what making the coroutine raises has its way back too.
        return await self._make(self)

    def _stop(self) -> None:
        # Queued behind `_begin`, so there is a task by now.
        assert self._task is not None, "stopped before it began"
        self._task.cancel()

    def _done(self, task: asyncio.Task[_Result]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
            self._here.call_soon_threadsafe(self._settle)
