"""Opens a session and the dataset as one rank's source, and knows what does not end with a session.

That is: which rank of which world this is, how large batches are, how many samples each shard has
(learned in earlier sessions too), and which manifest the epoch under way was begun with. Whoever
changes the world or loses the daemon opens again, and goes on at a place that is required to lie in
the same order.

The trainer's thread's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpufeed.cachefs.errors import CapacityError, ShardChangedError, UsageError
from gpufeed.loaders.dataset import ShardDataset
from gpufeed.loaders.feed import FeedSource, SampleOrder
from gpufeed.loaders.order import RankRows, rank_rows
from gpufeed.loaders.resume import Cursor
from gpufeed.loaders.segments import window_of
from gpufeed.loaders.segmentstream import extents_needed
from gpufeed.loaders.world import World

if TYPE_CHECKING:
    from gpufeed.cachefs.client import Dataset, Session

SessionFactory = Callable[..., "Session"]


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How large batches are.

    Attributes:
        rows: samples of a rank's batch.
        global_rows: samples of a global batch, over all ranks; 0: `rows` on each.
        uneven: ranks' batches may differ by one sample, where the world does not divide them.
    """

    rows: int
    global_rows: int = 0
    uneven: bool = False

    def of_rank(self, world: World) -> RankRows:
        """What a rank takes of each global batch.

        Raises:
            UsageError: they cannot be divided so.
        """
        size = self.global_rows or self.rows * world.world_size
        if size < world.world_size or (size % world.world_size and not self.uneven):
            raise UsageError(
                f"a global batch of {size} samples cannot be divided among {world.world_size} "
                'ranks; choose a multiple, or uneven="allow" where there are more samples than '
                "ranks"
            )
        return rank_rows(size, rank=world.rank, world_size=world.world_size)


class Opener:
    """See the top of the file.

    Attributes:
        manifest_hash: of the dataset as it was opened last; empty where it never was.
        begun_hash: of the dataset as the epoch under way was begun with.

    Args:
        dataset: what to read.
        batch: how large batches are.
        world: of this process; None is found at the first opening.
        factory: makes sessions; None: `gpufeed.cachefs.connect.open_session`.
    """

    def __init__(
        self, dataset: ShardDataset, batch: BatchSize, *, world: World | None,
        factory: SessionFactory | None,
    ) -> None:  # fmt: skip
        self._dataset = dataset
        self._batch = batch
        self._world = world
        self._factory = factory
        self._counts: list[int | None] = []
        self._former = ""
        self.begun_hash = ""
        self.manifest_hash = ""

    def set_world(self, world: World) -> None:
        """Open as this rank from now on.

        Raises:
            UsageError: batches cannot be divided so.
        """
        self._batch.of_rank(world)
        self._world = world

    def open(self) -> FeedSource:
        """A session, and the dataset in it.

        Raises:
            GpufeedError: whatever the daemon answers.
        """
        world = self._world = self._world or World.current()
        rows = self._batch.of_rank(world)
        session = self._connect()
        try:
            opened = session.open_dataset(self._dataset.request())
            session, opened = self._with_room(session, opened)
            if world.world_size > 1 and any(s.sample_count is None for s in opened.shards):
                opened = session.index_dataset(opened)
        except BaseException:
            session.close()
            raise
        counts = [shard.sample_count for shard in opened.shards]
        if self.manifest_hash == opened.manifest_hash:  # what earlier epochs learned
            both = zip(counts, self._counts, strict=True)
            counts = [known if new is None else new for new, known in both]
        self._counts = counts
        self.manifest_hash = opened.manifest_hash
        return FeedSource(
            session=session, dataset=opened, world=world, sample_counts=counts,
            order=SampleOrder(self._dataset.seed, self._dataset.shuffle, rows),
        )  # fmt: skip

    def require_place(self, source: FeedSource, cursor: Cursor) -> None:
        """The epoch can be read from there on, in the order in which it was begun.

        Raises:
            ShardChangedError: the dataset is another one than at the epoch's begin.
            UsageError: the epoch has fewer samples.
        """
        manifest = source.dataset.manifest_hash
        if cursor.samples and self.begun_hash not in ("", manifest):
            raise ShardChangedError(
                f"the dataset has changed within epoch {cursor.epoch}: its manifest was "
                f"{self.begun_hash[:16]}, it is {manifest[:16]} now, so that its order cannot be "
                "gone on with; begin the epoch anew with set_epoch, or name the shards instead of "
                "a prefix"
            )
        self.begun_hash = manifest
        if not cursor.samples:
            return
        if source.sample_count() is None:
            dataset = source.session.index_dataset(source.dataset)
            source.sample_counts[:] = [shard.sample_count for shard in dataset.shards]
        total = source.sample_count()
        if total is not None and cursor.samples > total:
            raise UsageError(
                f"cannot go on after {cursor.samples} samples of epoch {cursor.epoch}: the dataset "
                f"has {total}"
            )

    def _with_room(self, session: Session, dataset: Dataset) -> tuple[Session, Dataset]:
        """A session that can hold what a window of shards needs, and one more shard if possible.

        Raises:
            CapacityError: the daemon has not so much, with the numbers.
        """
        shards = window_of(self._dataset.shuffle)
        sizes = [shard.size_bytes for shard in dataset.shards]
        needed = extents_needed(sizes, session.extent_bytes, shards)
        more = needed + -(-max(sizes, default=0) // session.extent_bytes)
        if not shards or session.window_extents >= more:
            return session, dataset
        session.close()
        try:
            found = self._connect(more * session.extent_bytes, whole=True)
        except CapacityError:
            found = self._connect(needed * session.extent_bytes, whole=True)
        try:
            return found, found.open_dataset(self._dataset.request())
        except BaseException:
            found.close()
            raise

    def _connect(self, window_bytes: int = 0, *, whole: bool = False) -> Session:
        factory = self._factory
        if factory is None:
            from gpufeed.cachefs.connect import open_session  # noqa: PLC0415 light import

            factory = open_session
        session = factory(
            daemon=self._dataset.daemon, window_bytes=window_bytes or self._dataset.window_bytes,
            whole=whole, former=self._former,
        )  # fmt: skip
        self._former = session.socket_path
        return session
