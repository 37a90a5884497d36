"""The resident shard whose next use is farthest off, among a million, in microseconds. Pure.

Each resident shard has a **horizon**: the moment of its next use, predicted when it was last looked
at. Shards lie by number in chunks of `CHUNK_COUNT`, with the farthest horizon of each chunk noted.
`top` takes the farthest shard of the farthest chunk, predicts it anew, and goes on until one keeps
its place. Each `sweep` predicts a chunk in turn, so that notes of long ago do not mislead as rates
change. No list of all shards is ever sorted.

Shards that nobody will read lie beyond all others, longest unused farthest. Shards that must stay
(leased, pinned, ad-hoc, or claimed by a session that has not told its order) have no horizon and
are never found by `top`.

Times are seconds of one monotonic clock, below `UNWANTED_S` / 2. Owned by one thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpufeed.cachefs.nextuse import NEVER, NextUses
from gpufeed.cachefs.shares import Shares

CHUNK_COUNT = 512
# One chunk is predicted anew every so many decisions; at each one after a job came or went, until
# all were.
SWEEP_EVERY_DECISIONS = 8
# Predictions tried in one search; more only if everything noted is out of date.
LOOKS_MAX = 64
RESTORED_AGE_S = 60.0
UNWANTED_S = 1e12
STAYS_S = -1.0
_NOT_HERE_S = -2.0

Mask = npt.NDArray[np.bool_]
# `ndarray.max` without its Python wrapper.
_most = np.maximum.reduce


class Farthest:
    """See the top of the file."""

    def __init__(self, uses: NextUses, shares: Shares) -> None:
        self._uses = uses
        self._shares = shares
        self._horizon_s = np.full(0, _NOT_HERE_S)
        self._last_use_s = np.zeros(0)
        self._held = np.zeros(0, np.bool_)
        self._chunk_s = np.full(0, _NOT_HERE_S)
        self._sweep_at = 0
        self._hurried_count = 0
        self._decisions = 0
        self._seen_changes = 0
        self.fit()

    def fit(self) -> None:
        """As many columns as there are numbers, in whole chunks."""
        chunks = -(-self._uses.capacity_count // CHUNK_COUNT)
        more = chunks - len(self._chunk_s)
        if more <= 0:
            return
        pad = (0, more * CHUNK_COUNT)
        self._horizon_s = np.pad(self._horizon_s, pad, constant_values=_NOT_HERE_S)
        self._last_use_s = np.pad(self._last_use_s, pad)
        self._held = np.pad(self._held, pad)
        self._chunk_s = np.pad(self._chunk_s, (0, more), constant_values=_NOT_HERE_S)
        self._shares.fit(chunks * CHUNK_COUNT)

    # --- what is here -------------------------------------------------------------------------

    def is_here(self, number: int) -> bool:
        """Whether the shard has entered. Numbers may be newer than the last `fit`."""
        return number < len(self._horizon_s) and bool(self._horizon_s[number] != _NOT_HERE_S)

    def enter(self, number: int, now_s: float) -> None:
        """The shard is here, or was used now."""
        self._last_use_s[number] = now_s
        self._note(number, self.predict_s(number, now_s))

    def renew(self, number: int, now_s: float) -> None:
        """What is known of the shard has changed; it was not used."""
        self._note(number, self.predict_s(number, now_s))

    def restore(self, last_uses: npt.NDArray[np.int64], now_s: float) -> None:
        """The shards numbered from 0 on are here since before the start; by order of last use."""
        count = len(last_uses)
        # Their order is known, their ages are not: all younger than `RESTORED_AGE_S`.
        oldest_first = np.argsort(last_uses, kind="stable")
        self._last_use_s[oldest_first] = now_s - np.linspace(RESTORED_AGE_S, 0.0, count, False)
        self._horizon_s[:count] = UNWANTED_S - self._last_use_s[:count]
        self._chunk_s = self._horizon_s.reshape(-1, CHUNK_COUNT).max(axis=1)

    def leave(self, number: int) -> None:
        """The shard is gone."""
        self._horizon_s[number] = _NOT_HERE_S
        self._held[number] = False

    def hold(self, number: int) -> None:
        """The shard is leased: it stays until `let_go`."""
        self._held[number] = True
        self._horizon_s[number] = STAYS_S

    def let_go(self, number: int, now_s: float) -> None:
        """See `hold`."""
        self._held[number] = False
        self._note(number, self.predict_s(number, now_s))

    def hide(self, number: int) -> float:
        """`top` does not find it until `unhide` with what this returns."""
        horizon_s = float(self._horizon_s[number])
        self._horizon_s[number] = STAYS_S
        begin = number - number % CHUNK_COUNT
        rest_s = self._horizon_s[begin : begin + CHUNK_COUNT]
        self._chunk_s[number // CHUNK_COUNT] = _most(rest_s)
        return horizon_s

    def unhide(self, number: int, horizon_s: float) -> None:
        """See `hide`."""
        self._note(number, horizon_s)

    def last_use_s(self, number: int) -> float:
        """When the shard was last used."""
        return float(self._last_use_s[number])

    def _note(self, number: int, horizon_s: float) -> None:
        self._horizon_s[number] = horizon_s
        chunk = number // CHUNK_COUNT
        self._chunk_s[chunk] = max(self._chunk_s[chunk], horizon_s)

    # --- predictions --------------------------------------------------------------------------

    def predict_s(self, number: int, now_s: float) -> float:
        """The horizon of one shard, as of now."""
        if self._held[number] or self._shares.stays(number) or self._uses.is_bare(number):
            return STAYS_S
        wait_s = self._uses.wait_s(number)
        return now_s + wait_s if wait_s != np.inf else self._unwanted_s(number)

    def _unwanted_s(self, number: int) -> float:
        return float(UNWANTED_S - self._last_use_s[number])

    def _renew(self, chunk: int, now_s: float) -> None:
        begin = chunk * CHUNK_COUNT
        end = min(begin + CHUNK_COUNT, self._uses.capacity_count)
        old_s = self._horizon_s[begin:end]
        here = old_s != _NOT_HERE_S
        if not here.any():
            self._chunk_s[chunk] = _NOT_HERE_S
            return
        waits_s = self._uses.waits_between(begin, end)
        new_s = waits_s.astype(np.float64) + now_s
        unwanted = waits_s == NEVER
        if unwanted.any():
            np.subtract(UNWANTED_S, self._last_use_s[begin:end], out=new_s, where=unwanted)
        stays = self._held[begin:end]
        if self._uses.has_bare:
            stays = stays | self._uses.bare_between(begin, end)
        if self._shares.has_staying:
            stays = stays | self._shares.staying_between(begin, end)
        new_s[stays] = STAYS_S
        new_s[~here] = _NOT_HERE_S
        old_s[:] = new_s
        self._chunk_s[chunk] = _most(new_s)

    def sweep(self, now_s: float) -> None:
        """Called once a decision: predict the next chunk anew, if it is time."""
        self._decisions += 1
        if self._seen_changes != self._uses.changes:
            self._seen_changes = self._uses.changes
            self._hurried_count = len(self._chunk_s)
        if self._hurried_count > 0:
            self._hurried_count -= 1
        elif self._decisions % SWEEP_EVERY_DECISIONS:
            return
        self._sweep_at = (self._sweep_at + 1) % len(self._chunk_s)
        self._renew(self._sweep_at, now_s)

    # --- the search ---------------------------------------------------------------------------

    def top(self, now_s: float) -> tuple[int, float] | None:
        """The shard with the farthest horizon, and that horizon; hide it before the next call."""
        best = None
        looks = 0
        while looks < LOOKS_MAX:
            chunk = int(self._chunk_s.argmax())
            if self._chunk_s[chunk] <= STAYS_S:
                return None
            begin = chunk * CHUNK_COUNT
            number = begin + int(self._horizon_s[begin : begin + CHUNK_COUNT].argmax())
            noted_s = float(self._horizon_s[number])
            if noted_s <= STAYS_S:
                # What was noted of the chunk is gone or stays by now. Once a chunk: no look.
                self._chunk_s[chunk] = noted_s
                continue
            looks += 1
            horizon_s = self.predict_s(number, now_s)
            best = number, horizon_s
            self._horizon_s[number] = horizon_s
            if horizon_s >= noted_s:
                return best
            # Used sooner than was thought: another may be farther off.
            self._chunk_s[chunk] = _most(self._horizon_s[begin : begin + CHUNK_COUNT])
            if horizon_s >= _most(self._chunk_s):
                return best
        return best

    def best_of(self, mask: Mask, now_s: float, count: int) -> list[tuple[int, float]]:
        """The shards of a mask with the farthest horizons, farthest first, at most `count`.

        A pass over all numbers, about a millisecond a million: for quotas and tenants, where the
        farthest of all is not the question.
        """
        numbers = np.flatnonzero(mask[: len(self._horizon_s)] & (self._horizon_s > STAYS_S))
        if len(numbers) > 2 * count:
            nearest = np.argpartition(self._horizon_s[numbers], -2 * count)
            numbers = numbers[nearest[-2 * count :]]
        found = [(number, self.predict_s(number, now_s)) for number in numbers.tolist()]
        found.sort(key=lambda pair: pair[1], reverse=True)
        return found[:count]

    def oldest_of(self, mask: Mask, count: int) -> list[int]:
        """The shards of a mask that were not used for longest, at most `count`; cost as above."""
        here = (self._horizon_s != _NOT_HERE_S) & ~self._held
        numbers = np.flatnonzero(mask[: len(here)] & here)
        if len(numbers) > count:
            numbers = numbers[np.argpartition(self._last_use_s[numbers], count)[:count]]
        ordered: list[int] = numbers[np.argsort(self._last_use_s[numbers], kind="stable")].tolist()
        return ordered

    def unused_since(self, moment_s: float) -> tuple[list[int], float]:
        """Shards whose last use lies before a moment, and the oldest last use of the others."""
        here = (self._horizon_s != _NOT_HERE_S) & ~self._held
        old = here & (self._last_use_s < moment_s)
        rest_s = self._last_use_s[here & ~old]
        numbers: list[int] = np.flatnonzero(old).tolist()
        return numbers, float(rest_s.min()) if len(rest_s) else np.inf
