"""Which slot holds which extent, and who holds the slot. Pure; owned by the daemon's loop.

A slot is **free** (holds nothing), **held** (its count of holders is above zero: a fill writes it
or sessions lease it) or **idle** (holds a whole extent that nobody leases). Idle extents are the
memory tier: a reader that comes back finds them without touching the disk. A held slot is never
given away; sequence numbers on the session socket prove it to the readers.

Free slots go first. Then idle extents are recycled as the store evicts: by the time until a live
plan reads their shard, the farthest first (`wait_s`; never, where no plan has it). Among equals the
latest goes, so that old residents stay: never LRU, the worst choice for an epoch's permutation. The
farthest of all would cost a look at each, so it is the farthest of the latest few and of some drawn
at random, by a seed; where its shard lies in a run of slots, the run is taken from its begin.

The slot behind that of the extent before is taken where it is free or idle and not much more wanted
than the choice: samples that straddle neighbouring slots need no copy.

A slot costs no memory before it is first used. Slots are used from the lowest up, so those at or
above `touched_count` never were; `touch_max` bounds how far that mark may rise.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from gpufeed.cachefs.errors import UsageError

LATEST_LOOKED_AT = 4
DRAWN = 8
# Draws that may hit slots that are not idle.
DRAWS_MAX = 32
# Slots before the choice that are looked at for the begin of its shard's run.
RUN_SLOTS_MAX = 32
# A neighbour is taken if its shard is wanted at least so far from now, beside the choice's. With
# four simulated ranks 82 % of extents follow the one before and no hit is lost; with 0.1 it would
# be 86 %, and a fifth of the hits gone.
NEIGHBOUR_RATIO = 0.25


@dataclass(slots=True)
class _Slot:
    digest: str = ""
    extent: int = -1
    holders: int = 0
    ready: bool = False


class SlotTable:
    """Slots ``0 … slot_count - 1``.

    Args:
        slot_count: how many there are.
        wait_s: seconds until a live plan reads the shard of this digest; infinite: none will.
    """

    def __init__(
        self, slot_count: int, wait_s: Callable[[str], float] = lambda _: math.inf
    ) -> None:
        self._slots = [_Slot() for _ in range(slot_count)]
        # Lowest numbers first: pages are touched, and so allocated, only when needed.
        self._free = list(range(slot_count - 1, -1, -1))
        # In the order in which they became idle.
        self._idle: dict[int, None] = {}
        self._wait_s = wait_s
        self._draw = random.Random(slot_count)  # noqa: S311 a choice of victims
        self._where: dict[tuple[str, int], int] = {}
        self.touched_count = 0
        self.touch_max = slot_count

    @property
    def available_count(self) -> int:
        """Slots that `allocate` could give now."""
        return self._free_usable + len(self._idle)

    @property
    def _free_usable(self) -> int:
        untouched = len(self._slots) - self.touched_count
        return (
            len(self._free)
            - untouched
            + max(0, min(self.touch_max, len(self._slots)) - self.touched_count)
        )

    @property
    def is_short(self) -> bool:
        """Whether there are slots that were never used, and `touch_max` keeps it so."""
        return self.touch_max < len(self._slots) and self._free_usable == 0

    @property
    def held_count(self) -> int:
        """Slots with holders."""
        return len(self._slots) - len(self._free) - self.idle_count

    @property
    def idle_count(self) -> int:
        """Slots with an extent that nobody holds."""
        return len(self._idle)

    def find(self, digest: str, extent: int) -> int | None:
        """The slot that holds this extent whole, or None. Does not hold it."""
        slot = self._where.get((digest, extent))
        return slot if slot is not None and self._slots[slot].ready else None

    def knows(self, digest: str, extent: int) -> bool:
        """Whether a slot is this extent's, be its bytes all there or still under way."""
        return (digest, extent) in self._where

    def allocate(self, digest: str, extent: int) -> int | None:
        """Take a slot for an extent that is in no slot; one holder. None: all are held."""
        assert (digest, extent) not in self._where, (digest, extent)
        slot = self._pick(self._where.get((digest, extent - 1)))
        if slot is None:
            return None
        state = self._slots[slot]
        self._where.pop((state.digest, state.extent), None)
        self.touched_count = max(self.touched_count, slot + 1)
        state.digest, state.extent, state.holders, state.ready = digest, extent, 1, False
        self._where[(digest, extent)] = slot
        return slot

    def _pick(self, before: int | None) -> int | None:
        beside = None if before is None else before + 1
        if self._free_usable:
            if beside in self._idle and self._wait_of(beside) == math.inf:
                del self._idle[beside]
                return beside
            return self._free.pop()
        if not self._idle:
            return None
        slot, wait_s = self._farthest()
        if beside in self._idle and self._wait_of(beside) >= wait_s * NEIGHBOUR_RATIO:
            slot = beside
        else:
            slot = self._run_begin(slot)
        del self._idle[slot]
        return slot

    def _run_begin(self, slot: int) -> int:
        """The first of the idle slots around `slot` that hold the same shard.

        So that those behind it are there, as little wanted, for the extents that follow.
        """
        digest = self._slots[slot].digest
        first = slot
        while first - 1 in self._idle and slot - first < RUN_SLOTS_MAX:
            if self._slots[first - 1].digest != digest:
                break
            first -= 1
        return first

    def _farthest(self) -> tuple[int, float]:
        """An idle slot to recycle, and when its shard is read next."""
        latest = list(itertools.islice(reversed(self._idle), LATEST_LOOKED_AT))
        drawn: list[int] = []
        for _ in range(DRAWS_MAX):
            slot = self._draw.randrange(self.touched_count)
            if slot in self._idle:
                drawn.append(slot)
                if len(drawn) == DRAWN:
                    break
        best, best_s = latest[0], self._wait_of(latest[0])
        for slot in itertools.chain(latest[1:], drawn):
            if best_s == math.inf:
                break
            wait_s = self._wait_of(slot)
            if wait_s > best_s:
                best, best_s = slot, wait_s
        return best, best_s

    def _wait_of(self, slot: int) -> float:
        return self._wait_s(self._slots[slot].digest)

    def mark_ready(self, slot: int) -> None:
        """The extent's bytes are all there: `find` shows it from now on."""
        state = self._slots[slot]
        assert state.holders > 0, slot
        # A slot whose shard was forgotten meanwhile belongs to nobody any more.
        state.ready = bool(state.digest)

    def hold(self, slot: int) -> None:
        """One more holder."""
        state = self._slots[slot]
        if state.holders == 0:
            assert state.ready, slot
            self._idle.pop(slot, None)
        state.holders += 1

    def drop(self, slot: int) -> None:
        """One holder less. The last one leaves the extent idle, or free if it never was whole.

        Raises:
            UsageError: nobody holds the slot.
        """
        state = self._slots[slot]
        if state.holders <= 0:
            raise UsageError(f"slot {slot} was released more often than it was held")
        state.holders -= 1
        if state.holders:
            return
        if state.ready:
            self._idle[slot] = None
            return
        self._where.pop((state.digest, state.extent), None)
        state.digest, state.extent = "", -1
        self._free.append(slot)

    def forget(self, digest: str) -> None:
        """Stop showing any extent of a shard found wrong. Held slots go free at their last drop."""
        for owner, extent in list(self._where):
            if owner == digest:
                self.disown(owner, extent)

    def disown(self, digest: str, extent: int) -> None:
        """Stop showing one extent; whoever holds its slot keeps the bytes."""
        slot = self._where.pop((digest, extent), None)
        if slot is None:
            return
        state = self._slots[slot]
        state.digest, state.extent, state.ready = "", -1, False
        if state.holders == 0:
            self._idle.pop(slot, None)
            self._free.append(slot)

    def check(self) -> None:
        """Assert the invariants; tests call it after every step."""
        untouched = range(self.touched_count, len(self._slots))
        assert self._free[: len(untouched)] == list(untouched)[::-1], "touched out of order"
        assert self.held_count + self.idle_count + len(self._free) == len(self._slots)
        groups = (self._free, self._idle)
        seen = [slot for group in groups for slot in group]
        assert len(seen) == len(set(seen)), "a slot is available twice"
        for slot, state in enumerate(self._slots):
            assert (state.holders == 0) == (slot in seen), (slot, state)
            if state.ready:
                assert self._where.get((state.digest, state.extent)) == slot, (slot, state)
