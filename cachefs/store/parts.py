"""What a store has only if it has a directory: lock, index, threads, writer, reader, unlinker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.config import StoreConfig
from gpufeed.cachefs.errors import DiskLateError, GpufeedError, StorageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.store.descriptors import Descriptors
from gpufeed.cachefs.store.directory import CacheDirectory
from gpufeed.cachefs.store.files import Files, Space
from gpufeed.cachefs.store.health import DiskHealth
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.store.pace import WritePace
from gpufeed.cachefs.store.reader import ExtentReader, ReadEvents
from gpufeed.cachefs.store.reservation import DiskRoom
from gpufeed.cachefs.store.threads import DiskThreads
from gpufeed.cachefs.store.unlinker import Unlinker
from gpufeed.cachefs.store.writecap import WriteCap
from gpufeed.cachefs.store.writer import ShardWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What the parts tell the store, on the loop."""

    on_removed: Callable[[int], None]
    on_unlink_failed: Callable[[StorageError], None]
    on_write_late: Callable[[DiskLateError], None]
    reading: ReadEvents


class DiskParts:
    """Opened and locked; `close` when no call is under way."""

    def __init__(
        self, config: StoreConfig, files: Files, clock: Clock, metrics: Metrics, events: Events
    ) -> None:
        self.files = files
        self.room = DiskRoom(config.free_floor_ratio)
        self.measuring: asyncio.Future[Space] | None = None
        self.pace = WritePace(
            WriteCap(config.write_bytes_per_s_max),
            config.writes_in_flight_max or config.io_threads,
            clock,
        )
        self.read_health = DiskHealth(config.probe_after_s)
        self.directory = CacheDirectory(config.path, files)
        self.directory.open()
        try:
            self.index = Index(self.directory.index_path)
        except GpufeedError:
            self.directory.close()
            raise
        self.threads = DiskThreads(config.io_threads, clock)
        self.unlinker = Unlinker(
            self.directory, self.index, self.threads,
            on_removed=events.on_removed, on_failed=events.on_unlink_failed,
        )  # fmt: skip
        self.writer = ShardWriter(
            self.directory, files, self.index, self.threads, self.unlinker,
            room=self.room, on_late=events.on_write_late,
        )  # fmt: skip
        self.reader = ExtentReader(
            self.directory, files, self.threads,
            metrics=metrics, clock=clock, health=self.read_health, events=events.reading,
        )  # fmt: skip

    @property
    def descriptors(self) -> Descriptors:
        """The reader's."""
        return self.reader.descriptors

    def measure(self) -> None:
        """Ask for the free space, in a thread; one question at a time."""
        if self.measuring is None:
            self.measuring = self.threads.submit(self.files.space, self.directory.path)
            self.measuring.add_done_callback(self._measured)

    def _measured(self, future: asyncio.Future[Space]) -> None:
        self.measuring = None
        if not future.cancelled() and future.exception() is None:
            self.room.measured(future.result())

    def leave(self, uses: Mapping[str, int], *, is_clean: bool) -> None:
        """The last writes: uses, and, if all is well, that index and files agree. Blocking.

        Raises:
            StorageError: the disk refused; the next start compares index and files.
        """
        self.directory.verify()
        self.index.put_uses(uses)
        if is_clean:
            self.directory.sync()
            self.index.mark_clean()

    def close(self) -> None:
        """Close the index, let the directory go."""
        self.index.close()
        self.directory.close()
