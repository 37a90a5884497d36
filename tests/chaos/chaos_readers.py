"""Readers that never stop: threads with a session each, over ever other shards of a dataset.

A reader opens a session, reads some shards in some order, keeps some extents for a while, and
begins again; sometimes it goes away in the middle. It ends when it is told to, or with the daemon.
What it finds wrong is raised by `stop`.
"""

from __future__ import annotations

import random
import threading

from chaos_data import HELD_MAX, Truth, read_checked

from gpufeed.cachefs.client import ExtentEvent, Session
from gpufeed.cachefs.errors import DaemonUnavailableError

LEAVES_EARLY_RATIO = 0.1


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
        self._lock = threading.Lock()
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
            with self._lock:
                self._errors.append(error)

    def _read(self, session: Session, draw: random.Random) -> None:
        urls = draw.sample(sorted(self._truth), draw.randint(1, self._shards_max))
        leaves_after = draw.randint(1, 20) if draw.random() < self._leaves_early_ratio else None
        seen = 0

        def watch(_: ExtentEvent) -> None:
            nonlocal seen
            seen += 1
            with self._lock:
                self.extents += 1
            if seen == leaves_after:
                raise _GoneError

        try:
            read_checked(
                session, self._truth, urls, hold=lambda: draw.randint(0, HELD_MAX), watch=watch
            )
        except _GoneError:
            return
        with self._lock:
            self.shards += len(urls)

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
