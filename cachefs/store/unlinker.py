"""Deleting is not evicting: files that nobody may use any more are unlinked behind the loop's back.

A **removal** holds its bytes in the budget until its files are gone. One batch at a time runs in a
disk thread: first the heads in the index, durably, then the files. What a crash or a power loss
brings back is a file without a head: the next start adopts it as used least of all, so that it
displaces nothing that was kept. A removal that the disk refuses is **stuck**: its bytes stay
counted, and it is tried again with the next batch. The queue is bounded by the bytes of the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gpufeed.cachefs.errors import DiskLateError, StorageError
from gpufeed.cachefs.store.directory import CacheDirectory
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.store.threads import DiskThreads
from gpufeed.cachefs.tasks import finished

# Files unlinked in one go, so that waiting reservations are granted piece by piece.
BATCH_COUNT = 16
# A batch takes milliseconds. Whoever waits for its room goes past the store after this.
REMOVAL_LATE_S = 1.0


@dataclass(slots=True, eq=False)
class Removal:
    """Files to unlink. `indexed`: a committed shard's, with its head. `done` fails when stuck."""

    digest: str
    paths: tuple[str, ...]
    size_bytes: int
    indexed: bool
    done: asyncio.Future[None]


class Unlinker:
    """See the top of the file. Used on the loop's thread.

    `on_removed` is called with the bytes of each removal; `on_failed` once for each batch in which
    the disk refused something.
    """

    def __init__(
        self, directory: CacheDirectory, index: Index, threads: DiskThreads, *,
        on_removed: Callable[[int], None], on_failed: Callable[[StorageError], None],
    ) -> None:  # fmt: skip
        self._directory = directory
        self._index = index
        self._threads = threads
        self._on_removed = on_removed
        self._on_failed = on_failed
        self._queue: list[Removal] = []
        self._stuck: list[Removal] = []
        self._all: set[Removal] = set()
        self._pending: dict[str, list[Removal]] = {}  # those that hit a committed shard's name
        self._task: asyncio.Task[None] | None = None

    def remove(
        self, digest: str, paths: tuple[str, ...], size_bytes: int, *, indexed: bool,
        after: asyncio.Future[None] | None = None,
    ) -> asyncio.Future[None]:  # fmt: skip
        """Queue a removal, to begin when `after` is done. The returned future may stay unread."""
        done = asyncio.get_running_loop().create_future()
        removal = Removal(digest, paths, size_bytes, indexed, done)
        self._all.add(removal)
        if indexed:
            self._pending.setdefault(digest, []).append(removal)
        if after is None:
            self._enqueue(removal)
        else:
            after.add_done_callback(lambda _: self._enqueue(removal))
        return done

    async def gone(self, digest: str) -> None:
        """Wait until nothing queued can hit the file and the record of this digest.

        Raises:
            StorageError: an old file cannot be removed.
        """
        while removals := self._pending.get(digest):
            await asyncio.shield(removals[0].done)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued, under way or stuck."""
        return not self._all

    def retry(self) -> None:
        """Try stuck removals again."""
        if self._stuck:
            self._start()

    async def drain(self) -> None:
        """Wait until everything queued was tried."""
        while self._task is not None or self._waiting():
            waiting = {r.done for r in self._waiting()}
            await asyncio.wait(waiting | ({self._task} if self._task is not None else set()))

    def _waiting(self) -> list[Removal]:
        return [removal for removal in self._all if not removal.done.done()]

    def _enqueue(self, removal: Removal) -> None:
        self._queue.append(removal)
        self._start()

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.ensure_future(self._work())

    async def _work(self) -> None:
        self._queue[:0], self._stuck = self._stuck, []
        try:
            while self._queue:
                batch, self._queue = self._queue[:BATCH_COUNT], self._queue[BATCH_COUNT:]
                failures = await self._removed(batch)
                for removal in batch:
                    self._settle(removal, failures.get(id(removal)))
                if failures:
                    self._on_failed(next(iter(failures.values())))
        finally:
            self._task = None

    async def _removed(self, batch: list[Removal]) -> dict[int, StorageError]:
        """`_remove_batch`, to its end; that it is late is told at once."""
        try:
            return await self._threads.run_in_time(REMOVAL_LATE_S, self._remove_batch, batch)
        except DiskLateError as late:
            if late.over.cancelled():  # it never began
                return {id(removal): late for removal in batch}
            self._on_failed(late)
            return await finished(late.over)

    def _remove_batch(self, batch: list[Removal]) -> dict[int, StorageError]:
        """In a disk thread; returns the failures by identity of their removal."""
        failures: dict[int, StorageError] = {}
        try:
            self._directory.verify()
        except StorageError as error:
            return {id(removal): error for removal in batch}
        indexed = [removal for removal in batch if removal.indexed]
        if indexed:
            try:
                self._index.delete(removal.digest for removal in indexed)
            except StorageError as error:
                failures.update((id(removal), error) for removal in indexed)
        for removal in batch:
            if id(removal) in failures:
                continue
            try:
                for path in removal.paths:
                    self._directory.remove(path)
            except StorageError as error:
                failures[id(removal)] = error
        return failures

    def _settle(self, removal: Removal, error: StorageError | None) -> None:
        if error is not None:
            self._stuck.append(removal)
            if not removal.done.done():
                removal.done.set_exception(error)
                # Seen: waiting for a removal is optional.
                removal.done.exception()
            return
        self._all.remove(removal)
        if removal.indexed:
            pending = self._pending[removal.digest]
            pending.remove(removal)
            if not pending:
                del self._pending[removal.digest]
        if not removal.done.done():
            removal.done.set_result(None)
        self._on_removed(removal.size_bytes)
