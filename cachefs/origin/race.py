"""A part's request and, if that is late, a second one for what is still missing.

The first request writes into the caller's targets. When it is late by the verdict of
`gpufeed.cachefs.origin.hedge`, the bytes it has not received yet are asked for on another
connection, into spare memory of the engine's own. Whichever ends first wins:

    - the first request: the second is cancelled, and its spare given back when its connection is
      gone;
    - the second: the first's connection is dropped; when its transport is gone, and can write no
      more, what is still missing is copied from the spare into the targets.

So no two transports ever write into one target, and each target is reported once, by the sink.
A first request that fails while the second is under way waits for it; if that fails too, it is as
if there had been none.

Lives on one engine thread's loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from gpufeed.cachefs.errors import GpufeedError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.account import Account
from gpufeed.cachefs.origin.exchange import Answer
from gpufeed.cachefs.origin.failure import AttemptFailedError, Failure, FailureKind
from gpufeed.cachefs.origin.hedge import Progress
from gpufeed.cachefs.origin.pool import Ticket
from gpufeed.cachefs.origin.sink import Sink
from gpufeed.cachefs.origin.spare import Spares
from gpufeed.cachefs.tasks import until_done

# Ask for everything from a position of the part on, into a sink.
Ask = Callable[[int, Sink, Ticket], Coroutine[Any, Any, Answer]]


@dataclass(frozen=True, slots=True)
class RaceTools:
    """What the races of one origin share on one thread."""

    account: Account
    spares: Spares
    metrics: Metrics


class Race:
    """See the top of the file. One attempt at one part.

    Args:
        tools: shared.
        sink: where the first request writes.
        ticket: of the first request.
        ask: makes the second.
    """

    def __init__(self, tools: RaceTools, sink: Sink, ticket: Ticket, ask: Ask) -> None:
        self._tools = tools
        self._sink = sink
        self._ticket = ticket
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._size_bytes = sink.remaining_bytes
        self._timer: asyncio.TimerHandle | None = None
        self._checks_count = 0
        self._looked_at_s = 0.0
        self._seen_bytes = sink.position_bytes
        self._spare: memoryview | None = None
        self._spare_begin_bytes = 0
        self._second: asyncio.Task[Answer] | None = None
        ticket.sent = self._sent

    def _sent(self) -> None:
        """The first request went out."""
        self._looked_at_s = self._ticket.sent_at_s
        if self._timer is None and self._second is None:
            late_s = self._tools.account.late_s(self._size_bytes)
            if late_s is not None:
                self._timer = self._loop.call_later(late_s, self._look)

    def _look(self) -> None:
        """The first request is late: is it worth a second?"""
        self._timer = None
        if self._ticket.connection is None:
            return
        now_s, position = time.monotonic(), self._sink.position_bytes
        progress = Progress(
            size_bytes=self._size_bytes,
            remaining_bytes=self._sink.remaining_bytes,
            lately_s=now_s - self._looked_at_s,
            lately_bytes=position - self._seen_bytes,
        )
        self._looked_at_s, self._seen_bytes = now_s, position
        again_s = self._tools.account.judge(progress, self._checks_count)
        self._checks_count += 1
        if again_s == 0:
            self._begin_second()
        elif again_s != math.inf:
            self._timer = self._loop.call_later(again_s, self._look)

    def _begin_second(self) -> None:
        tools = self._tools
        self._spare = tools.spares.take(self._sink.remaining_bytes)
        if self._spare is None:
            tools.account.hedge_unsent()
            return
        self._spare_begin_bytes = self._sink.position_bytes
        tools.metrics.add("hedges_total")
        self._second = self._loop.create_task(self._run_second(self._spare))

    async def _run_second(self, spare: memoryview) -> Answer:
        sink = Sink([spare], _ignore_target)
        answer = await self._ask(self._spare_begin_bytes, sink, Ticket(len(spare)))
        if (slow := self._ticket.connection) is not None:
            slow.abort(Failure(FailureKind.OVERTAKEN, "the rest came by the second"))
        return answer

    async def rescue(self, error: AttemptFailedError) -> Answer:
        """The first request failed with `error`: the second's answer, if it has one.

        Raises:
            AttemptFailedError: `error`, where there is no second, or it failed too.
        """
        second, spare = self._second, self._spare
        if second is None or spare is None:
            raise error
        await asyncio.wait([second])
        if second.cancelled() or isinstance(second.exception(), GpufeedError):
            raise error
        answer = second.result()
        # The failed exchange has ended, so its transport is gone: nobody else writes here.
        self._sink.write(spare[self._sink.position_bytes - self._spare_begin_bytes :])
        self._tools.metrics.add("hedges_won_total")
        return answer

    async def close(self) -> None:
        """The attempt is over; end what is left of it."""
        self._ticket.sent = None  # no cycle: a garbage collection costs more than a small object
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        second, self._second = self._second, None
        if second is not None:
            second.cancel()
            await until_done(second)
            if not second.cancelled():
                second.exception()  # seen by `rescue`, or of no interest any more
        spare, self._spare = self._spare, None
        if spare is not None:
            self._tools.spares.give(spare)


def _ignore_target(_: int) -> None:
    """Whoever waits for the spare waits for all of it."""
