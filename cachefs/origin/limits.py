"""How much of an origin we may use now: connections, requests and bytes a second. Pure.

The configured maxima are hard. Below them each limit follows the service (AIMD): a sign of too much
cuts it to a part of what was really used at that moment, then it grows again, slowly around the
value that was too much and ever faster beyond it, until the maximum is reached.

=============================================  ============================================
sign                                           what is cut
=============================================  ============================================
a code about requests a second, 429            requests a second, to 0.7
a code about bandwidth                         bytes a second, to 0.7
``x-oss-qos-delay-time`` in an answer          bytes a second, to 0.9
a code about requests at once, other 503       connections, to 0.7
first bytes come three times later than usual  connections, to 0.9; not below `CALM_CONNECTIONS`
=============================================  ============================================

Several signs within `HOLD_S` are one: they answer what was sent before the cut.

Not thread-safe. Times are monotonic seconds, given by the caller.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

# After a cut a limit is neither cut nor grown for so long.
HOLD_S = 1.0
# Growth a second, as a part of what was used when the limit was cut; it doubles every so often.
GROWTH_RATIO = 0.05
GROWTH_DOUBLES_S = 10.0
# An unlimited limit is unlimited again at so many times what was too much.
FREE_RATIO = 8.0
METER_WINDOW_S = 1.0

CONNECTIONS_MIN = 1
REQUESTS_PER_S_MIN = 1.0
BYTES_PER_S_MIN = 1_000_000.0
# Not below these at the first stroke: who used little was not what was too much.
CALM_CONNECTIONS = 8
CALM_REQUESTS_PER_S = 50.0
CALM_BYTES_PER_S = 32_000_000.0

# Latency is judged by medians of so many answers.
LATENCY_ANSWERS = 64
LATENCY_RATIO = 3.0
LATENCY_SLACK_S = 0.1
LATENCY_DRIFT_RATIO = 1.05


class Sign(enum.Enum):
    """What an origin complained of."""

    REQUESTS = "requests a second"
    BANDWIDTH = "bandwidth"
    HELD_BACK = "an answer held back"
    CONNECTIONS = "requests at once"
    LATENCY = "late first bytes"


_CUT_RATIO = {
    Sign.REQUESTS: 0.7,
    Sign.BANDWIDTH: 0.7,
    Sign.HELD_BACK: 0.9,
    Sign.CONNECTIONS: 0.7,
    Sign.LATENCY: 0.9,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Maxima:
    """The hard limits; `math.inf` where there is none."""

    connections_count: int
    requests_per_s: float
    bytes_per_s: float


class Limit:
    """One limit. See the top of the file.

    Args:
        maximum: hard.
        floor: it is never cut below.
        calm: the first cut of several stops there.
    """

    __slots__ = ("_calm", "_cut_at_s", "_cut_to", "_reference", "floor", "maximum")

    def __init__(self, maximum: float, floor: float, calm: float = 0.0) -> None:
        self.maximum = maximum
        self.floor = min(floor, maximum)
        self._calm = calm
        self._cut_to = maximum
        self._reference = maximum
        self._cut_at_s = -math.inf

    @property
    def is_cut(self) -> bool:
        """Below its maximum, or it was when last looked at."""
        return self._cut_to < self.maximum

    def value(self, now_s: float) -> float:
        """The limit at this moment."""
        if not self.is_cut:
            return self.maximum
        grown_s = now_s - self._cut_at_s - HOLD_S
        if grown_s <= 0:
            return self._cut_to
        # The growth a second doubles every GROWTH_DOUBLES_S: its sum is a geometric series.
        sum_s = GROWTH_DOUBLES_S / math.log(2) * (2 ** min(40.0, grown_s / GROWTH_DOUBLES_S) - 1)
        value = self._cut_to + GROWTH_RATIO * self._reference * sum_s
        if value >= min(self.maximum, FREE_RATIO * self._free_from()):
            self._cut_to = self.maximum
        return min(self.maximum, value)

    def _free_from(self) -> float:
        return self._reference if math.isinf(self.maximum) else math.inf

    def cut(self, used: float, ratio: float, now_s: float, *, gently: bool = False) -> bool:
        """Too much was used, namely `used`; False if that was told a moment ago.

        `gently`: not below `calm`, whatever it is now.
        """
        value = self.value(now_s)
        if now_s - self._cut_at_s < HOLD_S or (gently and value <= self._calm):
            return False
        spared = self._calm if gently or not self.is_cut else 0.0
        least = min(value, max(self.floor, spared))
        reference = min(value, max(used, least))
        if math.isinf(reference):
            return False
        self._reference = reference
        self._cut_to = max(least, reference * ratio)
        self._cut_at_s = now_s
        return True


class _Meter:
    """Amount a second, over the last one to two windows."""

    __slots__ = ("_amount", "_before", "_began_s")

    def __init__(self, now_s: float) -> None:
        self._amount = 0.0
        self._before = 0.0
        self._began_s = now_s

    def add(self, amount: float, now_s: float) -> None:
        self._turn(now_s)
        self._amount += amount

    def rate_per_s(self, now_s: float) -> float:
        self._turn(now_s)
        into_s = max(0.0, now_s - self._began_s)
        return (self._amount + self._before) / (METER_WINDOW_S + into_s)

    def _turn(self, now_s: float) -> None:
        windows = (now_s - self._began_s) // METER_WINDOW_S
        if windows >= 1:
            self._before = self._amount if windows < 2 else 0.0
            self._amount = 0.0
            self._began_s += windows * METER_WINDOW_S


class AdaptiveLimits:
    """The three limits of one origin. See the top of the file."""

    def __init__(self, maxima: Maxima, now_s: float) -> None:
        self.connections = Limit(maxima.connections_count, CONNECTIONS_MIN, CALM_CONNECTIONS)
        self.requests_per_s = Limit(maxima.requests_per_s, REQUESTS_PER_S_MIN, CALM_REQUESTS_PER_S)
        self.bytes_per_s = Limit(maxima.bytes_per_s, BYTES_PER_S_MIN, CALM_BYTES_PER_S)
        self._requests = _Meter(now_s)
        self._bytes = _Meter(now_s)
        self._first_bytes_s: list[float] = []
        self._usual_s = math.inf

    @property
    def is_cut(self) -> bool:
        """Whether any limit is below its maximum, or was when last looked at."""
        return self.connections.is_cut or self.requests_per_s.is_cut or self.bytes_per_s.is_cut

    def sent(self, now_s: float) -> None:
        """A request went out."""
        self._requests.add(1.0, now_s)

    def received(self, size_bytes: int, now_s: float) -> None:
        """Body bytes came."""
        self._bytes.add(size_bytes, now_s)

    def told(self, sign: Sign, in_flight_count: int, now_s: float) -> bool:
        """The origin complained. True if a limit was cut for it."""
        ratio = _CUT_RATIO[sign]
        if sign is Sign.REQUESTS:
            return self.requests_per_s.cut(self._requests.rate_per_s(now_s), ratio, now_s)
        if sign in (Sign.BANDWIDTH, Sign.HELD_BACK):
            return self.bytes_per_s.cut(self._bytes.rate_per_s(now_s), ratio, now_s)
        gently = sign is Sign.LATENCY
        return self.connections.cut(in_flight_count, ratio, now_s, gently=gently)

    def answered(self, first_byte_s: float, in_flight_count: int, now_s: float) -> bool:
        """An answer's first byte came so long after its request. True if a limit was cut for it."""
        self._first_bytes_s.append(first_byte_s)
        if len(self._first_bytes_s) < LATENCY_ANSWERS:
            return False
        median_s = sorted(self._first_bytes_s)[LATENCY_ANSWERS // 2]
        self._first_bytes_s.clear()
        # What is usual is the least seen, and forgets it slowly: a network may become another.
        self._usual_s = min(self._usual_s * LATENCY_DRIFT_RATIO, median_s)
        if median_s <= self._usual_s * LATENCY_RATIO + LATENCY_SLACK_S:
            return False
        return self.told(Sign.LATENCY, in_flight_count, now_s)
