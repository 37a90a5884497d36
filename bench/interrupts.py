"""Ctrl-C, SIGTERM and a closed terminal, as one exception, once.

Inside `interruptible` the first of these signals raises `Interrupted` in the main thread, so that
every ``finally`` runs; later ones are ignored, so that cleaning up is not cut short. It takes at
most seconds: every child has a keeper with a deadline.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked us to end. Not an `Exception`: nothing on the way may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_status = 128 + number


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first signal into `Interrupted`; give the handlers back at the end."""

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
