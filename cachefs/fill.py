"""One fill: fetch a shard into arena slots, verify it, commit it to the store; or leave nothing.

However many readers ask, there is one `Fill` a shard at a time (`cachefs.fills` sees to that), run
as a task of its own, so that its first reader's death does not end it. Its parts: `receiver`, or
`unpacker` for a compressed shard, brings the bytes, as `pace` allows; `fillextents` hands them on,
`indexing` finds the samples, `keeper` writes.

Invariants:
    - nothing is committed unless every byte arrived and the checksums that the origin tells agree;
    - a disk that fails mid-way turns a cached fill into a streamed one (**bypass**); readers do not
      notice;
    - whatever ends it, waiters get an error, and slots and the store's room go back.

Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
import logging

from gpufeed.cachefs.errors import GpufeedError, OriginUnavailableError
from gpufeed.cachefs.fillextents import FillExtents
from gpufeed.cachefs.filltools import Engine, FillTools
from gpufeed.cachefs.indexing import Indexing
from gpufeed.cachefs.keeper import Keeper
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.pace import Pace
from gpufeed.cachefs.receiver import Receiver
from gpufeed.cachefs.sampleindex import SampleIndex
from gpufeed.cachefs.sources import ShardSource
from gpufeed.cachefs.store.store import Reservation
from gpufeed.cachefs.tasks import finished
from gpufeed.cachefs.unpacker import Unpacker

__all__ = ["Engine", "Fill", "FillTools"]

_LOG = logging.getLogger("gpufeed.fill")


class Fill:
    """One shard's fill. `run` is its task; the rest is for readers.

    Attributes:
        verified: done when the shard was found right as a whole, or is not to be had.
        given_up: it was cancelled because its last reader left.
    """

    def __init__(
        self, source: ShardSource, tools: FillTools, reservation: Reservation | None
    ) -> None:
        spec = source.spec
        self._tools = tools
        self._keeper = Keeper(tools.store, tools.metrics, reservation)
        self._indexing = Indexing(source.make_indexer(spec))
        self._extents = FillExtents(
            spec, tools, indexing=self._indexing, keeper=self._keeper, on_broken=self._refuse
        )
        self._pace = Pace(is_cached=lambda: self._keeper.is_cached, keeps_together=bool(spec.codec))
        self._receiver: Receiver | Unpacker
        if spec.codec:
            self._receiver = Unpacker(source, tools, self._extents, self._pace, keeper=self._keeper)
        else:
            self._receiver = Receiver(source, tools, self._extents, self._pace)
        self.given_up = False
        self.verified: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A fill that only prefetches has nobody who looks at its error.
        self.verified.add_done_callback(lambda f: None if f.cancelled() else f.exception())

    # --- for readers --------------------------------------------------------------------------

    @property
    def spec(self) -> ShardSpec:
        """The shard, with its length once that is known."""
        return self._extents.spec

    @property
    def is_cached(self) -> bool:
        """Whether the shard is on its way into the store (not bypassing it)."""
        return self._keeper.is_cached

    async def decided(self) -> None:
        """Wait until the shard is in the store, will not be, or is late."""
        await self._keeper.decided()

    @property
    def has_failed(self) -> bool:
        """It is about to end with nothing; who comes now needs another fill."""
        return self.verified.done() and self.verified.exception() is not None

    def has_passed(self, extent: int) -> bool:
        """The extent was received before; it may be gone from the arena by now."""
        return self._extents.has_passed(extent)

    def has_opened(self, extent: int) -> bool:
        """The extent is on its way: it comes whatever becomes of the rest."""
        return self._extents.has_opened(extent)

    def wait(self, extent: int) -> asyncio.Future[int]:
        """A slot number, held for the caller, when the extent arrives."""
        return self._extents.wait(extent)

    async def take(self, extent: int) -> int:
        """The slot of an extent when it arrives, held for the caller; let go if it is cancelled."""
        waiting = self.wait(extent)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._tools.pool.drop(waiting.result())
            raise

    def enter(self, reader: object) -> None:
        """Somebody waits for the shard from now on."""
        self._receiver.demand()
        self._pace.enter(reader)

    def advance(self, reader: object, extent: int) -> None:
        """A reader that has entered wants `extent` next."""
        self._pace.advance(reader, extent)

    def leave(self, reader: object) -> int:
        """A reader that has entered goes; returns how many are left."""
        self._pace.leave(reader)
        return self._pace.readers_count

    def serves(self, extent: int) -> bool:
        """Whether a reader that wants `extent` next can still get everything by way of this fill.

        What has passed comes from the store, or as a range, but of a compressed shard that
        bypasses the store there is neither.
        """
        return self.is_cached or not self.spec.codec or not self.has_passed(extent)

    @property
    def chunks(self) -> list[tuple[int, SampleIndex]]:
        """``(extent, samples)``: samples whose bytes all lie in extents up to `extent`."""
        return self._indexing.chunks

    @property
    def sample_index(self) -> SampleIndex:
        """All samples found so far."""
        return self._indexing.sample_index

    # --- the task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Do it all. Never raises: the outcome is in `verified` and in the waiters."""
        metrics = self._tools.metrics
        metrics.add("fills_in_flight", 1)
        try:
            await self._receiver.run()
            await self._extents.summed()
            if self.verified.done():
                self.verified.result()
            await self._receiver.verify()
            self.verified.set_result(None)
            metrics.add("fills_total")
            # Readers have what they need: from here on only the disk is waited for.
            await self._extents.drain()
            self._receiver.close()
            await self._keeper.commit(self.spec, self._extents.all_crcs(), self._indexing.encoded())
        except GpufeedError as error:
            await self._fail_whole(error)
        except asyncio.CancelledError:
            given_up = OriginUnavailableError(f"the fill of {self.spec.name} was given up")
            await self._fail_whole(given_up)
            raise
        except Exception:
            # The top of a task: whatever it is, readers must not wait for ever.
            _LOG.exception("the fill of %s met an internal error", self.spec.name)
            broken = GpufeedError(f"{self.spec.name}: internal error; the daemon's log has it")
            await self._fail_whole(broken)
        finally:
            metrics.add("fills_in_flight", -1)

    def _refuse(self, error: GpufeedError) -> None:
        """The format is broken: readers learn it now, and nothing is committed."""
        if not self.verified.done():
            self.verified.set_exception(error)

    async def _fail_whole(self, error: GpufeedError) -> None:
        """`_fail`, not to be cut short."""
        await finished(asyncio.get_running_loop().create_task(self._fail(error)))

    async def _fail(self, error: GpufeedError) -> None:
        """Tell everybody, keep nothing."""
        if not self.verified.done():
            self.verified.set_exception(error)
        if self.has_failed:
            if not self.given_up:
                _LOG.warning("a fill failed: %s", error)
            # Else its readers have all of it, and only the disk was left to wait for.
            self._tools.metrics.add("fills_failed_total")
        self._extents.fail(error)
        # At once: the next fill of the same shard may begin before this one has ended. Given up,
        # that was done already, and the next one may be under way.
        if not self.given_up:
            self._tools.pool.forget(self.spec.digest)
        await self._extents.drain()
        self._extents.drop_all()
        self._receiver.close()
        await self._keeper.abort()
