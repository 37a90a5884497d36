"""How fast a session reads while it does not wait for data: its demand rate. Pure.

Stalls are left out, or a starved job would look slow, lose its shards to others, and starve more.
A session is taken to wait for data while the publisher seeks its next extent and the session holds
at most one extent: the last one, which may end in half a sample. All other time in which it holds
something is its own.

Both sums (extents given back, time of its own) fade, so that the rate follows a job that changes:
after `MEMORY_EXTENTS` extents what was before counts a third.
"""

from __future__ import annotations

MEMORY_EXTENTS = 256
EXTENTS_MIN = 8


class DemandRate:
    """One session's rate, in extents a second."""

    __slots__ = ("_extents", "_held", "_own_s", "_seeking", "_since_s")

    def __init__(self) -> None:
        self._extents = 0.0
        self._own_s = 0.0
        self._held = 0
        self._seeking = False
        self._since_s = 0.0

    def _pass_time(self, now_s: float) -> None:
        stalls = self._seeking and self._held <= 1
        if self._held and not stalls:
            self._own_s += now_s - self._since_s
        self._since_s = now_s

    def seeking(self, seeking: bool, now_s: float) -> None:
        """The publisher began or ended to wait for the session's next extent."""
        self._pass_time(now_s)
        self._seeking = seeking

    def published(self, now_s: float) -> None:
        """The session got an extent."""
        self._pass_time(now_s)
        self._held += 1

    def released(self, count: int, now_s: float) -> None:
        """The session gave extents back."""
        self._pass_time(now_s)
        self._held -= count
        fade = max(0.0, 1.0 - count / MEMORY_EXTENTS)
        self._extents = self._extents * fade + count
        self._own_s *= fade

    @property
    def extents_per_s(self) -> float | None:
        """The rate, or None while too little was seen."""
        if self._extents < EXTENTS_MIN or self._own_s <= 0:
            return None
        return self._extents / self._own_s
