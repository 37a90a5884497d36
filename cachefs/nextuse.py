"""When each shard will be read next, from every live job's forecast, cursor and demand rate. Pure.

A **forecast** is the order in which a session will read shards: the rest of this epoch and the next
one. Sessions of one job (its ranks on this node) share a row, because they go in step: one rate,
one mean cursor. Time to next use is ``min over jobs of (position - cursor) / rate``, positions
counted in shards of the session's own order. One epoch of lookahead is as good as knowing it all:
each shard of a fresh permutation comes again within two epochs.

Shards have **numbers** (dense, reused), so that everything a shard needs is a column of a few
arrays: for each job its first and second pending position, 8 bytes. Further positions, met where a
small dataset is forecast often, wait in a dictionary, `FURTHER_MAX` a shard and job; beyond them
the forecast is not remembered.

Invariants:
    - `first <= second <= further ones`; `NEVER` where the job does not want the shard (again);
    - a number is free again when no session claims its shard and the policy does not `keep` it.

No clock: times are passed in, in seconds of any one monotonic clock. Owned by one thread.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int32]
Positions = npt.NDArray[np.float32]

# Positions are 4 bytes, exact below 2**24, and infinite where there is none: arithmetic then needs
# no masks, which is what makes a look at 512 shards and 16 jobs cost microseconds.
NEVER = np.float32(np.inf)
# Jobs with a forecast at a time; those beyond have claims only.
JOBS_MAX = 64
# A position this far behind its job's cursor was skipped (a loop that broke off), not delayed.
LATE_POSITIONS = 256
FURTHER_MAX = 64
# Positions are moved down before they reach this, where so many have been read: it takes a while.
_REBASE_AT = 1 << 23
_REBASE_LEAST = 1 << 20
# What a newly measured rate counts against those before.
RATE_SHARE = 0.2
_FIRST_CAPACITY = 1024
# `ndarray.min` without its Python wrapper, which costs as much as the work does here.
_least = np.minimum.reduce
_LEAVERS_AT_ONCE = 1024


@dataclass(slots=True)
class _Job:
    row: int
    rate_per_s: float = 1.0
    has_rate: bool = False
    cursor: float = 0.0
    sessions: dict[int, _Session] = field(default_factory=dict)


@dataclass(slots=True)
class _Session:
    job: _Job | None = None
    claims: list[Numbers] = field(default_factory=list)
    has_told: bool = False
    cursor: int = 0
    end: int = 0


class NextUses:
    """See the top of the file.

    Attributes:
        changes: grows whenever the waits of many shards change at once.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._number: dict[str, int] = {}
        self._digests: list[str] = []
        # Nobody claims or keeps these any more, where `_leaving` still says so. They are taken
        # when a number is needed: a session of a million shards ends without touching each.
        self._leavers: list[int] = []
        self._leaver_arrays: list[Numbers] = []
        self._leavers_noted = 0
        self._leaving = np.zeros(_FIRST_CAPACITY, np.bool_)
        self._claims = np.zeros(_FIRST_CAPACITY, np.int32)
        # Of the claims, those of sessions that have not told their order.
        self._bare = np.zeros(_FIRST_CAPACITY, np.int32)
        self._kept = np.zeros(_FIRST_CAPACITY, np.bool_)
        self._first = np.full((1, _FIRST_CAPACITY), NEVER)
        self._second = np.full((1, _FIRST_CAPACITY), NEVER)
        self._further: dict[tuple[int, int], list[float]] = {}
        self._jobs: dict[str, _Job] = {}
        self._free_rows = [0]
        self._rows_used = 0
        self._sessions: dict[int, _Session] = {}
        self._cursor = np.zeros(1, np.float32)
        self._per_position_s = np.ones(1, np.float32)
        self._bare_sessions = 0
        self._planning: set[int] = set()

    # --- numbers ------------------------------------------------------------------------------

    @property
    def capacity_count(self) -> int:
        """Numbers are below this; it grows, never shrinks."""
        return len(self._claims)

    def number(self, digest: str) -> int:
        """The shard's number; a new one if it has none. The caller claims or keeps it now."""
        number = self._number.get(digest)
        if number is not None:
            self._leaving[number] = False
            return number
        number = self._take_leaver()
        if number is None:
            number = len(self._digests)
            self._digests.append(digest)
            if number >= self.capacity_count:
                self._grow(self.capacity_count + self.capacity_count // 4)
        else:
            del self._number[self._digests[number]]
            self._digests[number] = digest
        self._number[digest] = number
        return number

    def _take_leaver(self) -> int | None:
        while self._leavers or self._leaver_arrays:
            if not self._leavers:
                last = self._leaver_arrays[-1]
                self._leavers = last[-_LEAVERS_AT_ONCE:].tolist()
                self._leaver_arrays[-1] = last[:-_LEAVERS_AT_ONCE]
                if not len(self._leaver_arrays[-1]):
                    self._leaver_arrays.pop()
                continue
            number = self._leavers.pop()
            if self._leaving[number]:
                self._leaving[number] = False
                self._first[:, number] = NEVER
                self._second[:, number] = NEVER
                if self._further:
                    for row in range(self._rows_used):
                        self._further.pop((row, number), None)
                return number
        return None

    def find(self, digest: str) -> int | None:
        """The shard's number, if it has one."""
        return self._number.get(digest)

    def digest(self, number: int) -> str:
        """The shard of a number in use."""
        return self._digests[number]

    def keep(self, number: int) -> None:
        """The number stays until `unkeep`, whoever claims it."""
        self._kept[number] = True

    def unkeep(self, number: int) -> None:
        """See `keep`."""
        self._kept[number] = False
        if self._claims[number] == 0:
            self._leaving[number] = True
            self._leavers.append(number)
            self._noted(1)

    def _noted(self, count: int) -> None:
        """So many more leavers. One that came back and left again is noted twice, until here."""
        self._leavers_noted += count
        if self._leavers_noted > self.capacity_count:
            self._leavers_noted = 0
            self._leavers = []
            self._leaver_arrays = [np.flatnonzero(self._leaving).astype(np.int32)]

    def restore(self, numbers: dict[str, int]) -> None:
        """Take over shards numbered from 0 on, and keep them. Called first, at most once.

        A copied dictionary costs a twentieth of one that is made.
        """
        assert not self._digests, "restored into numbers in use"
        count = len(numbers)
        if count > self.capacity_count:
            self._grow(count)
        self._digests = list(numbers)
        self._number = numbers.copy()
        self._kept[:count] = True

    def _grow(self, capacity: int) -> None:
        more = capacity - self.capacity_count
        self._claims = np.pad(self._claims, (0, more))
        self._bare = np.pad(self._bare, (0, more))
        self._kept = np.pad(self._kept, (0, more))
        self._leaving = np.pad(self._leaving, (0, more))
        self._first = np.pad(self._first, ((0, 0), (0, more)), constant_values=NEVER)
        self._second = np.pad(self._second, ((0, 0), (0, more)), constant_values=NEVER)

    # --- sessions and jobs --------------------------------------------------------------------

    def numbers(self, digests: Iterable[str]) -> Numbers:
        """Shards' numbers, new ones where needed. The caller claims them now."""
        return np.fromiter((self.number(digest) for digest in digests), np.int32)

    def claim(self, session: int, numbers: Numbers) -> None:
        """A session opened a dataset of these shards. The array is kept, and may be shared."""
        state = self._session(session)
        state.claims.append(numbers)
        np.add.at(self._claims, numbers, 1)
        if not state.has_told:
            np.add.at(self._bare, numbers, 1)
            self._bare_sessions += len(state.claims) == 1
        self.changes += 1

    def join(self, session: int, job: str) -> bool:
        """The session is one of this job's ranks. False: too many jobs; it has claims only."""
        found = self._jobs.get(job)
        if found is None:
            row = self._take_row()
            if row is None:
                return False
            found = self._jobs[job] = _Job(row)
        state = self._session(session)
        assert state.job is None, f"session {session} belongs to a job already"
        state.job = found
        # Who joins late counts from where the others are.
        state.cursor = state.end = int(found.cursor)
        found.sessions[session] = state
        self._moved(found)
        return True

    def forecast(self, session: int, numbers: Numbers, *, anew: bool) -> None:
        """Append to what a session will read. Ignored for a session without a job.

        Args:
            session: its number.
            numbers: of shards, in the order of reading.
            anew: what was forecast before and not read will not come.
        """
        state = self._session(session)
        job = state.job
        if job is None:
            return
        self.changes += 1
        if not state.has_told:
            state.has_told = True
            self._bare_sessions -= bool(state.claims)
            for claimed in state.claims:
                np.subtract.at(self._bare, claimed, 1)
        if anew:
            state.end = state.cursor
            if len(job.sessions) == 1:
                self._clear_row(job.row)
        if state.end + len(numbers) > _REBASE_AT:
            self._rebase(job)
        positions = np.arange(state.end, state.end + len(numbers), dtype=np.float32)
        state.end += len(numbers)
        self._moved(job)
        unique, index = np.unique(numbers, return_index=True)
        if len(unique) == len(numbers):
            self._append(job.row, numbers, positions)
            return
        again = np.ones(len(numbers), np.bool_)
        again[index] = False
        index.sort()
        self._append(job.row, numbers[index], positions[index])
        for number, position in zip(
            numbers[again].tolist(), positions[again].tolist(), strict=True
        ):
            self._append_again(job.row, number, position)

    def _append(self, row: int, numbers: Numbers, positions: Positions) -> None:
        first, second = self._first[row], self._second[row]
        has_first = first[numbers] != NEVER
        free = numbers[~has_first]
        first[free] = positions[~has_first]
        numbers, positions = numbers[has_first], positions[has_first]
        has_second = second[numbers] != NEVER
        second[numbers[~has_second]] = positions[~has_second]
        for number, position in zip(
            numbers[has_second].tolist(), positions[has_second].tolist(), strict=True
        ):
            self._append_further(row, number, position)
        # Ranks of a job append to one row: the nearer position comes first.
        swap = numbers[second[numbers] < first[numbers]]
        first[swap], second[swap] = second[swap], first[swap]

    def _append_again(self, row: int, number: int, position: float) -> None:
        """Like `_append`, of one shard that has a first position."""
        if self._second[row, number] == NEVER:
            self._second[row, number] = position
        else:
            self._append_further(row, number, position)
        first, second = self._first[row, number], self._second[row, number]
        if second < first:
            self._first[row, number], self._second[row, number] = second, first

    def _append_further(self, row: int, number: int, position: float) -> None:
        """A third position or a later one, unless it is nearer than the second: then that is."""
        second = float(self._second[row, number])
        if position < second:
            self._second[row, number], position = position, second
        further = self._further.setdefault((row, number), [])
        bisect.insort(further, position)
        del further[FURTHER_MAX:]

    def used(self, session: int, number: int) -> None:
        """The session begins to read a shard: the first pending position of it is over."""
        state = self._session(session)
        job = state.job
        if job is None:
            return
        state.cursor += 1
        state.end = max(state.end, state.cursor)
        if len(job.sessions) == 1 and state.end > state.cursor:
            self._cursor[job.row] = job.cursor = state.cursor
        else:
            self._moved(job)
        self._promote(job.row, number)

    def _promote(self, row: int, number: int) -> None:
        self._first[row, number] = self._second[row, number]
        further = self._further.get((row, number)) if self._further else None
        if further is None:
            self._second[row, number] = NEVER
            return
        self._second[row, number] = further.pop(0)
        if not further:
            del self._further[(row, number)]

    def ahead_count(self, session: int) -> int:
        """Positions that the session has forecast and not read."""
        state = self._sessions.get(session)
        return 0 if state is None else state.end - state.cursor

    def set_rate(self, session: int, shards_per_s: float) -> None:
        """How fast the session's job reads while it does not wait for data; above 0."""
        assert shards_per_s > 0, shards_per_s
        job = self._session(session).job
        if job is not None:
            # The first one counts whole; later ones err to both sides, and less on the average.
            share = RATE_SHARE if job.has_rate else 1.0
            job.has_rate = True
            job.rate_per_s += share * (shards_per_s - job.rate_per_s)
            self._per_position_s[job.row] = 1.0 / job.rate_per_s

    def drop(self, session: int) -> None:
        """The session ended: plans are leases."""
        state = self._sessions.pop(session, None)
        if state is None:
            return
        self.changes += 1
        self._bare_sessions -= bool(state.claims) and not state.has_told
        for numbers in state.claims:
            np.subtract.at(self._claims, numbers, 1)
            if not state.has_told:
                np.subtract.at(self._bare, numbers, 1)
        job = state.job
        if job is not None:
            del job.sessions[session]
            if job.sessions:
                self._moved(job)
            else:
                self._drop_job(job)
        for numbers in state.claims:
            gone = numbers[(self._claims[numbers] == 0) & ~self._kept[numbers]]
            self._leaving[gone] = True
            self._leaver_arrays.append(gone)
            self._noted(len(gone))

    def _drop_job(self, job: _Job) -> None:
        self._clear_row(job.row)
        self._planning.discard(job.row)
        self._free_rows.append(job.row)
        name = next(name for name, other in self._jobs.items() if other is job)
        del self._jobs[name]

    def _session(self, session: int) -> _Session:
        state = self._sessions.get(session)
        if state is None:
            state = self._sessions[session] = _Session()
        return state

    def _moved(self, job: _Job) -> None:
        sessions = job.sessions.values()
        job.cursor = sum(state.cursor for state in sessions) / len(sessions)
        self._cursor[job.row] = job.cursor
        if any(state.end > state.cursor for state in sessions):
            self._planning.add(job.row)
        else:
            self._planning.discard(job.row)

    def _take_row(self) -> int | None:
        if not self._free_rows:
            rows = len(self._first)
            if rows >= JOBS_MAX:
                return None
            more = ((0, rows), (0, 0))
            self._first = np.pad(self._first, more, constant_values=NEVER)
            self._second = np.pad(self._second, more, constant_values=NEVER)
            self._cursor = np.pad(self._cursor, (0, rows))
            self._per_position_s = np.pad(self._per_position_s, (0, rows), constant_values=1.0)
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        row = self._free_rows.pop()
        self._cursor[row] = 0.0
        self._per_position_s[row] = 1.0
        self._rows_used = max(self._rows_used, row + 1)
        return row

    def _clear_row(self, row: int) -> None:
        self._first[row] = NEVER
        self._second[row] = NEVER
        for key in [key for key in self._further if key[0] == row]:
            del self._further[key]

    def _rebase(self, job: _Job) -> None:
        down = min(state.cursor for state in job.sessions.values())
        if down < _REBASE_LEAST:
            return
        for table in (self._first, self._second):
            row = table[job.row]
            row[row != NEVER] -= down
        for key in [key for key in self._further if key[0] == job.row]:
            self._further[key] = [position - down for position in self._further[key]]
        for state in job.sessions.values():
            state.cursor -= down
            state.end -= down
        self._moved(job)

    # --- questions ----------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """No session is known."""
        return not (self._sessions or self._jobs)

    def claimed(self, number: int) -> bool:
        """A live session's dataset holds the shard."""
        return bool(self._claims[number])

    def is_bare(self, number: int) -> bool:
        """A session that has not told its order claims the shard."""
        return bool(self._bare[number])

    @property
    def has_bare(self) -> bool:
        """Some session claims shards and has not told its order."""
        return self._bare_sessions > 0

    def bare_between(self, begin: int, end: int) -> npt.NDArray[np.bool_]:
        """`is_bare` of the numbers ``[begin, end)``."""
        return self._bare[begin:end] > 0

    @property
    def planning_count(self) -> int:
        """Jobs that have yet to read what they forecast."""
        return len(self._planning)

    def wait_s(self, number: int, *, skip_one: bool = False) -> float:
        """Seconds until the shard is read next; infinite if no forecast has it.

        Args:
            number: the shard's.
            skip_one: leave out the very next use: what is it worth afterwards?
        """
        rows = self._rows_used
        if not rows:
            return np.inf
        waits = self._first[:rows, number] - self._cursor[:rows]
        waits *= self._per_position_s[:rows]
        if skip_one:
            nearest = waits.argmin()
            ahead = self._second[nearest, number] - self._cursor[nearest]
            waits[nearest] = ahead * self._per_position_s[nearest]
        return float(_least(waits))

    def waits_between(self, begin: int, end: int) -> Positions:
        """`wait_s` of the numbers ``[begin, end)``. Positions that were skipped are given up."""
        rows = self._rows_used
        if not rows:
            return np.full(end - begin, NEVER)
        ahead = self._first[:rows, begin:end] - self._cursor[:rows, None]
        least: Positions = _least(ahead * self._per_position_s[:rows, None], axis=0)
        if _least(least) < 0 and _least(ahead, axis=None) < -LATE_POSITIONS:
            for row, column in zip(*np.nonzero(ahead < -LATE_POSITIONS), strict=True):
                self._promote(int(row), begin + int(column))
        return least
