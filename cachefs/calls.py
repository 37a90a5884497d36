"""Requests of many threads on one session: each gets its own answer, nobody has a thread to spare.

Whichever thread waits reads the socket for all (one at a time, the lock released meanwhile) and
hands answers to those they belong to. So there is no reader thread, nothing to start after a fork,
and a thread alone pays nothing for the others.

Invariants:
    - at most `REQUESTS_MAX` requests are unanswered, below what the daemon takes; whoever waits to
      send one more waits for an answer, which comes, not for another thread to fetch its own;
    - an answer that nobody waits for any more still gives back the extent that it lends;
    - the first failure of the socket ends all requests, each with that error, and the session
      closes with the last of them.

`shared` gives the process's own; a forked child gets another, whatever its parent was doing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from typing import Any

from gpufeed.cachefs import wire
from gpufeed.cachefs.connect import open_session
from gpufeed.cachefs.errors import DaemonUnavailableError, GpufeedError
from gpufeed.cachefs.leases import Leases
from gpufeed.cachefs.session import Session
from gpufeed.cachefs.units import MIB
from gpufeed.cachefs.wire import Kind, Message

REQUESTS_MAX = 6
# The origin's own deadline and retries lie within it.
ANSWER_TIMEOUT_S = 180.0
# A few extents: bytes are copied out at once, not kept.
WINDOW_BYTES = 32 * MIB


class _Waiting:
    """A request under way."""

    __slots__ = ("answer", "is_forgotten")

    def __init__(self) -> None:
        self.answer: Message | None = None
        self.is_forgotten = False


class Calls:
    """See the top of the file. Owns the session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.leases = Leases(session)
        # Some thread or other waits for the daemon nearly always.
        self.leases.begin_wait()
        # A view of our own: it stays readable for a thread that copies while the session closes.
        self._arena = session.arena()[:]
        self._changed = threading.Condition()
        self._waiting: dict[int, _Waiting] = {}
        self._unanswered_count = 0
        self._is_receiving = False
        self._failure: GpufeedError | None = None
        self.extent_bytes = session.extent_bytes

    @property
    def has_failed(self) -> bool:
        """Whether the session is lost."""
        return self._failure is not None

    def ask(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """A request and its answer.

        Raises:
            DaemonUnavailableError: the daemon is gone, or silent for `ANSWER_TIMEOUT_S`.
            GpufeedError: as the daemon says.
        """
        number = self.begin(kind, body)
        assert number is not None, "waited for"
        return self.finish(number)

    def begin(self, kind: Kind, body: dict[str, Any], *, wait: bool = True) -> int | None:
        """Send a request; `finish` or `forget` the number returned.

        None if there is no room for one more and `wait` is not set. Whoever has requests under way
        must not wait: another might do the same.

        Raises:
            DaemonUnavailableError: the daemon is gone.
        """
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        with self._changed:
            while self._unanswered_count >= REQUESTS_MAX:
                if not wait:
                    return None
                self._progress(deadline_s)
            self._raise_failure()
            try:
                number = self._session.begin_request(kind, body, ANSWER_TIMEOUT_S)
            except GpufeedError as error:
                self._fail(error)
                raise
            self._waiting[number] = _Waiting()
            self._unanswered_count += 1
            return number

    def finish(self, number: int) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            DaemonUnavailableError: the daemon is gone, or silent for `ANSWER_TIMEOUT_S`.
            GpufeedError: as the daemon says.
        """
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        with self._changed:
            waiting = self._waiting[number]
            try:
                while waiting.answer is None:
                    self._progress(deadline_s)
            except BaseException:
                self._forget(number, waiting)
                raise
            self._end(number)
        value = waiting.answer.json()
        if waiting.answer.kind is Kind.ERROR:
            raise wire.unpack_error(value)
        return value

    def forget(self, number: int) -> None:
        """Nobody wants the answer any more; what it lends goes back when it comes."""
        with self._changed:
            waiting = self._waiting.get(number)
            if waiting is not None:
                self._forget(number, waiting)

    def copy(self, lent: dict[str, Any], begin_bytes: int, into: memoryview) -> None:
        """Copy from an extent that an answer lent, from `begin_bytes` of it on.

        Raises:
            DaemonUnavailableError: the session has ended: the extent may hold other bytes by now.
        """
        place = int(lent["slot"]) * self.extent_bytes + begin_bytes
        into[:] = self._arena[place : place + len(into)]
        # Once the copy is made: the daemon closes the socket before a slot can have another owner.
        if self._session.is_cut:
            raise DaemonUnavailableError("the session ended while an extent was copied")

    def release(self, seq: int) -> None:
        """Give an extent back. A session that is lost has given back everything."""
        self.leases.give_back(seq)

    def close_file(self, number: int) -> None:
        """Close a file that was opened here. Waits for no lock and no answer."""
        with contextlib.suppress(DaemonUnavailableError):
            if self._failure is None:
                self._session.tell(Kind.FILE_CLOSE, {"file": number})

    def close(self) -> None:
        """End the session."""
        with self._changed:
            self._fail(DaemonUnavailableError("the session was closed by this process"))

    def abandon(self) -> None:
        """In a forked child, where the lock may be held for ever: let go of what the child got."""
        self._failure = DaemonUnavailableError("the session is the parent process's")
        self._session.close()

    # --- with the lock held -------------------------------------------------------------------

    def _progress(self, deadline_s: float) -> None:
        """Wait for one message, or for another thread to receive one."""
        self._raise_failure()
        if self._is_receiving:
            # Whoever receives has a deadline, and wakes us when it ends.
            self._changed.wait()
            return
        self._is_receiving = True
        self._changed.release()
        try:
            message = self._session.wait_message(deadline_s)
        except GpufeedError as error:
            self._changed.acquire()
            self._is_receiving = False
            self._fail(error)
            raise
        except BaseException:
            self._changed.acquire()
            self._is_receiving = False
            self._changed.notify_all()
            raise
        self._changed.acquire()
        self._is_receiving = False
        self._deliver(message)
        self._changed.notify_all()

    def _deliver(self, message: Message) -> None:
        try:
            value = message.json()
            if message.kind is Kind.ERROR and "id" not in value:
                self._fail(wire.unpack_error(value))
                return
        except GpufeedError as error:
            self._fail(error)
            return
        number = value.get("id")
        waiting = self._waiting.get(number) if isinstance(number, int) else None
        if waiting is None or not isinstance(number, int):
            return
        waiting.answer = message
        self._unanswered_count -= 1
        if waiting.is_forgotten:
            self._forget(number, waiting)

    def _forget(self, number: int, waiting: _Waiting) -> None:
        if waiting.answer is None and self._failure is None:
            waiting.is_forgotten = True
            return
        if waiting.answer is not None:
            seq = waiting.answer.json().get("seq")
            if isinstance(seq, int):
                self.release(seq)
        self._end(number)

    def _end(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._changed.notify_all()
        self._close_if_over()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _fail(self, error: GpufeedError) -> None:
        if self._failure is None:
            self._failure = error
            for number in [n for n, w in self._waiting.items() if w.is_forgotten]:
                del self._waiting[number]
        self._changed.notify_all()
        self._close_if_over()

    def _close_if_over(self) -> None:
        # Never under another thread's feet: its number would be somebody else's socket by then.
        if self._failure is not None and not self._waiting and not self._is_receiving:
            self.leases.retire()


_shared: dict[str | None, Calls] = {}
_sharing = threading.Lock()


def shared(daemon: str | None = None) -> Calls:
    """The process's own session with the daemon that `daemon` or ``GPUFEED_DAEMON`` names.

    Raises:
        DaemonUnavailableError: it does not answer, or the embedded one did not start.
        GpufeedError: it refused, with its reason.
    """
    with _sharing:
        calls = _shared.get(daemon)
        if calls is None or calls.has_failed:
            calls = Calls(open_session(daemon=daemon, window_bytes=WINDOW_BYTES))
            _shared[daemon] = calls
        return calls


def close_shared() -> None:
    """End the process's sessions; the next use opens new ones."""
    with _sharing:
        for calls in _shared.values():
            calls.close()
        _shared.clear()


def _begin_anew() -> None:
    global _sharing  # noqa: PLW0603 a thread of the parent's may hold it for ever
    _sharing = threading.Lock()
    for calls in _shared.values():
        calls.abandon()
    _shared.clear()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(close_shared)
