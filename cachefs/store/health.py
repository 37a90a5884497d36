"""Is the cache disk trusted? A pure state machine over errors and time.

``healthy`` --error--> ``degraded`` --`BACKOFF_S` later--> ``probing`` --success--> ``healthy``,
``probing`` --error--> ``degraded``. While degraded no shard is reserved: reads go on from the
origin without the cache. Probing lets one reservation through; how its writes end decides.
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

    def failed(self, now_s: float) -> None:
        """A call on the disk failed."""
        self.state = "degraded"
        self._retry_at_s = now_s + BACKOFF_S

    def succeeded(self) -> None:
        """A shard was committed."""
        self.state = "healthy"

    def may_reserve(self, now_s: float) -> bool:
        """Whether a new fill may use the disk. In `degraded` it moves on when the time has come."""
        if self.state == "degraded" and now_s >= self._retry_at_s:
            self.state = "probing"
            return True
        return self.state == "healthy"
