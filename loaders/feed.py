"""What the engine and its feeder tell each other: configuration, source, counters, deliveries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpufeed.loaders.batch import BatchRecord
from gpufeed.loaders.order import (
    ORDER_VERSION,
    RankRows,
    ShardPart,
    Shuffle,
    epoch_shards,
    mix,
    rank_parts,
    sample_seeds,
    whole_parts,
)
from gpufeed.loaders.segments import Share, WindowPart, window_of, window_parts
from gpufeed.loaders.segmentstream import SegmentStream
from gpufeed.loaders.stream import ArenaStream, SampleStream, SeedOf
from gpufeed.loaders.world import World

if TYPE_CHECKING:
    from gpufeed.cachefs.client import Dataset, Session


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """All batches of the epoch came before this."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The feeder ended by an error."""

    error: BaseException


Delivery = BatchRecord | EpochEnd | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedConfig:
    """What the feeder is to make.

    Attributes:
        batch_rows: samples a batch.
        lookahead: batches begun and not taken by the trainer.
        drop_last: leave the incomplete last batch out.
        use_slots: write rows into batch slots where they fit.
        whole_batches: one worker gets all units of a batch, because it collates it.
        continuous: go on to the next epoch without being told.
        own_thread: decode in the trainer's thread; its random state is kept.
    """

    batch_rows: int
    lookahead: int
    drop_last: bool
    use_slots: bool
    whole_batches: bool
    continuous: bool
    own_thread: bool


@dataclass(slots=True)
class FeedStats:
    """Counters of one loader, over all its epochs. Written by the feeder alone."""

    units_count: int = 0
    straddled_count: int = 0
    shards_count: int = 0
    bytes_by_tier: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """How epochs are ordered and cut. `rows` is what this rank takes of a global batch."""

    seed: int
    shuffle: Shuffle
    rows: RankRows


@dataclass(slots=True, kw_only=True)
class FeedSource:
    """The session and how an epoch of it is cut. `sample_counts` learns counts as shards end."""

    session: Session
    dataset: Dataset
    order: SampleOrder
    world: World
    sample_counts: list[int | None]

    def sample_count(self) -> int | None:
        """Samples of the dataset; None where a shard's are not counted yet."""
        known = [count for count in self.sample_counts if count is not None]
        return sum(known) if len(known) == len(self.sample_counts) else None

    def parts_of(self, epoch: int, start: int = 0) -> Iterator[ShardPart | WindowPart]:
        """What this rank reads in `epoch` from position `start` on, in order."""
        order, counts, world = self.order, self.sample_counts, self.world
        shards = epoch_shards(len(counts), seed=order.seed, epoch=epoch, shuffle=order.shuffle)
        if window := window_of(order.shuffle):
            key = mix(ORDER_VERSION, order.seed, epoch, window)
            return window_parts(shards, counts, window, key=key, share=self._share(start))
        if world.world_size == 1:
            return whole_parts(shards, counts, start=start)
        known = [count or 0 for count in counts]
        return rank_parts(shards, known, rows=order.rows, start=start)

    def _share(self, start: int) -> Share:
        if self.world.world_size == 1:
            return Share(start=start)
        rows = self.order.rows
        left = sum(count or 0 for count in self.sample_counts) - start
        return Share(rows, start, max(0, left) // rows.size)

    def make_stream(self) -> SampleStream:
        """What makes samples in this order of the session's events."""
        session = self.session
        if not window_of(self.order.shuffle):
            return ArenaStream(session.extent_bytes)
        return SegmentStream(session.extent_bytes, session.window_extents, self.sample_counts)

    def seeds_of(self, epoch: int) -> SeedOf:
        """The seeds of the samples of `epoch`."""
        return sample_seeds(self.order.seed, epoch)
