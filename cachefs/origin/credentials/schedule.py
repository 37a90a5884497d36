"""When to renew credentials. Pure: times and outcomes in, decisions out.

They are renewed ahead of their expiry by `AHEAD_RATIO` of their lifetime, at most `AHEAD_S`, and
up to half as much again by chance, so that the nodes of a cluster do not all ask at one moment.
A renewal that fails is tried again after a back-off that doubles up to `BACK_OFF_MAX_S`, and that
leaves several tries within the time they still have. They count as expired a little early, for a
request signed at the last moment arrives after it.

Times are of a clock that never goes back: what a wrong or corrected wall clock says is no matter.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from gpufeed.cachefs.origin.credentials.source import Issued

AHEAD_S = 900.0
AHEAD_RATIO = 0.2
EARLY_S = 10.0
EARLY_RATIO = 0.05
BACK_OFF_S = 1.0
BACK_OFF_MAX_S = 60.0
# A failing renewal has at least so many tries in the time that is left.
TRIES_LEFT_MIN = 4


@dataclass(slots=True)
class Schedule:
    """The state of one set of credentials; at first there are none."""

    rng: random.Random
    expires_at_s: float = -math.inf
    ask_at_s: float = -math.inf
    failures_count: int = 0

    def is_expired(self, now_s: float) -> bool:
        """Nothing may be signed with them any more."""
        return now_s >= self.expires_at_s

    def is_due(self, now_s: float) -> bool:
        """New ones should be asked for; when they are expired too: may be asked for."""
        return now_s >= self.ask_at_s

    def issued(self, issued: Issued, now_s: float) -> None:
        """New ones have come."""
        self.failures_count = 0
        lifetime_s = issued.lifetime_s
        if math.isinf(lifetime_s):
            self.expires_at_s = math.inf
            self.ask_at_s = math.inf if issued.renew_in_s is None else now_s + issued.renew_in_s
            return
        ahead_s = min(AHEAD_S, lifetime_s * AHEAD_RATIO) * self.rng.uniform(1.0, 1.5)
        self.expires_at_s = now_s + lifetime_s - min(EARLY_S, lifetime_s * EARLY_RATIO)
        self.ask_at_s = now_s + lifetime_s - ahead_s

    def failed(self, now_s: float) -> float:
        """None have come; returns how long to wait before the next try."""
        # The exponent is bounded: a float's is.
        delay_s = min(BACK_OFF_MAX_S, BACK_OFF_S * 2.0 ** min(self.failures_count, 30))
        self.failures_count += 1
        left_s = self.expires_at_s - now_s
        if left_s > 0:
            delay_s = min(delay_s, left_s / TRIES_LEFT_MIN)
        delay_s *= self.rng.uniform(0.5, 1.0)
        self.ask_at_s = now_s + delay_s
        return delay_s
