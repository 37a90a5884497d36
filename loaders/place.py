"""Where the trainer stands in the order: what it took, not what was made ahead of it.

After every batch the place is one number: the samples of the epoch that all ranks together have
taken, since they take one global batch a step. The last few places are kept, for whoever fetches
some batches ahead of their use (`behind`). Where samples are taken one by one, the place lies
within the batch that they were decoded with.

Pure; the trainer's thread's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gpufeed.cachefs.errors import UsageError
from gpufeed.loaders.order import RankRows
from gpufeed.loaders.resume import Cursor

BEHIND_MAX = 16


class Place:
    """See the top of the file."""

    def __init__(self) -> None:
        self._cursors: deque[Cursor] = deque([Cursor()], maxlen=BEHIND_MAX + 1)
        self._start = Cursor()
        self._rows = RankRows(0, 1, 1)
        self._world_size = 1
        self._good: list[int] = []
        self._left = 0

    def begin(self, cursor: Cursor, rows: RankRows, *, world_size: int) -> None:
        """An epoch is run from `cursor` on."""
        self._start, self._rows, self._world_size = cursor, rows, world_size
        if cursor != self._cursors[-1]:  # else it is gone on with
            self._cursors.clear()
            self._cursors.append(cursor)
        self._left = 0

    def took(self, index: int, rows: int, failed: Sequence[int] = ()) -> None:
        """The trainer takes batch `index` since `begin`.

        Args:
            index: from 0.
            rows: samples of it on this rank; fewer than usual only at the epoch's end.
            failed: rows that will not be handed over.
        """
        before = self._start.samples + index * self._rows.size
        samples = before + (rows if self._world_size == 1 else self._rows.size)
        self._cursors.append(Cursor(self._start.epoch, samples))
        self._good = [row for row in range(rows) if row not in failed]
        self._left = 0

    def passed_over(self, index: int, rows: int, failed: Sequence[int]) -> None:
        """As `took`, of a batch of which nothing is handed over: no batch to go behind."""
        self.took(index, rows, failed)
        del self._cursors[-2]

    def require_whole(self) -> None:
        """The place is between two batches.

        Raises:
            UsageError: samples are left to be taken.
        """
        if self._left:
            raise UsageError(
                f"the world can change after every {self._rows.count} samples with "
                f"batch_size=None; {self._left} are left: take them first"
            )

    def left(self, count: int) -> None:
        """So many samples of the last batch were not handed over yet."""
        self._left = count

    def ended(self) -> None:
        """The epoch is over."""
        self._cursors.append(Cursor(self._start.epoch + 1))
        self._left = 0

    def cursor(self, behind: int = 0) -> Cursor:
        """The place, or that of `behind` batches before.

        Raises:
            UsageError: so many batches were not taken since `begin`, or are not kept; or the place
                is within a batch, where it cannot be told.
        """
        if not 0 <= behind < len(self._cursors):
            raise UsageError(
                f"the place {behind} batches ago is not known: {len(self._cursors) - 1} were taken "
                f"since the last iter(), of which the last {BEHIND_MAX} are kept"
            )
        now = self._cursors[-1 - behind]
        if not self._left:
            return now
        if behind or self._world_size > 1:
            raise UsageError(
                f"with batch_size=None the state can be told after every {self._rows.count} "
                f"samples of each rank; {self._left} are left: take them first, or set batch_size"
            )
        taken = len(self._good) - self._left
        row = self._good[taken - 1] + 1 if taken else 0
        before = self._cursors[-2].samples if len(self._cursors) > 1 else self._start.samples
        return Cursor(now.epoch, before + row)
