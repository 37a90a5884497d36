"""What a client holds of one session, tied to the views that were made of it.

An extent that is read in place gets an **owner**: a read-only numpy array over its slot. Every view
of it (a memoryview's slices, arrays over them) keeps the owner alive, as Python's buffers do. When
the last one is gone the owner's finaliser gives the extent back. It may run anywhere: in any
thread, inside any lock, during garbage collection or at the interpreter's end. So it takes no lock:
it appends, and posts, which never waits.

Invariants:
    - each extent that was taken is given back once: by hand, or by its owner's finaliser;
    - at most `held_max` extents have owners, half of the window: with the others the daemon can
      always go on, however long views are kept;
    - the socket, and with it the lease, stays open until the last owner is gone, also when the
      session is retired or lost: the daemon reuses no slot before it sees the socket close. Then
      socket, mapping and descriptors go, in that order.

A forked child's copies of views stay readable for as long as the parent lives; their finalisers do
nothing there.
"""

from __future__ import annotations

import collections
import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from gpufeed.cachefs import wire
from gpufeed.cachefs.errors import DaemonUnavailableError
from gpufeed.cachefs.session import Session
from gpufeed.cachefs.wire import Kind

Owner = npt.NDArray[np.uint8]

# Part of a window that views may hold.
HELD_RATIO = 0.5
# Part of a window that may have come free before the daemon is told, while nobody waits for it.
RELEASE_BATCH_RATIO = 0.125


class Leases:
    """See the top of the file. Owns the session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.extent_bytes = session.extent_bytes
        self.held_max = int(session.window_extents * HELD_RATIO)
        self._batch = max(1, int(session.window_extents * RELEASE_BATCH_RATIO))
        self._arena = session.arena()
        self._pid = os.getpid()
        # One for each owner that may still be made.
        self._seats = collections.deque([True] * self.held_max)
        # One for each read under way: extents were asked for that have no owner yet.
        self._pins: collections.deque[bool] = collections.deque()
        self._over: collections.deque[int] = collections.deque()
        # Taken, and not given back as far as the daemon was told.
        self._out: set[int] = set()
        self._is_waiting = False
        self._is_retired = False
        # Whoever has it may close the session.
        self._closing = collections.deque([True])

    @property
    def held_count(self) -> int:
        """Extents that views hold."""
        return self.held_max - len(self._seats)

    @property
    def free_count(self) -> int:
        """Extents that the daemon may still publish, as far as it was told."""
        return self.session.window_extents - len(self._out)

    def take(self, seq: int) -> None:
        """An extent came; it is owned or given back later."""
        self._out.add(seq)

    def own(self, seq: int, slot: int, length_bytes: int) -> Owner | None:
        """The owner of an extent that was taken, for views in place; None beyond `held_max`."""
        try:
            self._seats.pop()
        except IndexError:
            return None
        begin = slot * self.extent_bytes
        owner = np.frombuffer(self._arena[begin : begin + length_bytes], np.uint8)
        weakref.finalize(owner, self._disown, seq).atexit = False
        return owner

    def join(self, owners: Sequence[Owner], slot: int, begin: int, size: int) -> Owner:
        """An owner of bytes that lie in neighbouring slots, from `begin` of `slot` on.

        It keeps those of the extents alive.
        """
        at = slot * self.extent_bytes + begin
        joined = np.frombuffer(self._arena[at : at + size], np.uint8)
        weakref.finalize(joined, list.clear, list(owners)).atexit = False
        return joined

    def copy(self, slot: int, begin: int, end: int) -> bytes:
        """Bytes ``[begin, end)`` of a slot that is taken and not given back."""
        at = slot * self.extent_bytes
        return bytes(self._arena[at + begin : at + end])

    def give_back(self, seq: int) -> None:
        """An extent without an owner is not needed any more."""
        self._over.append(seq)
        if self._is_waiting or len(self._over) >= self._batch:
            self.tell()

    def tell(self) -> None:
        """Tell the daemon what came free. Never waits."""
        while self._over:
            seqs: list[int] = []
            while self._over and len(seqs) < wire.RELEASES_PER_MESSAGE_MAX:
                try:
                    seqs.append(self._over.popleft())
                except IndexError:
                    break  # another thread took it
            if seqs:
                self._out.difference_update(seqs)
                self.session.post(wire.pack(Kind.RELEASE, wire.pack_release(seqs)))

    def begin_wait(self) -> None:
        """From now on whatever comes free is told at once: somebody waits for the daemon."""
        self._is_waiting = True
        self.tell()

    def end_wait(self) -> None:
        """Nobody waits."""
        self._is_waiting = False

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """The session stays open meanwhile, also if another thread retires it.

        Raises:
            DaemonUnavailableError: it is retired already.
        """
        self._pins.append(True)
        try:
            if self._is_retired or not self._closing:
                raise DaemonUnavailableError("the session with the daemon is over")
            yield
        finally:
            self._pins.pop()
            if self._is_retired:
                self._close_if_over()

    def retire(self) -> None:
        """Nothing more is taken. The session closes now, or with its last owner."""
        if self._is_retired or self._pid != os.getpid():
            return
        self._is_retired = True
        self._close_if_over()

    def _disown(self, seq: int) -> None:
        # In a forked child the session is the parent's.
        if self._pid != os.getpid():
            return
        self._seats.append(True)
        if self._is_retired:
            self._close_if_over()
        else:
            self.give_back(seq)

    def _is_used(self) -> bool:
        return bool(self.held_count or self._pins)

    def _close_if_over(self) -> None:
        if self._is_used():
            return
        try:
            self._closing.pop()
        except IndexError:
            return
        # Somebody may have begun between the look and the taking; whoever comes now sees it taken.
        if self._is_used():
            self._closing.append(True)
            return
        self.session.close()
