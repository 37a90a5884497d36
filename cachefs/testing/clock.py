"""A clock that moves only when a test says so."""

from __future__ import annotations


class ManualClock:
    """Satisfies `gpufeed.cachefs.clock.Clock`; starts at `start_s` on both scales."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s

    def monotonic_s(self) -> float:
        """Seconds, moved by `advance` alone."""
        return self._now_s

    def wall_s(self) -> float:
        """The same number as `monotonic_s`."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move both scales forward."""
        assert seconds >= 0, f"time cannot go back: {seconds}"
        self._now_s += seconds
