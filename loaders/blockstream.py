"""Samples of several live shards in a permuted order; `stream` is for one shard after another.

Shards of a block (`gpufeed.loaders.blocks`) are published one after another and stay until all that
is wanted of them was cut. What is wanted of a block, and in which order, is known when the sample
counts of its shards are; of an epoch's first block, piece by piece as it comes.

Invariants: tasks come out in the block's order, each wanted sample once; blocks follow each other,
and epochs are separated by markers; a shard's extents become releasable together, once each, when
its last wanted sample was cut and no unit uses any of them.

The session's window must hold a block whole (`extents_needed`); `is_short` tells that it does not.

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
from gpufeed.loaders.blocks import Block, Numbers, WindowPart, piece_end
from gpufeed.loaders.samples import Task
from gpufeed.loaders.stream import Extent, SeedOf, fields_of

_LOOK_AHEAD = 256


def extents_needed(sizes_bytes: Sequence[int], extent_bytes: int, shards: int) -> int:
    """Extents of the `shards` largest shards, which may all be in one block."""
    counts = sorted((-(-size // extent_bytes) for size in sizes_bytes), reverse=True)
    return sum(counts[:shards])


@dataclass(slots=True, eq=False)
class LiveShard:
    """One plan position. `wanted` is None until all visits of its block are known."""

    shard: int
    name: str
    seed_of: SeedOf
    count: int | None
    extents: dict[int, Extent] = field(default_factory=dict)
    firsts: list[int] = field(default_factory=list)
    indexes: list[SampleIndex] = field(default_factory=list)
    published: int = 0
    ended: bool = False
    cut: int = 0
    wanted: int | None = None

    @property
    def is_over(self) -> bool:
        """Nothing more of it will be cut."""
        return self.wanted == self.cut

    def sample(self, number: int) -> SampleRef:
        """A published sample."""
        at = bisect.bisect_right(self.firsts, number) - 1
        return self.indexes[at][number - self.firsts[at]]


BlockLease = list[tuple[LiveShard, int, int]]  # extents [first, last] of a shard, in use by a unit


class _Group:
    """A block that is being read: its shards, and the visits that are known."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.shards: list[LiveShard] = []
        self.which: Numbers = np.zeros(0, np.int32)
        self.number: Numbers = np.zeros(0, np.int32)
        self.cursor = self.ready = self._piece_begin = 0
        self.is_known = False

    @property
    def is_over(self) -> bool:
        return self.is_known and self.cursor == len(self.which)

    def learn(self) -> bool:
        """Add the visits that can be known now; whether all are known since."""
        if self.is_known or len(self.shards) < len(self.block.shards):
            return False
        if self.block.is_first:
            self._learn_pieces()
        else:
            counts = [shard.count for shard in self.shards]
            known = [count for count in counts if count is not None]
            if len(known) == len(counts):
                self.which, self.number = self.block.permuted(known)
                self.is_known = True
        if self.is_known:
            wanted = np.bincount(self.which, minlength=len(self.shards))
            for shard, count in zip(self.shards, wanted.tolist(), strict=True):
                shard.wanted = count
        return self.is_known

    def _learn_pieces(self) -> None:
        (shard,) = self.shards
        pieces = [self.number]
        while not self.is_known:
            end = piece_end(self._piece_begin)
            if shard.count is not None:
                end = min(end, shard.count)
                self.is_known = end == shard.count
            elif shard.published < end:
                break
            pieces.append(self.block.piece(self._piece_begin, end))
            self._piece_begin = end
        self.number = np.concatenate(pieces)
        self.which = np.zeros(len(self.number), np.int32)

    def look(self) -> int:
        """Visits in order that can be cut now."""
        published = np.array([shard.published for shard in self.shards], np.int64)
        while self.ready < len(self.which):
            ahead = slice(self.ready, self.ready + _LOOK_AHEAD)
            there = published[self.which[ahead]] > self.number[ahead]
            if not there.all():
                self.ready += int(there.argmin())
                break
            self.ready += len(there)
        return self.ready - self.cursor


