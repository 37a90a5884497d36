"""How fast the store may write, for disks that share their bandwidth (network disks). Pure.

Two rules. **Admission**: a new shard's bytes join a queue that drains at the cap; while the queue
is longer than `QUEUE_S_MAX`, new shards stream past the store instead of waiting, since waiting
would hold arena slots. **Pacing**: each write starts when the bytes before it have had their time.
Reads are not touched. Bytes admitted and never written are forgotten as their time passes.

Times are monotonic seconds, given by the caller.
"""

from __future__ import annotations

QUEUE_S_MAX = 2.0


class WriteCap:
    """See the top of the file. A cap of 0 bytes per second is none."""

    def __init__(self, bytes_per_s_max: int, *, queue_s_max: float = QUEUE_S_MAX) -> None:
        assert bytes_per_s_max >= 0, bytes_per_s_max
        self._bytes_per_s = bytes_per_s_max
        self._queue_s_max = queue_s_max
        self._drained_at_s = 0.0
        self._next_at_s = 0.0

    @property
    def is_set(self) -> bool:
        """Whether there is a cap."""
        return bool(self._bytes_per_s)

    def admits(self, now_s: float) -> bool:
        """Whether a new shard may join the queue. Changes nothing."""
        return not self._bytes_per_s or self._drained_at_s - now_s <= self._queue_s_max

    def admitted(self, size_bytes: int, now_s: float) -> None:
        """A shard of so many bytes joined."""
        if self._bytes_per_s:
            self._drained_at_s = max(self._drained_at_s, now_s) + size_bytes / self._bytes_per_s

    def delay_s(self, size_bytes: int, now_s: float) -> float:
        """How long the next write, of so many bytes, waits before it starts. Each call counts."""
        if not self._bytes_per_s:
            return 0.0
        begins_at_s = max(self._next_at_s, now_s)
        self._next_at_s = begins_at_s + size_bytes / self._bytes_per_s
        return begins_at_s - now_s
