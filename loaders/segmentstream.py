"""Samples of several live shards in a permuted order; `stream` is for one shard after another.

The shards of an epoch are published one after another; segments of them
(`gpufeed.loaders.segments`) are cut one after another. A segment can be worked out when the sample
counts of its shards are known: beforehand, or when they have ended.

Invariants: tasks come out in order, each wanted sample once; epochs are separated by markers; an
extent becomes releasable exactly once, when no unit uses it and no later segment can touch it.

The session's window must hold what is live (`extents_needed`); `is_short` tells that it does not.

Pure: no I/O, one thread.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gpufeed.cachefs.errors import ProtocolError
from gpufeed.cachefs.sampleindex import SampleIndex, SampleRef
from gpufeed.cachefs.wire import ExtentEvent, SamplesEvent, ShardEndEvent
from gpufeed.loaders.samples import Task
from gpufeed.loaders.segments import Numbers, WindowEpoch, WindowPart
from gpufeed.loaders.stream import Extent, SeedOf, fields_of

_LOOK_AHEAD = 256
_SEGMENTS_AHEAD = 2


def extents_needed(sizes_bytes: Sequence[int], extent_bytes: int, shards: int) -> int:
    """Extents that a window may take: its newest shard whole, of each before it a slice less."""
    largest = max((-(-size // extent_bytes) for size in sizes_bytes), default=0)
    # And one, in which a slice ends, of each.
    return sum(-(-largest * left // shards) + 1 for left in range(1, shards + 1))


@dataclass(slots=True, eq=False)
class LiveShard:
    """One plan position. Samples below `done` were cut, or are not wanted."""

    shard: int
    name: str
    seed_of: SeedOf
    count: int | None
    extents: dict[int, Extent] = field(default_factory=dict)
    firsts: list[int] = field(default_factory=list)
    indexes: list[SampleIndex] = field(default_factory=list)
    published: int = 0
    done: int = 0
    is_over: bool = False

    def sample(self, number: int) -> SampleRef:
        """A published sample."""
        at = bisect.bisect_right(self.firsts, number) - 1
        return self.indexes[at][number - self.firsts[at]]

    @property
    def done_bytes(self) -> int:
        """Nothing below will be touched any more."""
        if not 0 < self.done <= self.published:
            return 0
        return max(m.offset_bytes + m.size_bytes for m in self.sample(self.done - 1).members)


SegmentLease = list[
    tuple[LiveShard, int, int]
]  # extents [first, last] of a shard, in use by a unit


@dataclass(slots=True, eq=False)
class _Segment:
    """Its shards, the end of each one's slice, and its samples in order."""

    number: int
    shards: list[LiveShard]
    ends: list[int]
    which: Numbers
    sample: Numbers
    cursor: int = 0
    ready: int = 0

    def look(self) -> int:
        """Samples in order that can be cut now."""
        published = np.array([shard.published for shard in self.shards], np.int64)
        while self.ready < len(self.which):
            ahead = slice(self.ready, self.ready + _LOOK_AHEAD)
            there = published[self.which[ahead]] > self.sample[ahead]
            if not there.all():
                self.ready += int(there.argmin())
                break
            self.ready += len(there)
        return self.ready - self.cursor


class _Reading:
    """An epoch that is being read: its live shards, and the segments that are worked out."""

    def __init__(self, epoch: WindowEpoch) -> None:
        self.epoch = epoch
        self.shards: dict[int, LiveShard] = {}  # by place
        self.segments: deque[_Segment] = deque()
        self._next = epoch.first
        self._offset = epoch.offset

    @property
    def is_over(self) -> bool:
        return self._next > self.epoch.last and not self.segments

    def learn(self) -> None:
        """Work segments out, as far as can be known and is needed."""
        while self._next <= self.epoch.last and len(self.segments) < _SEGMENTS_AHEAD:
            shards = [self.shards.get(place) for place in self.epoch.members(self._next)]
            live = [shard for shard in shards if shard is not None]
            counts = [shard.count for shard in live if shard.count is not None]
            if len(counts) < len(shards):
                return
            slices = self.epoch.slices(self._next, counts)
            which, sample = self.epoch.permuted(self._next, self._offset, slices)
            ends = [end for _, end in slices]
            self.segments.append(_Segment(self._next, live, ends, which, sample))
            self._offset += sum(end - begin for begin, end in slices)
            self._next += 1

    def settle(self) -> list[LiveShard]:
        """Take segments that are wholly cut off the front; returns their shards."""
        touched: list[LiveShard] = []
        while self.segments and self.segments[0].cursor == len(self.segments[0].which):
            segment = self.segments.popleft()
            is_last = segment.number == self.epoch.last
            for shard, end in zip(segment.shards, segment.ends, strict=True):
                shard.done = end
                shard.is_over = is_last or end == shard.count
            touched += segment.shards
            leaver = segment.number - self.epoch.shards + 1
            if leaver in self.shards:
                self.shards.pop(leaver).is_over = True
            self.learn()
        return touched


