"""Is the cache disk trusted? A pure state machine over errors and time.

======== ================================ ========
state    event                            next
======== ================================ ========
healthy  failed                           degraded
degraded reserved, `BACKOFF_S` or later   probing
probing  succeeded                        healthy
probing  failed                           degraded
probing  the probe ended without verdict  degraded, may be probed at once
======== ================================ ========

While degraded or probing, reads from the origin go on past the cache. The probe is one ordinary
reservation: how its writes and its commit end decides.
"""

from __future__ import annotations

from typing import Literal

BACKOFF_S = 30.0

State = Literal["healthy", "degraded", "probing"]


class DiskHealth:
    """The state of one disk. Times are monotonic seconds, given by the caller."""

    def __init__(self) -> None:
        self.state: State = "healthy"
        self._retry_at_s = 0.0

    def admits(self, now_s: float) -> bool:
        """Whether a new fill may use the disk. Changes nothing."""
        return self.state == "healthy" or (self.state == "degraded" and now_s >= self._retry_at_s)

    def reserved(self) -> bool:
        """A fill that `admits` let through was reserved. True: it is the probe."""
        if self.state == "healthy":
            return False
        assert self.state == "degraded", self.state
        self.state = "probing"
        return True

    def failed(self, now_s: float) -> None:
        """A write failed, or hangs."""
        self.state = "degraded"
        self._retry_at_s = now_s + BACKOFF_S

    def probe_succeeded(self) -> None:
        """The probe was committed. After a failure meanwhile it proves nothing."""
        if self.state == "probing":
            self.state = "healthy"

    def probe_ended(self, now_s: float) -> None:
        """The probe was aborted; if the disk was not why, the next reservation probes again."""
        if self.state == "probing":
            self.state = "degraded"
            self._retry_at_s = now_s
