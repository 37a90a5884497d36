"""One loader's engine: it opens the session, starts workers and feeder, and hands batches over.

Life: `begin(cursor)`, then `take` until it returns None; then the next epoch. An epoch that is left
early is abandoned: its session is closed, which returns every lease, and the next epoch opens a
new one. `place` is where the trainer stands; `set_world` changes the ranks there, and a daemon that
goes away is sought for a while and gone on with from there (`take_on`). Workers and the
ring of batch slots live until `close`. The order of starting is fixed: session, workers, feeder
thread, so that no thread of ours exists when a worker is forked.

Threads: all methods are the trainer's thread's. The feeder's thread never refers to the engine, so
an engine that is dropped is collected, and closes. A forked child's copy does nothing.
"""

from __future__ import annotations

import atexit
import multiprocessing.util  # its exit handler ends our workers; ours must run before it
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeVar

from gpufeed.cachefs.errors import (
    CorruptSampleError,
    DaemonUnavailableError,
    GpufeedError,
    UsageError,
    WorkerError,
)
from gpufeed.cachefs.reconnect import Patience
from gpufeed.loaders.batch import BatchRecord, HandOver
from gpufeed.loaders.batchslots import SlotRing
from gpufeed.loaders.dataset import ShardDataset
from gpufeed.loaders.feed import EpochEnd, Failed, FeedConfig, FeedSource, FeedStats
from gpufeed.loaders.feeder import Feeder
from gpufeed.loaders.opener import BatchSize, Opener, SessionFactory
from gpufeed.loaders.order import step_count
from gpufeed.loaders.pinning import PinningStats, SlotPinning
from gpufeed.loaders.place import Place
from gpufeed.loaders.pool import WorkerPool
from gpufeed.loaders.resources import Resources
from gpufeed.loaders.resume import Cursor
from gpufeed.loaders.samples import SampleMaker
from gpufeed.loaders.units import UnitRunner
from gpufeed.loaders.worker import SharedFd, WorkerSpec
from gpufeed.loaders.world import World

if TYPE_CHECKING:
    from gpufeed.cachefs.client import Session

T = TypeVar("T")

CHUNK_ROWS = 16  # samples decoded at a time where the trainer takes them one by one

_live: weakref.WeakSet[Engine] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the loader asks of its engine.

    Attributes:
        batch: how large batches are.
        num_workers: decode processes; 0 decodes in the trainer's thread.
        lookahead: batches made ahead of the trainer.
        drop_last: leave the incomplete last batch out.
        use_slots: rows into batch slots where they fit.
        collate: makes a batch of samples, in the worker where there is one.
        init_fn: called with the worker's number at its start.
        context: how processes are started.
        continuous: run on over the epoch's end.
        timeout_s: wait for a batch, 0 for no limit.
        register_slots: register batch slots with CUDA.
    """

    batch: BatchSize
    num_workers: int = 0
    lookahead: int = 2
    drop_last: bool = False
    use_slots: bool = True
    collate: Callable[[list[Any]], Any] | None = None
    init_fn: Callable[[int], None] | None = None
    context: BaseContext | None = None
    continuous: bool = False
    timeout_s: float = 0.0
    register_slots: bool = False


@dataclass(slots=True)
class EngineStats:
    """What the trainer's side counts. Times in seconds."""

    batches_count: int = 0
    samples_count: int = 0
    reconnects_count: int = 0
    stall_s: float = 0.0
    first_batch_s: float = 0.0
    skipped_count: int = 0