class BlockStream:
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
        self._groups: deque[_Group | None] = deque()  # None marks an epoch's end
        self._by_number: dict[int, LiveShard] = {}
        self._group_of: dict[int, _Group] = {}
        self._releasable: list[int] = []
        self._held_count = self._users_count = 0
        self.straddled_count = 0

    @property
    def available_count(self) -> int:
        """Samples that can be cut one after another, of this epoch."""
        self._settle()
        count = 0
        for group in self._groups:
            if group is None:
                break
            count += group.look()
            if not group.is_known or group.ready < len(group.which):
                break
        return count

    @property
    def planned_count(self) -> int:
        """Shards that are planned and not wholly cut."""
        return sum(len(group.shards) for group in self._groups if group is not None)

    @property
    def at_epoch_end(self) -> bool:
        """True when everything before the next epoch's marker was cut."""
        self._settle()
        return bool(self._groups) and self._groups[0] is None

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
        last = self._groups[-1] if self._groups else None
        if last is None or last.block is not part.block:
            last = _Group(part.block)
            self._groups.append(last)
        shard = LiveShard(part.shard, name, seed_of, self._counts[part.shard])
        last.shards.append(shard)
        self._by_number[number], self._group_of[number] = shard, last
        self._learn(last)

    def mark_epoch_end(self) -> None:
        """Nothing more of this epoch will be expected."""
        self._groups.append(None)

    def pass_epoch_end(self) -> None:
        """Go on to the next epoch."""
        assert self.at_epoch_end
        self._groups.popleft()

    def on_extent(self, event: ExtentEvent) -> None:
        """An extent was published."""
        shard = self._shard(event.position)
        shard.extents[event.extent] = Extent(event.seq, event.slot)
        self._held_count += 1
        self._collect(shard)

    def on_samples(self, event: SamplesEvent) -> None:
        """Samples were published."""
        shard = self._shard(event.position)
        shard.firsts.append(event.first)
        shard.indexes.append(event.index)
        shard.published = event.first + len(event.index)
        self._learn(self._group_of[event.position])

    def on_end(self, event: ShardEndEvent) -> None:
        """Everything of the position was published."""
        shard = self._shard(event.position)
        shard.ended, shard.count = True, shard.published
        del self._by_number[event.position]
        self._learn(self._group_of.pop(event.position))
        self._settle()

    def cut(self, limit: int) -> tuple[list[Task], BlockLease]:
        """At most `limit` samples of this epoch, in order, and the lease over their extents."""
        tasks: list[Task] = []
        lease: BlockLease = []
        while len(tasks) < limit:
            self._settle()
            group = self._groups[0] if self._groups else None
            take = min(limit - len(tasks), group.look()) if group is not None else 0
            if group is None or not take:
                break
            for at in range(group.cursor, group.cursor + take):
                shard = group.shards[int(group.which[at])]
                self._cut_one(shard, int(group.number[at]), tasks, lease)
            group.cursor += take
        return tasks, lease

    def give_back(self, lease: BlockLease) -> None:
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

    def _learn(self, group: _Group) -> None:
        if group.learn():
            for shard in group.shards:  # those of which nothing is wanted
                self._collect(shard)

    def _cut_one(self, shard: LiveShard, number: int, tasks: list[Task], lease: BlockLease) -> None:
        ref = shard.sample(number)
        fields, straddles = fields_of(shard.extents, self._extent_bytes, ref.members)
        self.straddled_count += straddles
        offset = min(member.offset_bytes for member in ref.members)
        seed = shard.seed_of(shard.shard, number)
        tasks.append(Task(ref.key, shard.name, offset, seed, fields))
        shard.cut += 1
        # Empty fields touch none: the extent that they would begin in may never come.
        full = [member for member in ref.members if member.size_bytes]
        if full:
            first = min(m.offset_bytes for m in full) // self._extent_bytes
            last = (max(m.offset_bytes + m.size_bytes for m in full) - 1) // self._extent_bytes
            lease.append((shard, first, last))
            for extent in range(first, last + 1):
                shard.extents[extent].users += 1
                self._users_count += 1
        elif shard.is_over:
            self._collect(shard)

    def _settle(self) -> None:
        """Take blocks that are wholly cut off the front."""
        while self._groups and (group := self._groups[0]) is not None and group.is_over:
            for shard in group.shards:
                self._collect(shard)
            self._groups.popleft()

    def _collect(self, shard: LiveShard) -> None:
        """Move what nothing can touch any more to the releasable ones."""
        if not shard.is_over:
            return
        for number in [n for n, extent in shard.extents.items() if extent.users == 0]:
            self._releasable.append(shard.extents.pop(number).seq)
