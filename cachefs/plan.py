"""Who wants which shard: the book of every live session's datasets and plan. Pure.

A session **claims** the shards of the datasets that it has open: while it lives, they are worth
keeping, in this epoch and the next. Of those, the ones at plan positions not yet published are
**pending**. Plans are leases: `drop` forgets all that a dead session wanted.

Owned by the daemon's loop. Memory: two counters a wanted shard and one entry a plan position.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable


class PlanBook:
    """Counts of claims and pending positions by shard digest."""

    def __init__(self) -> None:
        self._claims: collections.Counter[str] = collections.Counter()
        self._pending: collections.Counter[str] = collections.Counter()
        self._claimed_by: dict[int, list[str]] = {}
        self._pending_by: dict[int, collections.deque[str]] = {}

    def claim(self, session: int, digests: Iterable[str]) -> None:
        """A session opened a dataset of these shards."""
        mine = self._claimed_by.setdefault(session, [])
        for digest in digests:
            mine.append(digest)
            self._claims[digest] += 1

    def extend(self, session: int, digests: Iterable[str]) -> None:
        """A session appended these shards to its plan."""
        mine = self._pending_by.setdefault(session, collections.deque())
        for digest in digests:
            mine.append(digest)
            self._pending[digest] += 1

    def advance(self, session: int) -> None:
        """The first pending position of a session was published whole."""
        self._forget(self._pending, self._pending_by[session].popleft())

    def drop(self, session: int) -> None:
        """The session ended."""
        for digest in self._claimed_by.pop(session, ()):
            self._forget(self._claims, digest)
        for digest in self._pending_by.pop(session, ()):
            self._forget(self._pending, digest)

    def claimed(self, digest: str) -> bool:
        """A live session's dataset holds the shard."""
        return digest in self._claims

    def pending(self, digest: str) -> bool:
        """A live plan will read the shard."""
        return digest in self._pending

    @property
    def is_empty(self) -> bool:
        """Nobody wants anything."""
        return not (self._claims or self._pending or self._claimed_by or self._pending_by)

    @staticmethod
    def _forget(counter: collections.Counter[str], digest: str) -> None:
        counter[digest] -= 1
        if not counter[digest]:
            del counter[digest]