class Engine:
    """See the top of the file."""

    def __init__(
        self,
        dataset: ShardDataset,
        config: EngineConfig,
        *,
        world: World | None = None,
        session_factory: SessionFactory | None = None,
    ) -> None:
        self._dataset = dataset
        self._config = config
        self._opener = Opener(dataset, config.batch, world=world, factory=session_factory)
        self._collate_here = config.num_workers == 0 or dataset.decode is None
        self.feed_stats = FeedStats()
        self.stats = EngineStats()
        pinning = SlotPinning() if config.register_slots else None
        self._resources = Resources(os.getpid(), SlotRing(pinning=pinning))
        here = config.collate if self._collate_here else None
        self.hand_over = HandOver(self._resources.ring, here)
        self.place = Place()
        self._patience = Patience()
        self._generation = 0
        self._moved = 0  # the token that was valid when the world changed under it
        self._epoch = -1
        self._running = False  # an epoch was begun and neither ended nor was abandoned
        self._began_s = 0.0
        self._first = False
        self._skipped_count = 0
        self._end = weakref.finalize(self, self._resources.end)
        _live.add(self)

    @property
    def manifest_hash(self) -> str:
        """Of the dataset as it was opened last; empty where it never was."""
        return self._opener.manifest_hash

    @property
    def begun_hash(self) -> str:
        """Of the dataset that `place` is a place of."""
        return self._opener.begun_hash

    @property
    def uses_processes(self) -> bool:
        """Without a `decode` there is nothing that a process would save."""
        return self._config.num_workers > 0 and self._dataset.decode is not None

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        pool = self._resources.pool
        return [] if pool is None else pool.pids

    @property
    def pinning_stats(self) -> PinningStats:
        """Counters of the registration of batch slots."""
        return self._resources.ring.pinning_stats

    @property
    def waiting_slots_count(self) -> int:
        """Batch slots that the accelerator may still read."""
        return self._resources.ring.waiting_count

    def open(self) -> FeedSource:
        """Open the session and the dataset where they are not.

        Raises:
            UsageError: closed, or not on Linux.
            GpufeedError: whatever the daemon answers.
        """
        source = self._resources.source
        if source is not None:
            return source
        if not self._end.alive:
            raise UsageError("the loader is closed; make a new one")
        if sys.platform != "linux":
            raise UsageError(f"gpufeed's data path is Linux only; this is {sys.platform}")
        source = self._resources.source = self._opener.open()
        return source

    def step_count(self) -> int | None:
        """Batches of an epoch on this rank; None where a shard's samples are not counted yet."""
        total = self.sample_count()
        if total is None:
            return None
        source = self.open()
        return step_count(
            total,
            size=source.order.rows.size,
            world_size=source.world.world_size,
            drop_last=self._config.drop_last,
        )

    def sample_count(self) -> int | None:
        """Samples of the dataset; None where a shard's samples are not counted yet."""
        return self.open().sample_count()

    def set_world(self, world: World) -> None:
        """Be this rank from the next `begin` on. What was made ahead is given up.

        Raises:
            UsageError: batches cannot be divided so; or samples of a batch are left to be taken.
        """
        self.place.require_whole()
        self._opener.set_world(world)
        if self._running:
            self._moved = self._generation
            self._generation += 1
            self._running = False
        self._resources.end_stream()

    def take_on(self, token: int, convert: Callable[[BatchRecord], T]) -> tuple[int, T | None]:
        """As `take`, going on where the world has changed or the daemon has gone away.

        Returns the token for the next call, and the batch.

        Raises:
            DaemonUnavailableError: no daemon was there for `gpufeed.cachefs.reconnect.LIMIT_S`.
            GpufeedError: as `take`.
        """
        while True:
            try:
                if token == self._moved:
                    token = self.begin(self.place.cursor())
                batch = self.take(token, convert)
            except DaemonUnavailableError as error:
                self._moved = token
                self._wait_for_daemon(error)
            else:
                self._patience.read()
                return token, batch

    def begin_on(self, cursor: Cursor) -> int:
        """As `begin`; a daemon that was there before is sought for a while.

        Raises:
            DaemonUnavailableError: no daemon was there for `gpufeed.cachefs.reconnect.LIMIT_S`.
            GpufeedError: as `begin`.
        """
        while True:
            try:
                return self.begin(cursor)
            except DaemonUnavailableError as error:
                if not self.manifest_hash:
                    raise
                self._wait_for_daemon(error)

    def _wait_for_daemon(self, error: DaemonUnavailableError) -> None:
        time.sleep(self._patience.delay_s(error, time.monotonic()))
        self.stats.reconnects_count += 1

    def begin(self, cursor: Cursor) -> int:
        """Start there; returns a token for `take`. An epoch under way is abandoned.

        Raises:
            UsageError: there is no such place.
            GpufeedError: whatever the daemon answers.
        """
        self._began_s = time.monotonic()
        epoch = cursor.epoch
        feeder, pool = self._resources.feeder, self._resources.pool
        continuous = self._config.continuous
        follows = not continuous or (epoch == self._epoch + 1 and not cursor.samples)
        if feeder and (self._running or feeder.failed or not follows or (pool and pool.broken)):
            self._resources.end_stream()
            self._generation += 1
            self._running = False
            feeder = None
        source = self.open()
        try:
            self._opener.require_place(source, cursor)
        except BaseException:
            self._resources.end_stream()
            raise
        if feeder is None:
            self._start(source).begin(cursor)
        elif not continuous:
            feeder.begin(cursor)
        if not cursor.samples or epoch != self._epoch:
            self._skipped_count = 0
        self.place.begin(cursor, source.order.rows, world_size=source.world.world_size)
        self._epoch = epoch
        self._generation += 1
        self._moved = 0
        self._running = self._first = True
        return self._generation

    def take(self, token: int, convert: Callable[[BatchRecord], T]) -> T | None:
        """The next batch, converted; None at the epoch's end.

        Raises:
            UsageError: a later `begin` ended this epoch.
            WorkerError: a worker died, a sample failed, or `timeout_s` passed.
            DeviceError: the accelerator failed, where slots are registered.
            GpufeedError: whatever else ended the feeder.
        """
        self.require_current(token)
        if not self._running:
            return None
        try:
            while True:
                self._resources.ring.settle()
                record = self._next()
                if record is None:
                    self._running = False
                    self.place.ended()
                    return None
                self._judge(record)
                taken = record.index, record.rows, sorted(record.failures)
                good_count = record.good_count
                if good_count == 0:
                    self._discard(record)
                    self.place.passed_over(*taken)
                    continue
                batch = convert(record)
                self._took()
                self.place.took(*taken)
                self.stats.samples_count += good_count
                return batch
        except Exception:
            self.abandon(token)
            raise
        except BaseException:  # the trainer is being interrupted: wait for nothing
            self.abandon(token, end_workers=True)
            raise

    def require_current(self, token: int) -> None:
        """The iterator with this token is the last one.

        Raises:
            UsageError: a later `begin` ended it.
        """
        if token != self._generation:
            raise UsageError("this iterator was ended by a later iter() of the same loader")

    def abandon(self, token: int, *, end_workers: bool = False) -> None:
        """Leave the epoch early: units under way are finished, leases returned."""
        if token == self._generation and self._running:
            self._running = False
            self._resources.end_stream(end_workers=end_workers)

    def close(self) -> None:
        """End workers, feeder and session. Batches that are held stay valid."""
        self._running = False
        self._generation += 1
        self._end()

    def _start(self, source: FeedSource) -> Feeder:
        """A new stream: workers where there are none, and a feeder."""
        resources, config = self._resources, self._config
        rows = source.order.rows.count
        self._fit_ring(rows)
        feed = FeedConfig(
            batch_rows=rows,
            lookahead=config.lookahead if config.num_workers else 1,
            drop_last=config.drop_last,
            use_slots=config.use_slots and (config.collate is None or self.uses_processes),
            whole_batches=config.collate is not None and self.uses_processes,
            continuous=config.continuous and config.num_workers > 0,
            own_thread=config.num_workers == 0,
        )
        local = None
        if self.uses_processes:
            self._ensure_pool(source.session)
        else:
            local = self._local_runner(source.session)
        pool = resources.pool if local is None else None
        feeder = Feeder(feed, source, resources.ring, pool=pool, local=local, stats=self.feed_stats)
        resources.feeder = feeder
        if config.num_workers:
            resources.thread = threading.Thread(
                target=feeder.run, name="gpufeed-feeder", daemon=True
            )
            resources.thread.start()
        return feeder

    def _fit_ring(self, rows: int) -> None:
        """A new ring, and new workers, where batches have another size now."""
        resources = self._resources
        shape = resources.ring.shape
        if shape is not None and resources.ring_rows != rows:
            pool, resources.pool = resources.pool, None
            if pool is not None:
                pool.stop()
            resources.ring.close()
            pinning = SlotPinning() if self._config.register_slots else None
            resources.ring = self.hand_over.ring = SlotRing(pinning=pinning)
        resources.ring_rows = rows

    def _local_runner(self, session: Session) -> UnitRunner:
        decode = self._dataset.decode
        runner = UnitRunner(SampleMaker(session.arena(), decode), keep_samples=decode is None)
        ring = self._resources.ring
        if ring.shape is not None:
            runner.configure(ring.fd, ring.shape)
        return runner

    def _ensure_pool(self, session: Session) -> None:
        """Workers that map this session's arena."""
        resources, config = self._resources, self._config
        status = os.fstat(session.arena_fd)
        arena_id = (status.st_dev, status.st_ino)
        pool = resources.pool
        if pool is not None:
            if len(pool) and not pool.broken and resources.arena_id == arena_id:
                return
            resources.pool = None
            pool.stop()
        # A copy of our own: a forked child closes the session and its descriptors at once.
        arena_fd, lock_fd = os.dup(session.arena_fd), os.dup(session.lock_fd)
        try:
            resources.pool = WorkerPool(
                config.context or multiprocessing.get_context(),
                lambda number: self._spec(number, arena_fd, lock_fd, session.arena_bytes),
                config.num_workers,
            )
        finally:
            os.close(arena_fd)
            os.close(lock_fd)
        resources.arena_id = arena_id
        if resources.ring.shape is not None:
            resources.pool.configure(resources.ring.shape)

    def _spec(self, number: int, arena_fd: int, lock_fd: int, arena_bytes: int) -> WorkerSpec:
        return WorkerSpec(
            worker=number,
            worker_count=self._config.num_workers,
            seed=self._dataset.seed,
            decode=self._dataset.decode,
            collate=self._config.collate,
            init_fn=self._config.init_fn,
            dataset=self._dataset,
            arena=SharedFd(arena_fd),
            arena_lock=SharedFd(lock_fd),
            arena_bytes=arena_bytes,
            ring=SharedFd(self._resources.ring.fd),
        )

    def _next(self) -> BatchRecord | None:
        feeder = self._resources.feeder
        assert feeder is not None
        start = time.monotonic()
        if self._resources.thread is None:
            feeder.advance_until_ready()
        try:
            item = feeder.ready.get(timeout=self._config.timeout_s or None)
        except Empty:
            raise WorkerError(
                f"no batch within timeout={self._config.timeout_s} s; the workers are slower than "
                "that or the origin does not answer"
            ) from None
        now = time.monotonic()
        self.stats.stall_s += now - start
        if isinstance(item, Failed):
            raise item.error
        if isinstance(item, EpochEnd):
            return None
        if self._first:
            self._first = False
            self.stats.first_batch_s = now - self._began_s
        self.stats.batches_count += 1
        return item

    def _judge(self, record: BatchRecord) -> None:
        """Apply the job's policy to what failed in a batch."""
        if record.collate_failure is not None:
            self._free(record)
            raise record.collate_failure.exception()
        if not record.failures:
            return
        first = record.failures[min(record.failures)]
        if self._dataset.on_error == "raise":
            self._free(record)
            raise first.exception()
        self.stats.skipped_count += len(record.failures)
        self._skipped_count += len(record.failures)
        limit = self._dataset.skip_limit
        if self._skipped_count > limit:
            self._free(record)
            raise CorruptSampleError(
                f"{self._skipped_count} samples of epoch {self._epoch} failed to decode, over the "
                f"skip_limit of {limit}; the last was {first.sample}"
            ) from first.exception()
        if record.good_count == 0 and self.open().world.world_size > 1:
            self._free(record)
            raise CorruptSampleError(
                f"no sample of batch {record.index} of epoch {self._epoch} could be decoded, and "
                "leaving a batch out would part the ranks"
            ) from first.exception()

    def _discard(self, record: BatchRecord) -> None:
        self._free(record)
        self._took()

    def _free(self, record: BatchRecord) -> None:
        if record.slot is not None:
            self._resources.ring.give_back(record.slot)
            record.slot = None

    def _took(self) -> None:
        feeder = self._resources.feeder
        assert feeder is not None
        feeder.took()


def iterate_samples(
    dataset: ShardDataset, epoch: int, session_factory: SessionFactory | None = None
) -> Iterator[Any]:
    """The decoded samples of one epoch, in the calling thread.

    Raises:
        GpufeedError: as `Engine.take`.
    """
    config = EngineConfig(batch=BatchSize(CHUNK_ROWS), use_slots=False)
    engine = Engine(dataset, config, session_factory=session_factory)
    try:
        token = engine.begin_on(Cursor(epoch))
        while True:
            token, samples = engine.take_on(token, engine.hand_over.samples)
            if samples is None:
                return
            yield from samples
    finally:
        engine.close()


def _close_all() -> None:
    for engine in list(_live):
        try:
            engine.close()
        except GpufeedError as error:  # at exit there is nobody to raise to
            print(f"gpufeed: {error}", file=sys.stderr)  # noqa: T201 the interpreter is ending


atexit.register(_close_all)
