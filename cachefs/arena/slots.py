"""Which slot holds which extent, and who holds the slot. Pure; owned by the daemon's loop.

A slot is **free** (holds nothing), **held** (its count of holders is above zero: a fill writes it
or sessions lease it) or **idle** (holds a whole extent that nobody leases). Idle extents are the
memory tier: a reader that comes back finds them without touching the disk. A held slot is never
given away; sequence numbers on the session socket prove it to the readers.

Recycling is never LRU, which is the worst choice for an epoch's permutation. Free slots go first,
then idle extents that no live plan wants, the latest first (so that old residents stay: the rule
of never-evict), then those that a plan still wants, the latest first.

A slot costs no memory before it is first used. Slots are used from the lowest up, so those at or
above `touched_count` never were; `touch_max` bounds how far that mark may rise.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpufeed.cachefs.errors import UsageError


@dataclass(slots=True)
class _Slot:
    digest: str = ""
    extent: int = -1
    holders: int = 0
    ready: bool = False


class SlotTable:
    """Slots ``0 … slot_count - 1``."""

    def __init__(self, slot_count: int) -> None:
        self._slots = [_Slot() for _ in range(slot_count)]
        # Lowest numbers first: pages are touched, and so allocated, only when needed.
        self._free = list(range(slot_count - 1, -1, -1))
        self._cold: dict[int, None] = {}
        self._warm: dict[int, None] = {}
        self._where: dict[tuple[str, int], int] = {}
        self.touched_count = 0
        self.touch_max = slot_count

    @property
    def available_count(self) -> int:
        """Slots that `allocate` could give now."""
        return self._free_usable + len(self._cold) + len(self._warm)

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
        return len(self._cold) + len(self._warm)

    def find(self, digest: str, extent: int) -> int | None:
        """The slot that holds this extent whole, or None. Does not hold it."""
        slot = self._where.get((digest, extent))
        return slot if slot is not None and self._slots[slot].ready else None

    def knows(self, digest: str, extent: int) -> bool:
        """Whether a slot is this extent's, be its bytes all there or still under way."""
        return (digest, extent) in self._where

    def allocate(self, digest: str, extent: int, *, near: int | None = None) -> int | None:
        """Take a slot for an extent that is in no slot; one holder. None: all are held.

        `near` is the slot of the extent before: the neighbour after it is taken where it can be,
        because samples that straddle neighbouring slots need no copy.
        """
        assert (digest, extent) not in self._where, (digest, extent)
        slot = self._pick(near)
        if slot is None:
            return None
        state = self._slots[slot]
        self._where.pop((state.digest, state.extent), None)
        self.touched_count = max(self.touched_count, slot + 1)
        state.digest, state.extent, state.holders, state.ready = digest, extent, 1, False
        self._where[(digest, extent)] = slot
        return slot

    def _pick(self, near: int | None) -> int | None:
        beside = None if near is None else near + 1
        if beside is not None and beside < len(self._slots):
            if beside in self._cold:
                del self._cold[beside]
                return beside
            if self._free_usable and self._free[-1] == beside:
                return self._free.pop()
        if self._free_usable:
            return self._free.pop()
        for idle in (self._cold, self._warm):
            if idle:
                return idle.popitem()[0]
        return None

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
            self._cold.pop(slot, None)
            self._warm.pop(slot, None)
        state.holders += 1

    def drop(self, slot: int, *, wanted: bool = False) -> None:
        """One holder less. The last one leaves the extent idle, or free if it never was whole.

        Args:
            slot: the slot.
            wanted: a live plan still wants the extent.

        Raises:
            UsageError: nobody holds the slot.
        """
        state = self._slots[slot]
        if state.holders <= 0:
            raise UsageError(f"slot {slot} was released more often than it was held")
        state.holders -= 1
        if state.holders:
            return
        if not state.ready:
            self._where.pop((state.digest, state.extent), None)
            state.digest, state.extent = "", -1
            self._free.append(slot)
        elif wanted:
            self._warm[slot] = None
        else:
            self._cold[slot] = None

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
            self._cold.pop(slot, None)
            self._warm.pop(slot, None)
            self._free.append(slot)

    def check(self) -> None:
        """Assert the invariants; tests call it after every step."""
        untouched = range(self.touched_count, len(self._slots))
        assert self._free[: len(untouched)] == list(untouched)[::-1], "touched out of order"
        assert self.held_count + self.idle_count + len(self._free) == len(self._slots)
        groups = (self._free, self._cold, self._warm)
        seen = [slot for group in groups for slot in group]
        assert len(seen) == len(set(seen)), "a slot is available twice"
        for slot, state in enumerate(self._slots):
            assert (state.holders == 0) == (slot in seen), (slot, state)
            if state.ready:
                assert self._where.get((state.digest, state.extent)) == slot, (slot, state)