class SegmentStream:
    """See the top of the file. Satisfies `gpufeed.loaders.stream.SampleStream`.

    Args:
        extent_bytes: of the session.
        window_extents: what the session may hold.
        counts: samples of each shard of the dataset, where they are known.
    """

    def __init__(
        self, extent_bytes: int, window_extents: int, counts: Sequence[int | None]
    ) -> None:
        self._extent_bytes = extent_bytes
        self._window_extents = window_extents
        self._counts = counts
        self._readings: deque[_Reading | None] = deque()  # None marks an epoch's end
        self._by_number: dict[int, LiveShard] = {}
        self._reading_of: dict[int, _Reading] = {}
        self._releasable: list[int] = []
        self._held_count = self._users_count = 0
        self.straddled_count = 0

    @property
    def available_count(self) -> int:
        """Samples that can be cut one after another, of this epoch."""
        self._settle()
        reading = self._readings[0] if self._readings else None
        count = 0
        for segment in reading.segments if reading is not None else ():
            count += segment.look()
            if segment.ready < len(segment.which):
                break
        return count

    @property
    def planned_count(self) -> int:
        """Shards that are planned and not published whole."""
        return len(self._by_number)

    @property
    def at_epoch_end(self) -> bool:
        """True when everything before the next epoch's marker was cut."""
        self._settle()
        return bool(self._readings) and self._readings[0] is None

    @property
    def is_short(self) -> bool:
        """All that the session may hold is held, and nothing of it can be cut or released."""
        return (
            self._held_count >= self._window_extents
            and not self._users_count
            and not self._releasable
            and not self.available_count
        )

    def expect(self, number: int, part: WindowPart, name: str, seed_of: SeedOf) -> None:
        """Plan position `number` will bring `part` of the shard `name`."""
        last = self._readings[-1] if self._readings else None
        if last is None or last.epoch is not part.epoch:
            last = _Reading(part.epoch)
            self._readings.append(last)
        shard = LiveShard(part.shard, name, seed_of, self._counts[part.shard])
        last.shards[part.place] = shard
        self._by_number[number], self._reading_of[number] = shard, last
        last.learn()

    def mark_epoch_end(self) -> None:
        """Nothing more of this epoch will be expected."""
        self._readings.append(None)

    def pass_epoch_end(self) -> None:
        """Go on to the next epoch."""
        assert self.at_epoch_end
        self._readings.popleft()

    def on_extent(self, event: ExtentEvent) -> None:
        """An extent was published."""
        shard = self._shard(event.position)
        shard.extents[event.extent] = Extent(event.seq, event.slot)
        self._held_count += 1
        if shard.is_over:
            self._collect(shard)

    def on_samples(self, event: SamplesEvent) -> None:
        """Samples were published."""
        shard = self._shard(event.position)
        shard.firsts.append(event.first)
        shard.indexes.append(event.index)
        shard.published = event.first + len(event.index)

    def on_end(self, event: ShardEndEvent) -> None:
        """Everything of the position was published."""
        shard = self._shard(event.position)
        shard.count = shard.published
        del self._by_number[event.position]
        self._reading_of.pop(event.position).learn()
        self._settle()

    def cut(self, limit: int) -> tuple[list[Task], SegmentLease]:
        """At most `limit` samples of this epoch, in order, and the lease over their extents."""
        tasks: list[Task] = []
        lease: SegmentLease = []
        while len(tasks) < limit:
            self._settle()
            reading = self._readings[0] if self._readings else None
            if reading is None or not reading.segments:
                break
            segment = reading.segments[0]
            take = min(limit - len(tasks), segment.look())
            if not take:
                break
            for at in range(segment.cursor, segment.cursor + take):
                shard = segment.shards[int(segment.which[at])]
                self._cut_one(shard, int(segment.sample[at]), tasks, lease)
            segment.cursor += take
        return tasks, lease

    def give_back(self, lease: SegmentLease) -> None:
        """The unit that had `lease` is done with its bytes."""
        for shard, first, last in lease:
            for number in range(first, last + 1):
                shard.extents[number].users -= 1
                self._users_count -= 1
        for shard in {id(one): one for one, _, _ in lease}.values():
            self._collect(shard)

    def take_releasable(self) -> list[int]:
        """Sequence numbers of extents to release; each is told once."""
        self._settle()
        seqs, self._releasable = self._releasable, []
        self._held_count -= len(seqs)
        return seqs

    def _shard(self, number: int) -> LiveShard:
        shard = self._by_number.get(number)
        if shard is None:
            raise ProtocolError(f"the daemon published plan position {number}, which is not open")
        return shard

    def _cut_one(
        self, shard: LiveShard, number: int, tasks: list[Task], lease: SegmentLease
    ) -> None:
        ref = shard.sample(number)
        fields, straddles = fields_of(shard.extents, self._extent_bytes, ref.members)
        self.straddled_count += straddles
        offset = min(member.offset_bytes for member in ref.members)
        seed = shard.seed_of(shard.shard, number)
        tasks.append(Task(ref.key, shard.name, offset, seed, fields))
        # Empty fields touch none: the extent that they would begin in may never come.
        full = [member for member in ref.members if member.size_bytes]
        if full:
            first = min(m.offset_bytes for m in full) // self._extent_bytes
            last = (max(m.offset_bytes + m.size_bytes for m in full) - 1) // self._extent_bytes
            lease.append((shard, first, last))
            for extent in range(first, last + 1):
                shard.extents[extent].users += 1
                self._users_count += 1

    def _settle(self) -> None:
        """Take what is wholly cut off the front."""
        while self._readings and (reading := self._readings[0]) is not None:
            for shard in reading.settle():
                self._collect(shard)
            if not reading.is_over:
                return
            for shard in reading.shards.values():  # whose last slices are not wanted
                shard.is_over = True
                self._collect(shard)
            self._readings.popleft()

    def _collect(self, shard: LiveShard) -> None:
        """Move what nothing can touch any more to the releasable ones."""
        closed = shard.done_bytes // self._extent_bytes
        for number in [n for n, extent in shard.extents.items() if extent.users == 0]:
            if shard.is_over or number < closed:
                self._releasable.append(shard.extents.pop(number).seq)
