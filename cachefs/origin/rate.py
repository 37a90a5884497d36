"""A limit on requests a second, as pure arithmetic: callers reserve a place and wait their turn."""

from __future__ import annotations

# How far ahead of the steady rate a burst may run, in seconds of that rate.
BURST_S = 0.1


class TokenBucket:
    """Deals `rate_per_s` places a second, and up to a tenth of a second's worth at once.

    Not thread-safe; the engine's loop owns it.
    """

    def __init__(self, rate_per_s: float, now_s: float) -> None:
        assert rate_per_s > 0, rate_per_s
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, rate_per_s * BURST_S)
        self._tokens = self._burst
        self._at_s = now_s

    def reserve(self, now_s: float) -> float:
        """Take one place and return how many seconds from `now_s` on it is reached.

        Places are dealt in the order of the calls.
        """
        elapsed_s = max(0.0, now_s - self._at_s)
        self._at_s = now_s
        self._tokens = min(self._burst, self._tokens + elapsed_s * self._rate_per_s)
        self._tokens -= 1.0
        return max(0.0, -self._tokens / self._rate_per_s)
