"""Samples out of a session's events: cut in plan order, in place where they can be.

A sample's fields are read-only memoryviews. They lie in the arena itself, kept valid by their owner
(`gpufeed.cachefs.leases`), except

- a field over two slots that are not neighbours, which is copied (**straddled**);
- fields of an extent that came while views held as many extents as they may (**copied**), so that
  keeping every sample of an epoch neither stalls the daemon nor grows its memory.

Invariants:
    - samples come out in plan order, each once;
    - an extent is given back when its last view is gone, or at once where none was made, but never
      before the last sample that could touch it was cut;
    - when the window is used up and no sample is whole, the extents of the one that has begun are
      moved to the heap (`spill`), so that a sample shorter than the window always gets its rest.

No I/O but for the leases' messages; one thread.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpufeed.cachefs.errors import GpufeedError, ProtocolError
from gpufeed.cachefs.leases import Leases, Owner
from gpufeed.cachefs.sampleindex import SampleIndex, SampleRef
from gpufeed.cachefs.wire import Event, ExtentEvent, FailEvent, SamplesEvent

_NOTHING = memoryview(b"")


@dataclass(slots=True)
class ReadStats:
    """What a client has read. Bytes are those of fields, or of ranges.

    Attributes:
        samples_count: samples given.
        ranges_count: ranges given.
        straddled_count: copied because their slots are not neighbours.
        straddled_bytes: of those.
        copied_count: copied because views hold as much as they may.
        copied_bytes: of those.
        reconnects_count: how often a reader lost its daemon and sought it again.
    """

    samples_count: int = 0
    ranges_count: int = 0
    straddled_count: int = 0
    straddled_bytes: int = 0
    copied_count: int = 0
    copied_bytes: int = 0
    reconnects_count: int = 0


class Sample(Mapping[str, memoryview]):
    """One sample. ``sample["jpg"]`` is a read-only view of one dimension, of bytes.

    A view, and whatever was made over it without copying, keeps its bytes valid; the sample itself
    keeps all of its fields. To keep bytes for long, copy them: ``bytes(view)``.

    Attributes:
        key: its name within the shard.
        shard: the shard's name.
        position: which of the order's shards it is of.
        number: which of the shard's samples it is.
    """

    __slots__ = ("_fields", "key", "number", "position", "shard")

    def __init__(
        self, key: str, shard: str, position: int, number: int, fields: dict[str, memoryview]
    ) -> None:
        self.key = key
        self.shard = shard
        self.position = position
        self.number = number
        self._fields = fields

    def __getitem__(self, field: str) -> memoryview:
        return self._fields[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {view.nbytes} bytes" for name, view in self._fields.items())
        return f"<Sample {self.key} of {self.shard}: {sizes}>"


class _Extent:
    """A published extent; `view` is over its owner, or over `heap`, once that is decided."""

    __slots__ = ("heap", "is_decided", "length_bytes", "owner", "seq", "slot", "view")

    def __init__(self, event: ExtentEvent) -> None:
        self.seq = event.seq
        self.slot = event.slot
        self.length_bytes = event.length_bytes
        self.is_decided = False
        self.owner: Owner | None = None
        self.view: memoryview | None = None
        self.heap: bytes | None = None


class _Run:
    """Samples that are whole; `row` is the next one."""

    __slots__ = ("first", "index", "row")

    def __init__(self, index: SampleIndex, first: int) -> None:
        self.index = index
        self.first = first
        self.row = 0


class _Position:
    """One shard of the plan."""

    __slots__ = ("extents", "is_ended", "runs")

    def __init__(self) -> None:
        self.extents: dict[int, _Extent] = {}
        self.runs: collections.deque[_Run] = collections.deque()
        self.is_ended = False


class Taken(NamedTuple):
    """Where a cutter stands: shards that are done, and samples taken of the next one."""

    shards: int
    samples: int


class SampleCutter:
    """See the top of the file.

    Args:
        leases: of the session.
        names: of the plan's shards.
        first_position: the plan's number of the first of them.
        base: which of the whole order's shards that is.
        skip: samples of the first shard that were taken before.
        stats: counts what is cut.
    """

    def __init__(
        self,
        leases: Leases,
        names: Sequence[str],
        *,
        first_position: int,
        base: int,
        skip: int,
        stats: ReadStats,
    ) -> None:
        self._leases = leases
        self._names = names
        self._first = first_position
        self._base = base
        self._skip = skip
        self._stats = stats
        self._done = 0
        self._positions: dict[int, _Position] = {}
        self._failure: GpufeedError | None = None
        self.taken = Taken(base, skip)

    @property
    def is_over(self) -> bool:
        """Whether the plan's last sample was cut."""
        return self._done == len(self._names)

    # --- events -------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Take what the daemon told.

        Raises:
            ProtocolError: it is of no position of the plan.
        """
        if isinstance(event, FailEvent):
            self._failure = event.error
            return
        position = self._position(event.position)
        if isinstance(event, ExtentEvent):
            self._leases.take(event.seq)
            position.extents[event.extent] = _Extent(event)
        elif isinstance(event, SamplesEvent):
            position.runs.append(_Run(event.index, event.first))
        else:
            position.is_ended = True

    def _position(self, number: int) -> _Position:
        place = number - self._first
        if not self._done <= place < len(self._names):
            raise ProtocolError(f"the daemon published plan position {number}, which is not open")
        return self._positions.setdefault(place, _Position())

    # --- samples ------------------------------------------------------------------------------

    def next(self) -> Sample | None:
        """The next sample; None where it has not come yet, and at the end.

        Raises:
            GpufeedError: why the plan stops here.
        """
        while not self.is_over:
            position = self._positions.get(self._done)
            if position is None:
                break
            while position.runs:
                run = position.runs[0]
                if run.row == len(run.index):
                    position.runs.popleft()
                    continue
                sample = self._cut(position, run)
                if sample is not None:
                    return sample
            if not position.is_ended:
                break
            self._pass(position, None)
            del self._positions[self._done]
            self._done += 1
            self._skip = 0
            self.taken = Taken(self._base + self._done, 0)
        if self._failure is not None and not self.is_over:
            raise self._failure
        return None

    def _cut(self, position: _Position, run: _Run) -> Sample | None:
        """The run's next sample; None if it was taken before."""
        ref = run.index[run.row]
        number = run.first + run.row
        run.row += 1
        sample = None
        if number >= self._skip:
            name = self._names[self._done]
            fields = {
                member.ext: self._field(position, member.offset_bytes, member.size_bytes)
                for member in ref.members
            }
            sample = Sample(ref.key, name, self._base + self._done, number, fields)
            self._stats.samples_count += 1
            self.taken = Taken(self._base + self._done, number + 1)
        self._pass(position, _end_bytes(ref) // self._leases.extent_bytes)
        return sample

    def _pass(self, position: _Position, below: int | None) -> None:
        """No later sample touches extents before `below`, or any."""
        # They are in ascending order, as they were published.
        for number in list(position.extents):
            if below is not None and number >= below:
                break
            extent = position.extents.pop(number)
            if extent.owner is None and extent.heap is None:
                self._leases.give_back(extent.seq)

    def _field(self, position: _Position, offset: int, size: int) -> memoryview:
        if size == 0:
            return _NOTHING
        extent_bytes = self._leases.extent_bytes
        first, begin = divmod(offset, extent_bytes)
        last = (offset + size - 1) // extent_bytes
        extents = [position.extents[number] for number in range(first, last + 1)]
        for extent in extents:
            self._decide(extent)
        if len(extents) == 1:
            view = extents[0].view
            if view is not None:
                return view[begin : begin + size]
        else:
            joined = self._joined(extents, begin, size)
            if joined is not None:
                return joined
        self._count_copy(extents, size)
        return self._copied(extents, begin, size)

    def _decide(self, extent: _Extent) -> None:
        """Whether the extent's fields are given in place: of the first that is cut from it."""
        if extent.is_decided:
            return
        extent.is_decided = True
        extent.owner = self._leases.own(extent.seq, extent.slot, extent.length_bytes)
        if extent.owner is not None:
            extent.view = extent.owner.data

    def _joined(self, extents: Sequence[_Extent], begin: int, size: int) -> memoryview | None:
        owners = [extent.owner for extent in extents if extent.owner is not None]
        slot = extents[0].slot
        neighbours = all(extent.slot == slot + i for i, extent in enumerate(extents))
        if not neighbours or len(owners) < len(extents):
            return None
        return self._leases.join(owners, slot, begin, size).data

    def _count_copy(self, extents: Sequence[_Extent], size: int) -> None:
        if all(extent.owner is not None for extent in extents):
            self._stats.straddled_count += 1
            self._stats.straddled_bytes += size
        else:
            self._stats.copied_count += 1
            self._stats.copied_bytes += size

    def _copied(self, extents: Sequence[_Extent], begin: int, size: int) -> memoryview:
        pieces = []
        left = size
        for extent in extents:
            end = min(begin + left, self._leases.extent_bytes)
            if extent.heap is not None:
                pieces.append(extent.heap[begin:end])
            else:
                pieces.append(self._leases.copy(extent.slot, begin, end))
            left -= end - begin
            begin = 0
        return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    # --- room ---------------------------------------------------------------------------------

    def spill(self) -> None:
        """Make room in a window that is used up, while no sample is whole. See the top."""
        if self._leases.free_count > 0:
            return
        for position in self._positions.values():
            for extent in position.extents.values():
                if extent.heap is None:
                    self._spill(extent)

    def _spill(self, extent: _Extent) -> None:
        extent.heap = self._leases.copy(extent.slot, 0, extent.length_bytes)
        if extent.owner is None:
            self._leases.give_back(extent.seq)
        # Views that were made of it keep it; the next ones are of the copy.
        extent.is_decided = True
        extent.owner = extent.view = None


def _end_bytes(ref: SampleRef) -> int:
    """The offset just past the sample's last byte."""
    return max((m.offset_bytes + m.size_bytes for m in ref.members), default=0)
