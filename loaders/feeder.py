"""The feeder: session events in, work units out, batches in order to the trainer.

One feeder serves one session, from its opening to its close. It owns the session and, while it
lives, the worker pool. With workers it is a thread that blocks in one place, on epoll over the
session, the workers' channels and an eventfd by which the trainer's thread wakes it. Without, the
trainer's thread calls `advance` itself.

What is ready goes into `ready` in order: `BatchRecord`s, an `EpochEnd` after the last batch of an
epoch, or `Failed`, after which nothing follows. Limits: `lookahead` batches begun and not taken,
`UNITS_PER_WORKER_MAX` units with a worker, `PLAN_AHEAD_SHARDS` shards planned and not read.
"""

from __future__ import annotations

import itertools
import os
import pickle
import select
import time
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue

from gpufeed.cachefs.errors import CapacityError, GpufeedError, ProtocolError, WorkerError
from gpufeed.cachefs.wire import ExtentEvent, FailEvent, SamplesEvent, ShardEndEvent
from gpufeed.loaders.batch import BatchRecord
from gpufeed.loaders.batchslots import SlotRing
from gpufeed.loaders.feed import Delivery, EpochEnd, Failed, FeedConfig, FeedSource, FeedStats
from gpufeed.loaders.forecast import Forecaster
from gpufeed.loaders.layout import find_layout
from gpufeed.loaders.order import ShardPart
from gpufeed.loaders.pool import WorkerPool
from gpufeed.loaders.resume import Cursor
from gpufeed.loaders.samples import Task, borrowed_thread
from gpufeed.loaders.segments import WindowPart
from gpufeed.loaders.stream import Lease
from gpufeed.loaders.units import UNIT_ROWS_MAX, Unit, UnitResult, UnitRunner

UNITS_PER_WORKER_MAX = 2
UNITS_PER_BATCH_AND_WORKER = 2
FIRST_UNITS_PER_WORKER = 8
PLAN_AHEAD_SHARDS = 64
EPOCHS_AHEAD_MAX = 1
DRAIN_WAIT_S = 5.0
# With a full window, for what the daemon may tell of it still: its samples, the shard's end.
SHORT_WAIT_S = 5.0


