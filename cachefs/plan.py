"""Who wants which shard: the book of every live session's datasets, order and plan. Pure.

A session **claims** the shards of the datasets that it has open. It tells its order twice: as a
**forecast** (the rest of this epoch and the next one, for the policy), and as its **plan**, the
next few positions, which are published; those not published yet are **pending**. Plans are leases:
`drop` forgets all that a dead session wanted.

What the policy needs is kept in `gpufeed.cachefs.nextuse`; here are the sessions' sides of it.

Owned by the daemon's loop. Memory: what `nextuse` says, and one entry a pending position.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence

import numpy as np

from gpufeed.cachefs.errors import ProtocolError
from gpufeed.cachefs.nextuse import NextUses, Numbers

FORECAST_POSITIONS_MAX = 1 << 24


class PlanBook:
    """See the top of the file."""

    def __init__(self, uses: NextUses) -> None:
        self._uses = uses
        self._pending: collections.Counter[str] = collections.Counter()
        self._pending_by: dict[int, collections.deque[str]] = {}
        # Of datasets that somebody claims: numbers nobody claims may be other shards' later.
        self._numbers: dict[int, Numbers] = {}
        self._claimed_by: dict[int, set[int]] = {}

    # --- datasets and order -------------------------------------------------------------------

    def join(self, session: int, job: str) -> None:
        """The session is a rank of this job; ranks of one job go in step."""
        self._uses.join(session, job)

    def claim(self, session: int, dataset: int, digests: Iterable[str]) -> None:
        """A session opened a dataset of these shards. The digests of a dataset never change."""
        mine = self._claimed_by.setdefault(session, set())
        if dataset in mine:
            return
        numbers = self._numbers.get(dataset)
        if numbers is None:
            numbers = self._numbers[dataset] = self._uses.numbers(digests)
        mine.add(dataset)
        self._uses.claim(session, numbers)

    def forecast(self, session: int, dataset: int, shard_ids: Sequence[int], *, anew: bool) -> None:
        """Append to the order that a session will read in; see `NextUses.forecast`.

        Raises:
            ProtocolError: more than `FORECAST_POSITIONS_MAX` ahead, or shards that are not there.
        """
        count = len(self._numbers[dataset])
        if any(shard >= count for shard in shard_ids):
            raise ProtocolError(f"FORECAST names a shard outside the dataset's {count}")
        if not anew and self._uses.ahead_count(session) > FORECAST_POSITIONS_MAX:
            raise ProtocolError(f"a forecast of more than {FORECAST_POSITIONS_MAX} positions")
        numbers = self._numbers[dataset][np.asarray(shard_ids, np.int64)]
        self._uses.forecast(session, numbers, anew=anew)

    def begin(self, session: int, digest: str) -> None:
        """A session begins to read the next shard of its plan."""
        number = self._uses.find(digest)
        if number is not None:
            self._uses.used(session, number)

    def measured(self, session: int, shards_per_s: float) -> None:
        """The session's demand rate: how fast it reads while it does not wait for data."""
        self._uses.set_rate(session, shards_per_s)

    # --- the plan -----------------------------------------------------------------------------

    def extend(self, session: int, digests: Iterable[str]) -> None:
        """A session appended these shards to its plan."""
        mine = self._pending_by.setdefault(session, collections.deque())
        for digest in digests:
            mine.append(digest)
            self._pending[digest] += 1

    def advance(self, session: int) -> None:
        """The first pending position of a session was published whole."""
        self._forget(self._pending_by[session].popleft())

    def pending(self, digest: str) -> bool:
        """A live plan will read the shard."""
        return digest in self._pending

    def wait_s(self, digest: str) -> float:
        """Seconds until a live plan reads the shard; 0 where nobody told when; infinite: never."""
        number = self._uses.find(digest)
        wait_s = math.inf if number is None else self._uses.wait_s(number)
        return 0.0 if wait_s == math.inf and digest in self._pending else wait_s

    # --- the end ------------------------------------------------------------------------------

    def drop(self, session: int) -> None:
        """The session ended."""
        self._uses.drop(session)
        for digest in self._pending_by.pop(session, ()):
            self._forget(digest)
        for dataset in self._claimed_by.pop(session, ()):
            if not any(dataset in other for other in self._claimed_by.values()):
                del self._numbers[dataset]

    @property
    def is_empty(self) -> bool:
        """Nobody wants anything."""
        return self._uses.is_empty and not (
            self._pending or self._pending_by or self._claimed_by or self._numbers
        )

    def _forget(self, digest: str) -> None:
        self._pending[digest] -= 1
        if not self._pending[digest]:
            del self._pending[digest]
