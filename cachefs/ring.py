"""One session's ring: its window of leased slots, published at the head, released at the tail.

This is the lease protocol, as the daemon keeps it. A ring of `window` places goes through

    free --take--> taken --publish(slot)--> held --release(seq)--> free
                     |                        |
                     +--untake--> free        +--end()--> over

- a place is **free** (a credit), **taken** (the daemon seeks an extent for it) or **held** (the
  client may read the slot); ``free + taken + held == window`` after every call;
- `publish` gives the lease the next **sequence number**. Numbers only grow, by one, for the life
  of the ring: at an epoch's end, on a wrap, after a release out of order they go on;
- the client releases each number once, in any order. The **tail** is the oldest number that is
  still held, or the next one to be given; whatever lies before it is over for good;
- `end` takes everything that is held back, once. Nothing may be published or released afterwards.
  When the client may still look at what it held, the caller keeps those slots until it cannot.

Messages may be lost only together with the session, and both ends see that: so neither side ever
asks again, and a lease cannot be released twice. The client's mirror of this is
`gpufeed.cachefs.client`; `tests/cachefs/test_ring_interleavings.py` runs both against each other in
every order of steps, deaths included.

Pure: no I/O, no clock. Owned by the daemon's loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpufeed.cachefs.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Lease:
    """What a client holds: a slot, and the shard whose extent is in it."""

    slot: int
    digest: str


class Ring:
    """See the top of the file.

    Args:
        window: extents that may be taken and held together.
    """

    __slots__ = ("_free", "_held", "_is_over", "_seq", "_taken", "window")

    def __init__(self, window: int) -> None:
        assert window > 0, window
        self.window = window
        self._free = window
        self._taken = 0
        self._held: dict[int, Lease] = {}
        self._seq = 0
        self._is_over = False

    @property
    def free_count(self) -> int:
        """Extents that may be sought now."""
        return self._free

    @property
    def held_count(self) -> int:
        """Extents that the client holds."""
        return len(self._held)

    @property
    def head(self) -> int:
        """The last sequence number given; 0 before the first."""
        return self._seq

    @property
    def tail(self) -> int:
        """The oldest sequence number still held; where none is, the next one to be given."""
        return min(self._held, default=self._seq + 1)

    def take(self) -> bool:
        """Take a place for an extent that is sought; False while none is free."""
        if self._is_over or self._free == 0:
            return False
        self._free -= 1
        self._taken += 1
        return True

    def untake(self, count: int = 1) -> None:
        """Nothing is published in so many taken places."""
        assert 0 <= count <= self._taken, (count, self._taken)
        self._taken -= count
        self._free += count

    def publish(self, slot: int, digest: str) -> int:
        """Lease a slot in a taken place; returns the sequence number."""
        assert self._taken > 0, "published without a place"
        assert not self._is_over, "published after the end"
        self._taken -= 1
        self._seq += 1
        self._held[self._seq] = Lease(slot, digest)
        return self._seq

    def release(self, seqs: Sequence[int]) -> list[Lease]:
        """The client gives these back; all of them or, where one is wrong, none.

        Raises:
            ProtocolError: one was never published, or was released before.
        """
        held = self._held
        if len(set(seqs)) != len(seqs) or any(seq not in held for seq in seqs):
            wrong = next((seq for seq in seqs if seq not in held), None)
            if wrong is None:
                raise ProtocolError("an extent was released twice in one message")
            if 0 < wrong <= self._seq:
                raise ProtocolError(f"extent {wrong} was released twice")
            raise ProtocolError(
                f"extent {wrong} was released, but is not published; the last one is {self._seq}"
            )
        self._free += len(seqs)
        return [held.pop(seq) for seq in seqs]

    def end(self) -> list[Lease]:
        """The session is over: everything that was held, each once."""
        self._is_over = True
        leases = list(self._held.values())
        self._free += len(leases)
        self._held.clear()
        return leases

    def check(self) -> None:
        """Assert the invariants; tests call it after every step."""
        assert self._free >= 0 <= self._taken, self
        assert self._free + self._taken + len(self._held) == self.window, (self._free, self._taken)
        assert list(self._held) == sorted(self._held), "numbers out of order"
        slots = [lease.slot for lease in self._held.values()]
        assert all(0 < seq <= self._seq for seq in self._held), slots
