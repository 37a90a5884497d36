"""Is the cache disk trusted? A pure state machine over errors and time.

======== ================================ ========
state    event                            next
======== ================================ ========
healthy  failed                           degraded
healthy  struck, `STRIKES_MAX` in a row   degraded
healthy  struck, fewer                    healthy
degraded reserved, the back-off later     probing
probing  succeeded                        healthy
probing  failed, struck                   degraded
probing  the probe ended without verdict  degraded, may be probed at once
======== ================================ ========

A store has two: one for what it writes, one for what it reads, because a full disk reads well. A
**failure** is the disk's (it is late, full, read-only, gone): everything passes by the cache. A
**strike** may be one shard's bad luck (a sector that cannot be read); only a row of them is the
disk's. While degraded or probing, reads from the origin go on past the cache. The probe is one
ordinary reservation, or one ordinary read: how it ends decides.
"""

from __future__ import annotations

from typing import Literal

BACKOFF_S = 30.0
STRIKES_MAX = 3

State = Literal["healthy", "degraded", "probing"]


class DiskHealth:
    """The state of one disk's one side. Times are monotonic seconds, given by the caller.

    Args:
        backoff_s: how long a disk that failed is left alone before it is probed.
    """

    def __init__(self, backoff_s: float = BACKOFF_S) -> None:
        self._backoff_s = backoff_s
        self.state: State = "healthy"
        self._retry_at_s = 0.0
        self._strikes_count = 0

    def admits(self, now_s: float) -> bool:
        """Whether a new fill, or a read, may use the disk. Changes nothing."""
        return self.state == "healthy" or (self.state == "degraded" and now_s >= self._retry_at_s)

    def reserved(self) -> bool:
        """What `admits` let through begins. True: it is the probe."""
        if self.state == "healthy":
            return False
        assert self.state == "degraded", self.state
        self.state = "probing"
        return True

    def failed(self, now_s: float) -> None:
        """The disk refused, or hangs."""
        self.state = "degraded"
        self._retry_at_s = now_s + self._backoff_s
        self._strikes_count = 0

    def struck(self, now_s: float) -> None:
        """One shard could not be read."""
        self._strikes_count += 1
        if self.state == "probing" or self._strikes_count >= STRIKES_MAX:
            self.failed(now_s)

    def answered(self) -> None:
        """The disk did what it was asked: the row of strikes is broken."""
        self._strikes_count = 0

    def probe_succeeded(self) -> None:
        """The probe did well. After a failure meanwhile it proves nothing."""
        if self.state == "probing":
            self.state = "healthy"

    def probe_ended(self, now_s: float) -> None:
        """The probe was given up; if the disk was not why, the next one probes again."""
        if self.state == "probing":
            self.state = "degraded"
            self._retry_at_s = now_s
