"""Memory for hedges: page-aligned, counted, bounded; taken when a hedge begins, gone when it ends.

Hedges are rare, so nothing is kept between them: the pages go back to the system.

Threads: any.
"""

from __future__ import annotations

import mmap
import threading

from gpufeed.cachefs.metrics import Metrics


class Spares:
    """See the top of the file.

    Args:
        limit_bytes: of all spare memory at a time.
        metrics: for the gauge.
    """

    def __init__(self, limit_bytes: int, metrics: Metrics) -> None:
        self._limit_bytes = limit_bytes
        self._metrics = metrics
        self._lock = threading.Lock()
        self._taken_bytes = 0

    def take(self, size_bytes: int) -> memoryview | None:
        """So much memory, or None beyond the limit, or where there is none. `give` it back."""
        with self._lock:
            if self._taken_bytes + size_bytes > self._limit_bytes:
                return None
            self._taken_bytes += size_bytes
        self._metrics.add("hedge_spare_bytes", size_bytes)
        try:
            return memoryview(mmap.mmap(-1, size_bytes))[:size_bytes]
        except OSError:  # no address space or no memory: then no hedge
            self._returned(size_bytes)
            return None

    def give(self, view: memoryview) -> None:
        """Nothing writes into `view` any more, and nobody will look at it."""
        size_bytes = len(view)
        view.release()  # with the last view of it, the map goes
        self._returned(size_bytes)

    def _returned(self, size_bytes: int) -> None:
        with self._lock:
            self._taken_bytes -= size_bytes
        self._metrics.add("hedge_spare_bytes", -size_bytes)
