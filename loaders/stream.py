"""From session events to samples in order, and back to the extents that may be released.

The stream owns, for every plan position, its published extents, the runs of samples that are known
and not yet cut, and a count of users of each extent. Invariants:

- tasks come out in plan order, each wanted sample once; epochs are separated by markers;
- an extent becomes releasable exactly once: when no unit uses it and no later sample can touch it,
  that is, when a sample that ends past it was cut, or nothing more of its position is wanted;
- the bytes that a task names are published and not releasable until its lease is returned.

Samples of a shard lie in ascending order, so the end of the last one cut bounds all that follow.
Pure: no I/O, one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpufeed.cachefs.errors import ProtocolError
from gpufeed.cachefs.sampleindex import Member, SampleIndex
from gpufeed.cachefs.wire import ExtentEvent, SamplesEvent, ShardEndEvent
from gpufeed.loaders.order import ShardPart
from gpufeed.loaders.samples import Piece, Task

Lease = Sequence[tuple[Any, int, int]]  # what `cut` gave, for `give_back` alone
SeedOf = Callable[[int, int], int]  # (shard, sample number in the shard) -> seed
Fields = tuple[tuple[str, tuple[Piece, ...]], ...]


@dataclass(slots=True)
class _Run:
    """Samples ``[low, high)`` of `index` are wanted; then everything below `end_bytes` is done."""

    index: SampleIndex
    first: int
    low: int
    high: int
    end_bytes: int


@dataclass(slots=True)
class Extent:
    """One that was published: its sequence number, its slot, and the units that use it."""

    seq: int
    slot: int
    users: int = 0


@dataclass(slots=True)
class Position:
    """One shard of the plan, while any of it is needed."""

    part: ShardPart
    name: str
    seed_of: SeedOf
    runs: deque[_Run] = field(default_factory=deque)
    extents: dict[int, Extent] = field(default_factory=dict)
    range_at: int = 0
    done_bytes: int = 0
    ended: bool = False
    exhausted: bool = False


PositionLease = list[tuple[Position, int, int]]  # extents [first, last] in use by a unit


class SampleStream(Protocol):
    """From session events to samples in some order."""

    straddled_count: int

    @property
    def available_count(self) -> int:
        """Samples that are known and not cut."""

    @property
    def planned_count(self) -> int:
        """Shards that are planned and not wholly cut."""

    @property
    def at_epoch_end(self) -> bool:
        """True when everything before the next epoch's marker was cut."""

    @property
    def is_short(self) -> bool:
        """The session's window is full, and nothing in it can be used or released."""

    def expect(self, number: int, part: Any, name: str, seed_of: SeedOf) -> None:
        """Plan position `number` will bring `part` of the shard `name`."""

    def mark_epoch_end(self) -> None:
        """Nothing more of this epoch will be expected."""

    def pass_epoch_end(self) -> None:
        """Go on to the next epoch."""

    def on_extent(self, event: ExtentEvent) -> None:
        """An extent was published."""

    def on_samples(self, event: SamplesEvent) -> None:
        """Samples were published."""

    def on_end(self, event: ShardEndEvent) -> None:
        """Everything of the position was published."""

    def cut(self, limit: int) -> tuple[list[Task], Lease]:
        """At most `limit` samples of this epoch, in order, and the lease over their extents."""

    def give_back(self, lease: Any) -> None:
        """The unit that had `lease` is done with its bytes."""

    def take_releasable(self) -> list[int]:
        """Sequence numbers of extents to release; each is told once."""


