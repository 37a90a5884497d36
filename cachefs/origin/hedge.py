"""When is a part so slow that it is worth asking for it again on another connection? Pure.

What is usual is learned from the recent requests of the same origin: the time to the first byte,
and how fast a body came after it. A part is **late** when it takes longer than `LATE_RATIO` times
what all but the slowest of them would have taken. A late part is hedged if a fresh request would
probably have its remaining bytes sooner than it will by itself, and if the budget allows: hedges
are at most a named part of all requests, since an origin that is slow as a whole gets no faster by
being asked twice.

Not thread-safe. Times are in seconds.
"""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass

from gpufeed.cachefs.units import KIB

# No hedge before so many requests were seen; so many of the last ones are remembered.
SAMPLES_MIN = 32
SAMPLES_MAX = 256
# What is usual is worked out anew after so many.
REFRESH_COUNT = 32
# A body shorter than this says nothing about the rate.
RATE_BODY_BYTES_MIN = 256 * KIB
# A clock cannot tell less.
BODY_MIN_S = 1e-6
SLOW_QUANTILE = 0.95
LATE_RATIO = 2.0
LATE_MIN_S = 0.25
# A late part that still comes is looked at again so often at the most.
CHECKS_MAX = 4
# How many hedges may be sent at once after a long time without.
BURST_COUNT = 8.0


@dataclass(frozen=True, slots=True)
class Usual:
    """What the recent requests took: their median, and what all but the slowest took."""

    first_byte_s: float
    first_byte_slow_s: float
    bytes_per_s: float
    bytes_per_s_slow: float

    def expected_s(self, size_bytes: int) -> float:
        """What a fresh request for `size_bytes` probably takes."""
        return self.first_byte_s + size_bytes / self.bytes_per_s

    def late_s(self, size_bytes: int) -> float:
        """From when on a request for `size_bytes` is late."""
        slow_s = self.first_byte_slow_s + size_bytes / self.bytes_per_s_slow
        return max(LATE_MIN_S, LATE_RATIO * slow_s)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a part of `size_bytes` is: `remaining_bytes` are missing.

    `lately_bytes` came within the last `lately_s`, since it was looked at before.
    """

    size_bytes: int
    remaining_bytes: int
    lately_s: float
    lately_bytes: int

    @property
    def remaining_s(self) -> float:
        """What the rest takes if it goes on as lately; infinite if nothing comes."""
        if self.lately_bytes == 0:
            return math.inf
        return self.remaining_bytes * self.lately_s / self.lately_bytes


class HedgePolicy:
    """Learns what is usual at one origin and decides. See the top of the file.

    Args:
        ratio_max: hedges, as a part of all requests; 0: never.
    """

    def __init__(self, ratio_max: float) -> None:
        self._ratio_max = ratio_max
        self._credit = 0.0
        self._first_bytes_s: collections.deque[float] = collections.deque(maxlen=SAMPLES_MAX)
        self._rates: collections.deque[float] = collections.deque(maxlen=SAMPLES_MAX)
        self._since_refresh = 0
        self._usual: Usual | None = None

    def finished(self, first_byte_s: float, body_s: float, size_bytes: int) -> None:
        """A request ended well: the first byte after `first_byte_s`, the last `body_s` later."""
        if self._ratio_max == 0:
            return
        self._credit = min(BURST_COUNT, self._credit + self._ratio_max)
        self._first_bytes_s.append(first_byte_s)
        if size_bytes >= RATE_BODY_BYTES_MIN:
            self._rates.append(size_bytes / max(body_s, BODY_MIN_S))
        self._since_refresh += 1
        if self._since_refresh >= REFRESH_COUNT and len(self._first_bytes_s) >= SAMPLES_MIN:
            self._since_refresh = 0
            self._usual = self._work_out()

    def _work_out(self) -> Usual:
        first = sorted(self._first_bytes_s)
        # Slow is the low end of the rates. Without any, only short bodies came, which take no time.
        rates = sorted(self._rates, reverse=True) or [math.inf]
        return Usual(
            _quantile(first, 0.5), _quantile(first, SLOW_QUANTILE),
            _quantile(rates, 0.5), _quantile(rates, SLOW_QUANTILE),
        )  # fmt: skip

    def late_s(self, size_bytes: int) -> float | None:
        """When to look at a part of `size_bytes` that begins now; None: not at all."""
        usual = self._usual
        if usual is None:
            return None
        if size_bytes >= RATE_BODY_BYTES_MIN and len(self._rates) < SAMPLES_MIN:
            return None  # nothing is known of bodies that long
        return usual.late_s(size_bytes)

    def judge(self, progress: Progress, checks_count: int) -> float:
        """A late part that was looked at `checks_count` times before.

        Returns:
            0: hedge it now, and one hedge of the budget is spent. Else after how many seconds to
            look again; infinite: never.
        """
        usual = self._usual
        assert usual is not None, "judged before anything was late"
        fresh_s = usual.expected_s(progress.remaining_bytes)
        if checks_count >= CHECKS_MAX:
            return math.inf
        if progress.remaining_s <= fresh_s:
            return max(progress.remaining_s, LATE_MIN_S)
        if self._credit < 1.0:
            return usual.late_s(progress.size_bytes)
        self._credit -= 1.0
        return 0.0

    def refund(self) -> None:
        """The hedge that was decided was not sent."""
        self._credit = min(BURST_COUNT, self._credit + 1.0)


def _quantile(ascending: list[float], q: float) -> float:
    return ascending[min(len(ascending) - 1, int(q * len(ascending)))]
