"""Every order of steps of a daemon, its reader and their deaths, for small rings.

The daemon's side is the real `Ring`; slots and the socket are modelled. A state is everything that
can influence what follows; all states that can be reached are visited. In each of them

- what a living reader holds is what it was given: its slot was not written since;
- no slot is in two places, and the ring's own invariants hold;
- if nothing can happen any more but a death, all that was wanted has arrived, in order and once.

A death of the reader gives everything back; after a death of the daemon the next one begins with an
arena of its own, and the reader goes on behind the last extent that it received.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from gpufeed.cachefs.errors import ProtocolError
from gpufeed.cachefs.ring import Lease, Ring


@dataclass
class World:
    """One state. Slots are named (generation of the daemon, number)."""

    window: int
    extents: int
    ring: Ring
    free: list[int]
    content: dict[tuple[int, int], int] = field(default_factory=dict)
    generation: int = 0
    next_extent: int = 0
    to_reader: list[tuple[int, int, int]] = field(default_factory=list)
    to_daemon: list[int] = field(default_factory=list)
    held: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    received: int = 0
    last_seq: int = 0
    reader_lives: bool = True
    daemon_deaths: int = 0

    def key(self) -> tuple[object, ...]:
        """Equal for states from which the same can follow."""
        ring = self.ring
        leases = tuple((s, ring._held[s].slot) for s in ring._held)
        return (
            ring.free_count, ring._is_over, ring._taken, leases, ring.head,
            tuple(sorted(self.free)),
            tuple(sorted(self.content.items())), self.generation, self.next_extent,
            tuple(self.to_reader), tuple(self.to_daemon), tuple(sorted(self.held.items())),
            self.received, self.last_seq, self.reader_lives, self.daemon_deaths,
        )  # fmt: skip


Step = Callable[[World], None]
SLOTS_SPARE = 1
DAEMON_DEATHS_MAX = 1


def publish(world: World) -> None:
    assert world.ring.take()
    slot = world.free.pop(0)
    world.content[(world.generation, slot)] = world.next_extent
    seq = world.ring.publish(slot, str(world.next_extent))
    world.to_reader.append((seq, slot, world.next_extent))
    world.next_extent += 1


def give_up_a_place(world: World) -> None:
    assert world.ring.take()
    world.ring.untake()


def hear_release(world: World) -> None:
    for lease in world.ring.release([world.to_daemon.pop(0)]):
        world.free.append(lease.slot)


def receive(world: World) -> None:
    seq, slot, extent = world.to_reader.pop(0)
    assert seq == world.last_seq + 1, "a number was left out or came again"
    assert extent == world.received, "an extent was lost or repeated"
    world.last_seq = seq
    world.received += 1
    world.held[seq] = (world.generation, slot, extent)


def releasing(seq: int) -> Step:
    def release(world: World) -> None:
        generation, _, _ = world.held.pop(seq)
        assert generation == world.generation, "only leases of the living daemon are released"
        world.to_daemon.append(seq)

    return release


def reader_dies(world: World) -> None:
    world.reader_lives = False
    world.held.clear()
    world.to_reader.clear()


def hear_the_end(world: World) -> None:
    for lease in world.ring.end():
        world.free.append(lease.slot)
    world.to_daemon.clear()


def daemon_dies(world: World) -> None:
    """Its memory stays as it is for whoever maps it; the next one has another ring and arena."""
    world.daemon_deaths += 1
    world.generation += 1
    world.ring = type(world.ring)(world.window)
    world.free = list(range(world.window + SLOTS_SPARE))
    world.to_reader.clear()
    world.to_daemon.clear()
    # The reader keeps its views, now without a lease, and asks for what comes next.
    world.held = {-seq - 100: held for seq, held in world.held.items()}
    world.next_extent = world.received
    world.last_seq = 0


def steps(world: World) -> Iterator[tuple[Step, bool]]:
    """What can happen now, and whether it is a death."""
    over = not world.reader_lives and world.ring._is_over
    if not over and world.ring.free_count and world.free and world.next_extent < world.extents:
        yield publish, False
    if not over and world.ring.free_count:
        yield give_up_a_place, False
    if world.to_daemon:
        yield hear_release, False
    if world.to_reader and world.reader_lives:
        yield receive, False
    for seq in world.held:
        if seq > 0:
            yield releasing(seq), False
        else:
            yield lambda world, seq=seq: world.held.pop(seq) and None, False
    if world.reader_lives:
        yield reader_dies, True
        if world.daemon_deaths < DAEMON_DEATHS_MAX:
            yield daemon_dies, True
    elif not over:
        yield hear_the_end, False


def check(world: World) -> None:
    """The invariants of a state."""
    world.ring.check()
    leased = [lease.slot for lease in world.ring._held.values()]
    everywhere = leased + world.free
    assert len(everywhere) == len(set(everywhere)), "a slot is in two places"
    assert len(everywhere) == world.window + SLOTS_SPARE, "a slot is lost"
    for generation, slot, extent in world.held.values():
        assert world.content[(generation, slot)] == extent, "a slot changed under its reader"


def explore(window: int, extents: int, ring: type[Ring] = Ring) -> int:
    """Visit all states; returns how many."""
    first = World(window, extents, ring(window), list(range(window + SLOTS_SPARE)))
    seen = {first.key()}
    waiting = [first]
    while waiting:
        world = waiting.pop()
        check(world)
        moved = False
        for step, is_death in list(steps(world)):
            following = copy.deepcopy(world)
            step(following)
            moved |= not is_death and following.key() != world.key()
            if following.key() not in seen:
                seen.add(following.key())
                waiting.append(following)
        if not moved and world.reader_lives:
            assert world.received == world.extents, "stuck before the end"
        if not moved and not world.reader_lives:
            assert len(world.free) == world.window + SLOTS_SPARE, "a death left slots behind"
    return len(seen)


@pytest.mark.parametrize(
    ("window", "extents", "states_min"), [(1, 4, 300), (2, 6, 6000), (3, 5, 9000)]
)
def test_every_order_of_steps_keeps_the_invariants(
    window: int, extents: int, states_min: int
) -> None:
    assert explore(window, extents) > states_min


class ReusesEarly(Ring):
    """Gives a slot back that the reader has not released: the one published before."""

    __slots__ = ()

    def release(self, seqs):
        leases = super().release(seqs)
        if self._held:
            seq = next(iter(self._held))
            leases.append(self._held.pop(seq))
            self._free += 1
        return leases


class TwoPlaces(Ring):
    """A place given up is counted twice."""

    __slots__ = ()

    def untake(self, count: int = 1) -> None:
        super().untake(count)
        self._free += count


class StartsAnew(Ring):
    """Begins to number from one again when everything was released."""

    __slots__ = ()

    def release(self, seqs):
        leases = super().release(seqs)
        if not self._held:
            self._seq = 0
        return leases


class Forgets(Ring):
    """The end leaves a lease behind."""

    __slots__ = ()

    def end(self) -> list[Lease]:
        return super().end()[1:]


class KeepsThePlace(Ring):
    """A release gives the slot back but not its place: in the end nobody can go on."""

    __slots__ = ()

    def release(self, seqs):
        leases = super().release(seqs)
        self._free -= len(leases)
        self._taken += len(leases)
        return leases


@pytest.mark.parametrize("ring", [ReusesEarly, TwoPlaces, StartsAnew, Forgets, KeepsThePlace])
def test_a_broken_protocol_is_found(ring: type[Ring]) -> None:
    with pytest.raises((AssertionError, ProtocolError)):
        explore(2, 4, ring)