class ArenaStream:
    """See the top of the file. Satisfies `SampleStream`."""

    # One shard after another: what is cut is released, whatever the window.
    is_short = False

    def __init__(self, extent_bytes: int) -> None:
        self._extent_bytes = extent_bytes
        self._order: deque[tuple[int, Position] | None] = deque()  # None marks an epoch's end
        self._by_number: dict[int, Position] = {}
        self._available = 0
        self._releasable: list[int] = []
        self.straddled_count = 0

    @property
    def available_count(self) -> int:
        """Samples that are known and not cut, of this epoch and later ones."""
        return self._available

    @property
    def planned_count(self) -> int:
        """Shards that are planned and not wholly cut."""
        return sum(1 for entry in self._order if entry is not None)

    @property
    def at_epoch_end(self) -> bool:
        """True when everything before the next epoch's marker was cut."""
        self._settle()
        return bool(self._order) and self._order[0] is None

    def expect(self, number: int, part: ShardPart, name: str, seed_of: SeedOf) -> None:
        """Plan position `number` will bring `part` of the shard `name`."""
        position = Position(part, name, seed_of)
        self._order.append((number, position))
        self._by_number[number] = position

    def mark_epoch_end(self) -> None:
        """Nothing more of this epoch will be expected."""
        self._order.append(None)

    def pass_epoch_end(self) -> None:
        """Go on to the next epoch."""
        assert self.at_epoch_end
        self._order.popleft()

    def on_extent(self, event: ExtentEvent) -> None:
        """An extent was published."""
        position = self._position(event.position)
        if position.exhausted:
            self._releasable.append(event.seq)
            return
        position.extents[event.extent] = Extent(event.seq, event.slot)

    def on_samples(self, event: SamplesEvent) -> None:
        """Samples were published; those that this rank wants are queued."""
        position = self._position(event.position)
        count = len(event.index)
        if not count or position.exhausted:
            return
        ends = event.index.ends()
        if position.part.ranges is None:
            wanted = [(0, count)]
        else:
            wanted = self._wanted(position, event.first, count)
        cursor = 0
        for low, high in wanted:
            if low > cursor:
                position.runs.append(_Run(event.index, event.first, low, low, int(ends[low - 1])))
            position.runs.append(_Run(event.index, event.first, low, high, int(ends[high - 1])))
            self._available += high - low
            cursor = high
        if cursor < count:
            position.runs.append(_Run(event.index, event.first, count, count, int(ends[-1])))

    def on_end(self, event: ShardEndEvent) -> None:
        """Everything of the position was published."""
        self._position(event.position).ended = True

    def cut(self, limit: int) -> tuple[list[Task], PositionLease]:
        """At most `limit` samples of this epoch, in order, and the lease over their extents."""
        tasks: list[Task] = []
        lease: PositionLease = []
        while len(tasks) < limit:
            self._settle()
            entry = self._order[0] if self._order else None
            if entry is None or not entry[1].runs:
                break
            position = entry[1]
            run = position.runs[0]
            take = min(limit - len(tasks), run.high - run.low)
            first, last = self._cut_run(position, run, take, tasks)
            lease.append((position, first, last))
            for number in range(first, last + 1):
                position.extents[number].users += 1
            self._available -= take
        return tasks, lease

    def give_back(self, lease: PositionLease) -> None:
        """The unit that had `lease` is done with its bytes."""
        for position, first, last in lease:
            for number in range(first, last + 1):
                position.extents[number].users -= 1
            self._collect(position)

    def take_releasable(self) -> list[int]:
        """Sequence numbers of extents to release; each is told once."""
        self._settle()
        seqs, self._releasable = self._releasable, []
        return seqs

    def _position(self, number: int) -> Position:
        position = self._by_number.get(number)
        if position is None:
            raise ProtocolError(f"the daemon published plan position {number}, which is not open")
        return position

    @staticmethod
    def _wanted(position: Position, first: int, count: int) -> list[tuple[int, int]]:
        """The wanted ranges within samples ``[first, first + count)``, relative to `first`."""
        ranges = position.part.ranges
        assert ranges is not None
        found = []
        while position.range_at < len(ranges):
            low, high = ranges[position.range_at]
            if low >= first + count:
                break
            found.append((max(low - first, 0), min(high - first, count)))
            if high > first + count:
                break
            position.range_at += 1
        return found

    def _settle(self) -> None:
        """Take what is wholly cut off the front."""
        while self._order and self._order[0] is not None:
            number, position = self._order[0]
            while position.runs and position.runs[0].low == position.runs[0].high:
                run = position.runs.popleft()
                position.done_bytes = max(position.done_bytes, run.end_bytes)
            ranges = position.part.ranges
            if not position.runs:
                all_cut = ranges is not None and position.range_at == len(ranges)
                position.exhausted = position.ended or all_cut
            self._collect(position)
            if position.runs or not position.ended:
                return
            self._order.popleft()
            del self._by_number[number]

    def _collect(self, position: Position) -> None:
        """Move extents that nothing can touch any more to the releasable ones."""
        closed = position.done_bytes // self._extent_bytes
        for number in [n for n, e in position.extents.items() if e.users == 0]:
            if position.exhausted or number < closed:
                self._releasable.append(position.extents.pop(number).seq)

    def _cut_run(
        self, position: Position, run: _Run, take: int, tasks: list[Task]
    ) -> tuple[int, int]:
        """Append `take` tasks; returns the first and last extent that they touch.

        Empty fields touch none: the extent that they would begin in may never come.
        """
        begin = end = -1
        for row in range(run.low, run.low + take):
            ref = run.index[row]
            seed = position.seed_of(position.part.shard, run.first + row)
            fields, straddles = fields_of(position.extents, self._extent_bytes, ref.members)
            self.straddled_count += straddles
            offset = min(member.offset_bytes for member in ref.members)
            tasks.append(Task(ref.key, position.name, offset, seed, fields))
            for member in ref.members:
                if member.size_bytes:
                    begin = member.offset_bytes if begin < 0 else begin
                    end = max(end, member.offset_bytes + member.size_bytes)
        run.low += take
        if begin < 0:
            return 0, -1
        position.done_bytes = max(position.done_bytes, end)
        return begin // self._extent_bytes, (end - 1) // self._extent_bytes


def fields_of(
    extents: Mapping[int, Extent], extent_bytes: int, members: Sequence[Member]
) -> tuple[Fields, bool]:
    """Where the fields of a sample lie in the arena; whether any is in several pieces."""
    fields = tuple(
        (m.ext.lower(), _pieces(extents, extent_bytes, m.offset_bytes, m.size_bytes))
        for m in members
    )
    return fields, any(len(pieces) > 1 for _, pieces in fields)


def _pieces(
    extents: Mapping[int, Extent], extent_bytes: int, offset: int, size: int
) -> tuple[Piece, ...]:
    """Where bytes ``[offset, offset + size)`` of the shard lie in the arena."""
    number, within = divmod(offset, extent_bytes)
    if size == 0:
        return ((0, 0),)
    if within + size <= extent_bytes:
        return ((extents[number].slot * extent_bytes + within, size),)
    pieces: list[Piece] = []
    while size:
        address = extents[number].slot * extent_bytes + within
        length = min(size, extent_bytes - within)
        if pieces and sum(pieces[-1]) == address:
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + length)
        else:
            pieces.append((address, length))
        size -= length
        number, within = number + 1, 0
    return tuple(pieces)
