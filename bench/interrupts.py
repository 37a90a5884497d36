"""Ctrl-C, SIGTERM and a closed terminal, as one exception, once.

Inside `interruptible` the first of these signals raises `Interrupted` in the main thread, so that
every ``finally`` runs; later ones are ignored, so that cleaning up is not cut short. It takes at
most seconds: every child has a keeper with a deadline. The first one may come while we are cleaning
up already: `to_the_end` is for that.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked us to end. Not an `Exception`: nothing on the way may swallow it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_status = 128 + number


class _Deferral:
    """How deep we are in blocks that must not be cut, and the signal that came meanwhile."""

    depth = 0
    pending = 0


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first signal into `Interrupted`; give the handlers back at the end."""

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        if _Deferral.depth:
            _Deferral.pending = number
        else:
            raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Raise `Interrupted` after this block, not within it.

    Blocking the signals would not do: libraries have threads, and a signal that one of them takes
    runs our handler in the main thread all the same.
    """
    _Deferral.depth += 1
    try:
        yield
    finally:
        _Deferral.depth -= 1
        number, _Deferral.pending = _Deferral.pending, 0
        if number:
            raise Interrupted(number)


def to_the_end(action: Callable[[], None]) -> None:
    """Run a clean-up that must not be left half done. It is one that may be run twice."""
    try:
        action()
    except Interrupted:
        # There is no third time: signals are ignored from the first one on.
        action()
        raise
