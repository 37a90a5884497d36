"""One fill's side towards the store: write extents, then commit or abort, each at most once.

A disk that refuses mid-way turns the fill into a streamed one (**bypass**): the readers' bytes are
fine and they do not notice. Whether the shard is kept is **decided** as soon as that is known: a
disk that hangs may need long to commit or to abort, and no reader waits for that longer than
`DECIDE_S_MAX`. Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gpufeed.cachefs.errors import StorageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.store.store import Reservation, ShardStore
from gpufeed.cachefs.tasks import finished

# A commit is a little writing and two syncs. What it writes is in the arena no longer, but the
# origin has it.
DECIDE_S_MAX = 1.0


class Keeper:
    """See the top of the file. Without a reservation it keeps nothing.

    Attributes:
        is_cached: the shard is on its way into the store.
    """

    def __init__(
        self, store: ShardStore, metrics: Metrics, reservation: Reservation | None
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._reservation = reservation
        self.is_cached = reservation is not None
        self._decided = asyncio.Event()

    async def decided(self) -> None:
        """Wait until the shard is in the store, will not be, or is late."""
        await self._decided.wait()

    @property
    def sums_at_once(self) -> bool:
        """Whether a write would tell the checksum at once; it may have to wait for the disk."""
        return self.is_cached and self._store.writes_at_once

    async def write(
        self, extent: int, view: memoryview, length_bytes: int,
        on_sum: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        """Write one extent from its slot, unless the shard is only streamed.

        `on_sum` may be told its checksum on the way; see `ShardStore.write_extent`.
        """
        if not self.is_cached or self._reservation is None:
            return
        try:
            await self._store.write_extent(self._reservation, extent, view, length_bytes, on_sum)
        except StorageError:
            self._stream_on()

    def grow(self, size_bytes: int) -> None:
        """A shard of unknown length has come so far: make room, or stream it without caching."""
        reservation = self._reservation
        if reservation is not None and not self._store.grow(reservation, size_bytes):
            self._stream_on()

    def _stream_on(self) -> None:
        if self.is_cached:
            self.is_cached = False
            self._metrics.add("bypass_total")
            self._decided.set()

    async def commit(
        self, spec: ShardSpec, crcs: Sequence[int], sample_index: bytes | None
    ) -> None:
        """Make the shard visible in the store, or leave nothing there. Not to be cut short.

        `spec` is the reservation's, with its length.
        """
        if self._reservation is not None:
            self._reservation.spec = spec
        late = asyncio.get_running_loop().call_later(DECIDE_S_MAX, self._decided.set)
        try:
            await self._end(crcs, sample_index)
        finally:
            late.cancel()
            self._decided.set()

    async def abort(self) -> None:
        """Leave nothing in the store. Not to be cut short."""
        self._decided.set()
        await self._end(None, None)

    async def _end(self, crcs: Sequence[int] | None, sample_index: bytes | None) -> None:
        reservation, self._reservation = self._reservation, None
        if reservation is None:
            return
        if crcs is None or not self.is_cached:
            ending = self._store.abort(reservation)
        else:
            ending = self._commit(reservation, crcs, sample_index)
        await finished(asyncio.get_running_loop().create_task(ending))

    async def _commit(
        self, reservation: Reservation, crcs: Sequence[int], sample_index: bytes | None
    ) -> None:
        try:
            await self._store.commit(reservation, crcs, sample_index)
        except StorageError:
            self._stream_on()
