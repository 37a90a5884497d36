"""What a policy that knew the future would have fetched: lower bounds for a trace. Pure.

`min_bytes` is Belady's MIN with bypass: whenever more is held than fits, what is read again last is
dropped, the newcomer included. For shards of one size no policy fetches less (Belady 1966). For
other sizes the best is NP-hard; the same rule is the offline **greedy** that policies are compared
with, and `fractional_bytes`, which may keep a part of a shard, is a true lower bound: it is MIN
over the bytes, each a page of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

_NEVER = 1 << 60


def next_reads(trace: Sequence[int]) -> list[int]:
    """For each read, where in the trace its shard is read next; `_NEVER` if it is not."""
    following = [_NEVER] * len(trace)
    last: dict[int, int] = {}
    for i in range(len(trace) - 1, -1, -1):
        following[i] = last.get(trace[i], _NEVER)
        last[trace[i]] = i
    return following


def min_bytes(trace: Sequence[int], sizes: Sequence[int], capacity_bytes: int) -> int:
    """Bytes fetched by MIN with bypass (equal sizes), or by offline greedy (other sizes).

    Args:
        trace: shard numbers in the order of reading.
        sizes: bytes by shard number.
        capacity_bytes: of the cache.
    """
    return _fetched(trace, sizes, capacity_bytes, whole=True)


def fractional_bytes(trace: Sequence[int], sizes: Sequence[int], capacity_bytes: int) -> int:
    """No policy fetches fewer bytes than this; see the top of the file."""
    return _fetched(trace, sizes, capacity_bytes, whole=False)


def _fetched(
    trace: Sequence[int], sizes: Sequence[int], capacity_bytes: int, *, whole: bool
) -> int:
    held: dict[int, int] = {}
    due: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    used_bytes = 0
    fetched_bytes = 0
    for following, shard in zip(next_reads(trace), trace, strict=True):
        kept_bytes = held.pop(shard, 0)
        used_bytes -= kept_bytes
        fetched_bytes += sizes[shard] - kept_bytes
        if following == _NEVER:
            due.pop(shard, None)
            continue
        held[shard] = sizes[shard]
        due[shard] = following
        used_bytes += sizes[shard]
        heapq.heappush(farthest, (-following, shard))
        while used_bytes > capacity_bytes:
            negative, victim = farthest[0]
            if victim not in held or due[victim] != -negative:
                heapq.heappop(farthest)
                continue
            excess_bytes = held[victim] if whole else min(held[victim], used_bytes - capacity_bytes)
            held[victim] -= excess_bytes
            used_bytes -= excess_bytes
            if not held[victim]:
                del held[victim]
                heapq.heappop(farthest)
    return fetched_bytes
