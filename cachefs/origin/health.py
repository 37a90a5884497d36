"""Does an origin answer? A pure state machine over attempts and time.

======== ======================================================== ========
state    event                                                    next
======== ======================================================== ========
healthy  `FAILURES_MAX` failed in a row, the first of them        degraded
         `FAILING_S` ago or longer
degraded an attempt is let through, `probe_at_s` or later         probing
probing  the probe, or an attempt begun before, succeeded         healthy
probing  the probe failed                                         degraded
probing  the probe ended without verdict                          degraded, may be probed at once
======== ======================================================== ========

A failure is an attempt without an answer, or one that was throttled or met a 5xx: an answer that
refuses us is a healthy origin's. While it is not healthy, one attempt at a time goes out, further
and further apart; all others wait, so that thousands of parts do not hammer what is down.

Times are monotonic seconds, given by the caller.
"""

from __future__ import annotations

from typing import Literal

FAILURES_MAX = 16
FAILING_S = 2.0
PROBE_FIRST_S = 0.5
PROBE_CAP_S = 10.0

State = Literal["healthy", "degraded", "probing"]
Admission = Literal["pass", "probe", "wait"]


class OriginHealth:
    """The state of one origin. See the top of the file.

    Attributes:
        state: where it is in the table above.
        since_s: when it was degraded; meaningless while it is healthy.
        probe_at_s: from when on a probe may go out; meaningless while it is healthy.
    """

    def __init__(self, now_s: float) -> None:
        self.state: State = "healthy"
        self.since_s = now_s
        self.probe_at_s = now_s
        self._wait_s = PROBE_FIRST_S
        self._failures = 0
        self._failing_since_s = now_s

    @property
    def is_spotless(self) -> bool:
        """Healthy, and nothing failed since the last success: another success changes nothing."""
        return self._failures == 0 and self.state == "healthy"

    def admit(self, now_s: float) -> Admission:
        """Whether an attempt may go out. ``probe``: it may, and how it ends decides."""
        if self.state == "healthy":
            return "pass"
        if self.state == "degraded" and now_s >= self.probe_at_s:
            self.state = "probing"
            return "probe"
        return "wait"

    def succeeded(self, now_s: float) -> bool:
        """An attempt was answered. True: the origin is healthy from now on, and was not."""
        self._failures = 0
        if self.state == "healthy":
            return False
        self.state = "healthy"
        self._wait_s = PROBE_FIRST_S
        return True

    def failed(self, now_s: float, *, probe: bool) -> bool:
        """An attempt was not answered. True: the origin is degraded from now on, and was healthy.

        Args:
            now_s: the time.
            probe: it was the one that `admit` called the probe.
        """
        self._failures += 1
        if self._failures == 1:
            self._failing_since_s = now_s
        if self.state == "healthy":
            # Many at once prove little: a load balancer that restarts breaks all connections.
            lasting = now_s - self._failing_since_s >= FAILING_S
            if self._failures < FAILURES_MAX or not lasting:
                return False
            self.state = "degraded"
            self.since_s = now_s
            self.probe_at_s = now_s + self._wait_s
            return True
        if probe:
            self.state = "degraded"
            self._wait_s = min(PROBE_CAP_S, 2 * self._wait_s)
            self.probe_at_s = now_s + self._wait_s
        return False

    def probe_ended(self, now_s: float) -> None:
        """The probe was given up for reasons of its own; the next attempt probes again."""
        if self.state == "probing":
            self.state = "degraded"
            self.probe_at_s = now_s
