"""A limit on something a second, as pure arithmetic: callers reserve and wait their turn."""

from __future__ import annotations

# How far ahead of the steady rate a burst may run, in seconds of that rate.
BURST_S = 0.1


class TokenBucket:
    """Deals `rate_per_s` places (or bytes) a second, and up to a tenth of a second's worth at once.

    Not thread-safe. The rate may change; turns that were dealt already stay as they are.
    """

    def __init__(self, rate_per_s: float, now_s: float) -> None:
        assert rate_per_s > 0, rate_per_s
        self.rate_per_s = rate_per_s
        self._tokens = self._burst
        self._at_s = now_s

    @property
    def _burst(self) -> float:
        return max(1.0, self.rate_per_s * BURST_S)

    def reserve(self, now_s: float, amount: float = 1.0) -> float:
        """Take `amount` places and return how many seconds from `now_s` on their turn has come.

        Turns are dealt in the order of the calls. An amount above the burst is let through once
        nothing is owed, and owed by those who come after.
        """
        self._accrue(now_s)
        owed = -self._tokens if amount > self._burst else amount - self._tokens
        self._tokens -= amount
        return max(0.0, owed / self.rate_per_s)

    def refund(self, amount: float) -> None:
        """Whoever had reserved `amount` went away before its turn."""
        self._tokens = min(self._burst, self._tokens + amount)

    def set_rate(self, rate_per_s: float, now_s: float) -> None:
        """Deal at another rate from now on."""
        assert rate_per_s > 0, rate_per_s
        self._accrue(now_s)
        self.rate_per_s = rate_per_s
        self._tokens = min(self._burst, self._tokens)

    def _accrue(self, now_s: float) -> None:
        elapsed_s = max(0.0, now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)
        self._tokens = min(self._burst, self._tokens + elapsed_s * self.rate_per_s)
