"""A deadline that begins to run in the midst of a task: what it ends, and what is not its doing."""

from __future__ import annotations

import asyncio

import pytest

from gpufeed.cachefs.origin.deadline import Deadline


class Work:
    """A task that waits for ever under a deadline, and says how it ended."""

    def __init__(self, limit_s: float, *, started: bool) -> None:
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._run(limit_s, started))

    async def _run(self, limit_s: float, started: bool) -> str:
        deadline = Deadline(limit_s, asyncio.get_running_loop())
        if started:
            deadline.start()
            deadline.start()
        self.begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            if deadline.passed():
                return "late"
            raise
        finally:
            deadline.stop()
        return "done"


async def test_it_ends_what_waits_and_the_task_goes_on():
    work = Work(0.01, started=True)
    assert await work.task == "late"
    assert work.task.cancelling() == 0


async def test_before_its_start_it_ends_nothing():
    work, other = Work(0.01, started=False), Work(0.02, started=True)
    assert await other.task == "late"
    assert not work.task.done()
    work.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work.task


async def test_a_cancellation_from_outside_is_not_its_doing():
    work = Work(100.0, started=True)
    await work.begun.wait()
    work.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work.task


async def test_of_both_at_once_the_one_from_outside_counts():
    work = Work(0.0, started=True)
    await work.begun.wait()
    work.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work.task
