"""What an engine must end: feeder, thread, session, workers, ring.

Held apart from the engine, so that an engine which is dropped without a close can be collected and
ended by its finalizer. Nothing here refers to the engine. A forked child's copy does nothing.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from gpufeed.loaders.batch import BatchRecord
from gpufeed.loaders.batchslots import SlotRing
from gpufeed.loaders.feed import FeedSource
from gpufeed.loaders.feeder import Feeder
from gpufeed.loaders.pool import WorkerPool

JOIN_WAIT_S = 15.0  # over the feeder's own wait for units under way


@dataclass(slots=True)
class Resources:
    """See the top of the file. Used by the trainer's thread."""

    pid: int
    ring: SlotRing
    ring_rows: int = 0
    pool: WorkerPool | None = None
    arena_id: tuple[int, int] = (0, 0)
    feeder: Feeder | None = None
    thread: threading.Thread | None = None
    source: FeedSource | None = None

    def end_stream(self, *, end_workers: bool = False) -> None:
        """Stop the feeder, return its slots, close the session."""
        if os.getpid() != self.pid:
            return
        feeder, self.feeder = self.feeder, None
        thread, self.thread = self.thread, None
        source, self.source = self.source, None
        if feeder is None:
            if source is not None:
                source.session.close()
            return
        if thread is None:
            feeder.shut_down()
        else:
            feeder.stop(end_workers=end_workers)
            thread.join(JOIN_WAIT_S)
        feeder.dispose()
        while not feeder.ready.empty():
            record = feeder.ready.get()
            if isinstance(record, BatchRecord) and record.slot is not None:
                self.ring.give_back(record.slot)

    def end(self) -> None:
        """End everything."""
        if os.getpid() != self.pid:
            return
        if self.thread is threading.current_thread():
            # Collected by the feeder's own thread, which cannot wait for itself.
            threading.Thread(target=self.end, name="gpufeed-end", daemon=True).start()
            return
        self.end_stream(end_workers=True)
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.stop()
        self.ring.close()
