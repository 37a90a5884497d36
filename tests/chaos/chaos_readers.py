"""Readers that never stop: threads with a session each, over ever other shards of a dataset.

A reader opens a session, reads some shards in some order, keeps some extents for a while, and
begins again; sometimes it goes away in the middle. It ends when it is told to, or with the daemon.
What it finds wrong is raised by `stop`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from chaos_data import HELD_MAX, Outcome, Truth, read_checked

from gpufeed.cachefs.client import ExtentEvent, Session
from gpufeed.cachefs.errors import DaemonUnavailableError

LEAVES_EARLY_RATIO = 0.1
WAIT_S_MAX = 60.0


class _GoneError(Exception):
    """The reader leaves in the middle."""


class Readers:
    """`count` readers, from the constructor until `stop`."""

    def __init__(
        self, socket: str, truth: Truth, *, count: int, seed: int, shards_max: int = 6,
        leaves_early_ratio: float = LEAVES_EARLY_RATIO,
    ) -> None:  # fmt: skip
        self._socket = socket
        self._truth = truth
        self._shards_max = shards_max
        self._leaves_early_ratio = leaves_early_ratio
        self._stopping = threading.Event()
        self._errors: list[BaseException] = []
        self._moved = threading.Condition()
        self.extents = 0
        self.shards = 0
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{i}"),), name=f"r{i}")
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, draw: random.Random) -> None:
        try:
            while not self._stopping.is_set():
                with Session.connect(self._socket) as session:
                    self._read(session, draw)
        except DaemonUnavailableError:
            return
        except BaseException as error:  # the thread's end: it is raised by `stop`
            with self._moved:
                self._errors.append(error)
                self._moved.notify_all()

    def _read(self, session: Session, draw: random.Random) -> None:
        urls = draw.sample(sorted(self._truth), draw.randint(1, self._shards_max))
        leaves_after = draw.randint(1, 20) if draw.random() < self._leaves_early_ratio else None
        seen = 0

        def watch(_: ExtentEvent) -> None:
            nonlocal seen
            seen += 1
            with self._moved:
                self.extents += 1
                self._moved.notify_all()
            if seen == leaves_after:
                raise _GoneError

        try:
            read_checked(
                session, self._truth, urls, hold=lambda: draw.randint(0, HELD_MAX), watch=watch
            )
        except _GoneError:
            return
        with self._moved:
            self.shards += len(urls)

    def wait_extents(self, count: int) -> None:
        """Until so many more extents have come, to all of them together."""
        aim = self.extents + count
        with self._moved:
            there = self._moved.wait_for(lambda: self.extents >= aim or self._errors, WAIT_S_MAX)
        if self._errors:
            raise self._errors[0]
        assert there, f"nothing for {WAIT_S_MAX} s, after {self.extents} extents"

    def stop(self) -> None:
        """Let them finish what they read, wait for them.

        Raises:
            BaseException: the first thing that a reader met, a vanished daemon excepted.
        """
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


class Pulse:
    """One reader that goes round all shards, and when each extent came. Ends with `stop`."""

    def __init__(self, socket: str, truth: Truth, *, seed: int) -> None:
        self._socket = socket
        self._truth = truth
        self._draw = random.Random(seed)
        self._moved = threading.Condition()
        self._stopping = False
        self._error: BaseException | None = None
        self.times_s: list[float] = []
        self.passes = 0
        self.tiers: list[Outcome] = []
        self._thread = threading.Thread(target=self._run, name="pulse")
        self._thread.start()

    def _run(self) -> None:
        try:
            with Session.connect(self._socket) as session:
                while not self._stopping:
                    urls = sorted(self._truth)
                    self._draw.shuffle(urls)
                    outcome = read_checked(session, self._truth, urls, watch=self._watch)
                    with self._moved:
                        self.tiers.append(outcome)
                        self.passes += 1
                        self._moved.notify_all()
        except BaseException as error:  # the thread's end: it is raised by whoever waits
            with self._moved:
                self._error = error
                self._moved.notify_all()

    def _watch(self, _: ExtentEvent) -> None:
        with self._moved:
            self.times_s.append(time.monotonic())
            self._moved.notify_all()

    def wait_extents(self, count: int) -> None:
        """Until so many more extents have come."""
        aim = len(self.times_s) + count
        self._wait(lambda: len(self.times_s) >= aim)

    def wait_passes(self, count: int) -> None:
        """Until so many more passes have ended."""
        aim = self.passes + count
        self._wait(lambda: self.passes >= aim)

    def _wait(self, is_there: Callable[[], bool]) -> None:
        with self._moved:
            there = self._moved.wait_for(lambda: is_there() or self._error, WAIT_S_MAX)
            if self._error is not None:
                raise self._error
            assert there, f"nothing for {WAIT_S_MAX} s, after {len(self.times_s)} extents"

    def longest_gap_s(self, since_s: float) -> float:
        """The longest time without an extent that ended after `since_s`."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max(after - before for before, after in pairs if after >= since_s)

    def stop(self) -> None:
        """Let it finish its pass; raise what it met."""
        self._stopping = True
        self._thread.join()
        if self._error is not None:
            raise self._error