class Feeder:
    """See the top of the file. Exactly one of `pool` and `local` decodes."""

    def __init__(
        self,
        config: FeedConfig,
        source: FeedSource,
        ring: SlotRing,
        *,
        pool: WorkerPool | None = None,
        local: UnitRunner | None = None,
        stats: FeedStats,
    ) -> None:
        assert (pool is None) != (local is None)
        self._config, self._source, self._ring = config, source, ring
        self._pool, self._local, self.stats = pool, local, stats
        self.ready: SimpleQueue[Delivery] = SimpleQueue()
        self.taken_count = 0  # written by the trainer's thread only
        self.failed = False
        self._stream = source.make_stream()
        self._begun_count = 0
        self._dropped_count = 0
        self._open: deque[BatchRecord | EpochEnd] = deque()
        self._current: BatchRecord | None = None
        self._leases: dict[tuple[int, int], Lease] = {}
        self._orders: deque[Cursor] = deque()
        self._parts: Iterator[ShardPart | WindowPart] | None = None
        self._forecast = Forecaster(source)
        self._planning = -1  # epoch whose shards are being planned
        self._cutting: deque[int] = deque()  # planned epochs that are not wholly cut
        self._index = 0
        self._layout_known = not config.use_slots or ring.shape is not None
        self._plan_shards: dict[int, int] = {}
        self._stopping = False
        self._end_workers = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(source.session.fileno(), select.EPOLLIN)
        self._workers = {pool.fileno(n): n for n in range(len(pool))} if pool is not None else {}
        self._masks = dict.fromkeys(self._workers, select.EPOLLIN)
        for fd in self._workers:
            self._epoll.register(fd, select.EPOLLIN)

    # The trainer's side.

    def begin(self, cursor: Cursor) -> None:
        """Run an epoch from a place in it on, after what was begun before."""
        self._orders.append(cursor)
        self.wake()

    def took(self) -> None:
        """The trainer took a batch, so another may be begun."""
        self.taken_count += 1
        self.wake()

    def stop(self, *, end_workers: bool) -> None:
        """Make the thread end: it finishes the units under way and closes the session.

        With `end_workers` it does not wait for the units, and ends the workers instead.
        """
        self._end_workers = end_workers
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        """Let the thread look again."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # The feeder's side.

    def run(self) -> None:
        """The thread's main function."""
        try:
            while not self._stopping:
                self.advance()
                self._wait_for_more()
        except BaseException as error:  # the trainer's thread raises it
            self.fail(error)
        finally:
            self.shut_down()

    def advance(self) -> bool:
        """Do everything that can be done now. True when something may be ready."""
        self._receive()
        self._plan()
        self._dispatch()
        while self._plan():
            self._dispatch()
        self._release()
        return not self.ready.empty()

    def advance_until_ready(self) -> None:
        """For a trainer without a feeder thread: block until `ready` has something."""
        try:
            while not self.advance():
                self._wait_for_more()
        except GpufeedError as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Deliver `error` after what is ready; nothing follows it."""
        self.failed = True
        self.ready.put(Failed(error))

    def shut_down(self) -> None:
        """Wait for the units under way, free the slots, close the session and the descriptors."""
        try:
            self._drain()
        except GpufeedError:
            # A worker died. The others may be writing still: nobody may reuse a slot till they end.
            if self._pool is not None:
                self._pool.stop()
        finally:
            for record in self._open:
                if isinstance(record, BatchRecord) and record.slot is not None:
                    self._ring.give_back(record.slot)
            self._open.clear()
            self._epoll.close()
            self._local = None
            self._source.session.close()

    def dispose(self) -> None:
        """Close the eventfd; by the trainer's thread, when the feeder's has ended."""
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_WAIT_S
        self._stopping = True
        while self._pool is not None and self._pool.in_flight_count:
            left = deadline - time.monotonic()
            if left <= 0 or self._end_workers or self._pool.broken:
                # A unit that never ends: nobody may reuse its slot while its worker lives.
                self._pool.stop()
                return
            self._wait(left)

    def _wait_for_more(self) -> None:
        if self._stream.is_short:
            if not self._wait(SHORT_WAIT_S):
                raise CapacityError(
                    f"the session's {self._source.session.window_extents} extents are full before "
                    f"a segment of shuffle={self._source.order.shuffle!r} is whole: compressed "
                    "shards take what they expand to; mix fewer of them, or raise arena.size_bytes "
                    "and the dataset's window_bytes"
                )
            return
        self._wait(None)

    def _wait(self, timeout_s: float | None) -> bool:
        """Handle what comes; False: nothing did."""
        found = self._epoll.poll(timeout_s)
        for fd, events in found:
            if fd == self._wake:
                os.eventfd_read(fd)
            elif fd in self._workers:
                self._serve_worker(fd, events)
            elif self._stopping:
                self._epoll.unregister(fd)  # the session; its events are not wanted any more
        return bool(found)

    def _serve_worker(self, fd: int, events: int) -> None:
        assert self._pool is not None
        number = self._workers[fd]
        if events & select.EPOLLOUT:
            self._pool.flush(number)
        if events & ~select.EPOLLOUT:
            for unit, result in self._pool.receive(number):
                self._finish(unit, result)
        self._watch(fd)

    def _watch(self, fd: int) -> None:
        """Ask for EPOLLOUT exactly while the worker's channel is blocked."""
        assert self._pool is not None
        blocked = self._pool.blocked(self._workers[fd])
        mask = select.EPOLLIN | (select.EPOLLOUT if blocked else 0)
        if mask != self._masks[fd]:
            self._masks[fd] = mask
            self._epoll.modify(fd, mask)

    def _receive(self) -> None:
        for event in self._source.session.receive():
            if isinstance(event, ExtentEvent):
                self._stream.on_extent(event)
            elif isinstance(event, SamplesEvent):
                self._stream.on_samples(event)
            elif isinstance(event, ShardEndEvent):
                self._end_shard(event)
            elif isinstance(event, FailEvent):
                raise event.error

    def _end_shard(self, event: ShardEndEvent) -> None:
        self._stream.on_end(event)
        shard = self._plan_shards.pop(event.position)
        known = self._source.sample_counts[shard]
        if known is not None and known != event.sample_count:
            name = self._source.dataset.shards[shard].name
            raise ProtocolError(
                f"{name} had {known} samples when it was indexed and {event.sample_count} now; "
                "open the dataset again"
            )
        self._source.sample_counts[shard] = event.sample_count
        self.stats.shards_count += 1
        tiers = self.stats.bytes_by_tier
        for tier, size in event.bytes_by_tier.items():
            tiers[tier] = tiers.get(tier, 0) + size

    def _plan(self) -> bool:
        """Keep shards planned ahead, over the epoch's end where more epochs are known.

        True when the plan grew.
        """
        grew = False
        while self._parts is not None or self._next_epoch():
            room = PLAN_AHEAD_SHARDS - self._stream.planned_count
            if room <= 0:
                break
            self._extend(room)
            self._forecast.go_on()
            grew = True
        return grew

    def _next_epoch(self) -> bool:
        """Go on to planning another epoch; False when there is none yet."""
        if len(self._cutting) > EPOCHS_AHEAD_MAX:
            return False
        if self._orders:
            cursor = self._orders.popleft()
        elif self._config.continuous and self._planning >= 0:
            cursor = Cursor(self._planning + 1)
        else:
            return False
        self._planning = cursor.epoch
        self._forecast.begin(cursor.epoch, cursor.samples)
        self._parts = self._source.parts_of(cursor.epoch, cursor.samples)
        self._cutting.append(self._planning)
        return True

    def _extend(self, room: int) -> None:
        assert self._parts is not None
        parts = list(itertools.islice(self._parts, room))
        if parts:
            shards = [part.shard for part in parts]
            positions = self._source.session.extend_plan(self._source.dataset, shards)
            seed_of = self._source.seeds_of(self._planning)
            for number, part in zip(positions, parts, strict=True):
                self._plan_shards[number] = part.shard
                name = self._source.dataset.shards[part.shard].name
                self._stream.expect(number, part, name, seed_of)
        if len(parts) < room:
            self._stream.mark_epoch_end()
            self._parts = None

    def _dispatch(self) -> None:
        while not self._stopping:
            if self._stream.at_epoch_end:
                self._end_epoch()
                continue
            if not self._stream.available_count or not self._open_batch():
                break
            worker = self._choose_worker()
            if worker is None or not self._send_unit(worker):
                break
            if self._config.own_thread and not self.ready.empty():
                break
        self._flush_ready()

    def _open_batch(self) -> bool:
        """True when there is a batch with room for more rows."""
        if self._current is not None:
            return True
        waiting = self._begun_count - self._dropped_count - self.taken_count
        if waiting >= self._config.lookahead:
            return False
        first = not self._layout_known and not self._config.whole_batches
        if first and any(isinstance(one, BatchRecord) for one in self._open):
            return False  # its rows travel as pickles, so make no more of them than one batch
        slot = self._ring.take() if self._config.use_slots else None
        record = BatchRecord(self._begun_count, self._cutting[0], self._index, slot)
        if self._config.whole_batches and self._pool is not None:
            record.worker = self._pool.least_loaded()
        self._begun_count += 1
        self._index += 1
        self._open.append(record)
        self._current = record
        return True

    def _choose_worker(self) -> int | None:
        """Who gets the next unit; None when all have enough in hand."""
        if self._pool is None:
            return 0
        assert self._current is not None
        if self._current.worker is not None:
            # Its units must follow each other, so a worker may hold those of two whole batches.
            limit = 2 * len(self._pool) * FIRST_UNITS_PER_WORKER
            return self._current.worker if self._pool.load(self._current.worker) < limit else None
        worker = self._pool.least_loaded()
        return worker if self._pool.load(worker) < UNITS_PER_WORKER_MAX else None

    def _unit_rows(self, record: BatchRecord) -> int:
        workers = len(self._pool) if self._pool is not None else 1
        share = FIRST_UNITS_PER_WORKER if record.index == 0 else UNITS_PER_BATCH_AND_WORKER
        rows = -(-self._config.batch_rows // (workers * share))
        return min(max(rows, 1), UNIT_ROWS_MAX)

    def _send_unit(self, worker: int) -> bool:
        record = self._current
        assert record is not None
        want = min(self._unit_rows(record), self._config.batch_rows - record.rows)
        busy = self._pool is not None and self._pool.load(worker) > 0
        if busy and self._stream.available_count < want:
            return False  # more may come while it works; an idle worker takes what there is
        tasks, lease = self._stream.cut(want)
        if not tasks:
            return False
        record.closed = record.rows + len(tasks) == self._config.batch_rows
        if record.closed:
            self._current = None
        self._submit(record, worker, tasks, lease)
        return True

    def _submit(self, record: BatchRecord, worker: int, tasks: list[Task], lease: Lease) -> None:
        unit = Unit(record.number, record.rows, record.slot, tasks, record.closed)
        record.rows += len(tasks)
        record.units += 1
        self._leases[unit.batch, unit.row] = lease
        self.stats.units_count += 1
        if self._pool is not None:
            self._pool.submit(worker, unit)
            self._watch(self._pool.fileno(worker))
            return
        assert self._local is not None
        if self._config.own_thread:
            with borrowed_thread():
                result = self._local.run(unit)
        else:
            result = self._local.run(unit)
        self._finish(unit, result)

    def _end_epoch(self) -> None:
        self._stream.pass_epoch_end()
        record, self._current = self._current, None
        if record is not None:
            record.closed = True
            record.dropped = self._config.drop_last
            if self._config.whole_batches and record.rows and not record.dropped:
                self._submit(record, record.worker or 0, [], [])  # the rows are sent: collate them
        self._open.append(EpochEnd(self._cutting.popleft()))
        self._index = 0

    def _finish(self, unit: Unit, result: UnitResult) -> None:
        """A unit came back."""
        self._stream.give_back(self._leases.pop((unit.batch, unit.row)))
        record = self._record(unit.batch)
        record.add(result)
        if not self._layout_known:
            self._find_layout(result)
        self._flush_ready()

    def _record(self, number: int) -> BatchRecord:
        for record in self._open:
            if isinstance(record, BatchRecord) and record.number == number:
                return record
        raise WorkerError(f"a worker answered for batch {number}, which is not under way")

    def _find_layout(self, result: UnitResult) -> None:
        if result.samples:
            sample = next(iter(result.samples.values()))
        elif result.pickles or result.collated is not None:
            data = result.collated or next(iter(result.pickles.values()))
            sample = pickle.loads(data)  # noqa: S301 from our own worker
        else:
            return
        self._layout_known = True
        # A batch that the user's collate made in a worker is one row of its slot.
        layout = find_layout(sample, 1 if self._config.whole_batches else self._config.batch_rows)
        if layout is None or not self._ring.configure(layout, self._config.lookahead):
            return
        assert self._ring.shape is not None
        if self._pool is not None:
            self._pool.configure(self._ring.shape)
            for fd in self._workers:
                self._watch(fd)
        elif self._local is not None:
            self._local.configure(self._ring.fd, self._ring.shape)

    def _flush_ready(self) -> None:
        """Deliver from the front what is complete."""
        while self._open:
            record = self._open[0]
            if isinstance(record, BatchRecord):
                if not record.complete:
                    return
                if record.dropped or record.rows == 0:
                    self._drop(record)
                    continue
            self.ready.put(self._open.popleft())

    def _drop(self, record: BatchRecord) -> None:
        self._open.popleft()
        self._dropped_count += 1
        if record.slot is not None:
            self._ring.give_back(record.slot)

    def _release(self) -> None:
        self.stats.straddled_count += self._stream.straddled_count
        self._stream.straddled_count = 0
        seqs = self._stream.take_releasable()
        if seqs:
            self._source.session.release(seqs)
