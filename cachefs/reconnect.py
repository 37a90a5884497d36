"""How long, and how often, a daemon that went away is sought again. Pure.

Delays grow from `DELAY_FIRST_S` to `DELAY_MAX_S`, spread at random so that the ranks of a node do
not come all at once. Without anything read in between, it is over after `LIMIT_S`.
"""

from __future__ import annotations

import random

from gpufeed.cachefs.errors import DaemonUnavailableError

# A daemon starts in a second or two, with a million shards in its cache in some more.
LIMIT_S = 60.0
DELAY_FIRST_S = 0.02
DELAY_MAX_S = 1.0
_GROWTH_RATIO = 1.6


class Patience:
    """See the top of the file. One reader's.

    Args:
        seed: of the spread; None takes one at random.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._draw = random.Random(seed)  # noqa: S311 it spreads load
        self._since_s: float | None = None
        self._delay_s = DELAY_FIRST_S

    def delay_s(self, error: DaemonUnavailableError, now_s: float) -> float:
        """How long to wait before the daemon is sought, after `error`.

        Args:
            error: how it went away, or was not found.
            now_s: monotonic.

        Raises:
            DaemonUnavailableError: it was sought for `LIMIT_S`; says so, and the error.
        """
        if self._since_s is None:
            self._since_s = now_s
        sought_s = now_s - self._since_s
        if sought_s >= LIMIT_S:
            raise DaemonUnavailableError(
                f"the daemon went away and was sought for {sought_s:.0f} s: {error}"
            )
        delay_s = self._delay_s * self._draw.uniform(0.5, 1.0)
        self._delay_s = min(DELAY_MAX_S, self._delay_s * _GROWTH_RATIO)
        return min(delay_s, LIMIT_S - sought_s)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was lost since something was read."""
        return self._since_s is None

    def read(self) -> None:
        """Something was read: what comes is another loss."""
        self._since_s = None
        self._delay_s = DELAY_FIRST_S
