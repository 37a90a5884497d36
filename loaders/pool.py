"""The decode workers of one loader: start, units under way, death, stop.

Owned by the loader; used by one thread at a time (the feeder's, or the trainer's while no feeder
runs). Every process forked from this one closes the feeder's ends of all channels at once, so a
worker sees its feeder's death even where siblings and strangers live on.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any

from gpufeed.cachefs.errors import WorkerError
from gpufeed.loaders import worker
from gpufeed.loaders.batchslots import RingShape
from gpufeed.loaders.channel import Channel
from gpufeed.loaders.units import PICKLE_PROTOCOL, Configure, Unit, UnitResult

STOP_WAIT_S = 2.0
NAMED_SAMPLES_MAX = 4

_live: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


@dataclass(slots=True)
class _Worker:
    process: Any
    channel: Channel
    units: deque[Unit] = field(default_factory=deque)


class WorkerPool:
    """Worker processes and what each of them has in hand.

    Args:
        context: how processes are started.
        make_spec: the start arguments of worker i.
        worker_count: how many.
    """

    def __init__(
        self, context: BaseContext, make_spec: Callable[[int], worker.WorkerSpec], worker_count: int
    ) -> None:
        self._pid = os.getpid()
        self._workers: list[_Worker] = []
        _live.add(self)
        try:
            for number in range(worker_count):
                self._workers.append(_start(context, make_spec(number)))
        except BaseException:
            self.stop()
            raise

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def broken(self) -> bool:
        """A worker is gone, so no unit may be sent any more."""
        return any(not one.process.is_alive() for one in self._workers)

    @property
    def in_flight_count(self) -> int:
        """Units sent and not answered."""
        return sum(len(one.units) for one in self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids, in worker order."""
        return [one.process.pid for one in self._workers]

    def fileno(self, number: int) -> int:
        """A worker's channel, for epoll."""
        return self._workers[number].channel.fileno()

    def load(self, number: int) -> int:
        """Units that a worker has in hand."""
        return len(self._workers[number].units)

    def least_loaded(self) -> int:
        """The worker with the fewest units in hand."""
        return min(range(len(self._workers)), key=self.load)

    def blocked(self, number: int) -> bool:
        """True while bytes wait for this worker to read."""
        return self._workers[number].channel.blocked

    def flush(self, number: int) -> None:
        """Go on writing to a blocked worker.

        Raises:
            WorkerError: the worker is gone.
        """
        try:
            self._workers[number].channel.flush()
        except OSError:
            raise self._death(number) from None

    def submit(self, number: int, unit: Unit) -> None:
        """Send a unit.

        Raises:
            WorkerError: the worker is gone.
        """
        self._workers[number].units.append(unit)
        self._send(number, unit)

    def configure(self, shape: RingShape) -> None:
        """Tell all workers the ring's shape.

        Raises:
            WorkerError: a worker is gone.
        """
        for number in range(len(self._workers)):
            self._send(number, Configure(shape))

    def receive(self, number: int) -> list[tuple[Unit, UnitResult]]:
        """Results that are here now, each with its unit.

        Raises:
            WorkerError: the worker is gone; says how, and what it had in hand.
        """
        one = self._workers[number]
        try:
            frames = one.channel.receive()
        except (EOFError, OSError):
            raise self._death(number) from None
        # A worker answers in the order that it was asked.
        return [(one.units.popleft(), pickle.loads(frame)) for frame in frames]  # noqa: S301 ours

    def stop(self) -> None:
        """End all workers, killing those that do not end by themselves, and wait till then."""
        if os.getpid() != self._pid:
            return
        for one in self._workers:
            one.channel.close()
        for one in self._workers:
            one.process.join(STOP_WAIT_S)
            if one.process.is_alive():
                one.process.kill()
                one.process.join()
            one.process.close()
        self._workers = []

    def forget(self) -> None:
        """Close this process's copies of the channels; for forked children."""
        for one in self._workers:
            one.channel.close()

    def _send(self, number: int, message: Unit | Configure) -> None:
        try:
            self._workers[number].channel.send(pickle.dumps(message, PICKLE_PROTOCOL))
        except OSError:
            raise self._death(number) from None

    def _death(self, number: int) -> WorkerError:
        one = self._workers[number]
        one.process.join(STOP_WAIT_S)
        code = one.process.exitcode
        how = f"exit status {code}"
        if code is None:
            how = "its channel broke while the process lives"
        elif code < 0:
            how = f"signal {signal.Signals(-code).name}"
        tasks = [str(task) for unit in one.units for task in unit.tasks]
        more = len(tasks) - NAMED_SAMPLES_MAX
        names = "; ".join(tasks[:NAMED_SAMPLES_MAX]) + (f"; and {more} more" if more > 0 else "")
        return WorkerError(
            f"decode worker {number} (pid {one.process.pid}) died: {how}. "
            f"In hand: {names or 'nothing'}. If it was killed for memory, use fewer workers or "
            "smaller batches; with num_workers=0 a crash in decode shows its own traceback"
        )


def _start(context: BaseContext, spec: worker.WorkerSpec) -> _Worker:
    ours, theirs = socket.socketpair()
    try:
        process = context.Process(  # type: ignore[attr-defined]  # typeshed has it on subclasses only
            target=worker.main,
            args=(spec, theirs),
            name=f"gpufeed-worker-{spec.worker}",
            daemon=True,
        )
        _pending.append(ours)
        process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        _pending.remove(ours)
        theirs.close()
    return _Worker(process, Channel(ours))


# The feeder's end of a worker that is being started: its own child must not keep it either.
_pending: list[socket.socket] = []


def _forget_all() -> None:
    for pool in list(_live):
        pool.forget()
    for sock in _pending:
        sock.close()


os.register_at_fork(after_in_child=_forget_all)
