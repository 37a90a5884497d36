"""Another tenant's fill, as a reader of this tenant sees it: its extents are copied, never shared.

One shard is fetched once a node, also where two tenants want it at once; but neither may map the
other's arena. So whoever comes second copies each extent into a slot of its own when it arrives,
or while the lender's arena still has it. What has gone there is read from the store, or, where that
does not have it, as a range with the reader's own credentials.

The lender never waits. Its slot is held from the moment that an extent is there until this loop has
copied it, and no longer; and a compressed stream that bypasses the store, which goes at the pace of
its slowest reader, is not lent.

A fill that fails at the lender's end (its credentials, its client) is not the borrower's failure:
it looks for another, or fills by itself. What it copied until then was checked as the answers of
ranges are. A fill whose bytes were found wrong fails for the borrower too.

Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.errors import IntegrityError
from gpufeed.cachefs.fill import Fill
from gpufeed.cachefs.loads import LentElsewhereError, Loads
from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.sampleindex import SampleIndex
from gpufeed.cachefs.sources import ShardSource


class BorrowedFill:
    """What `ShardReader` needs of a `Fill`. See the top of the file.

    Args:
        source: the shard as the borrower asks for it.
        fill: the lender's.
        let_go: takes back what `enter` gave: the fill and the reader.
        pool: the lender's slots.
        loads: the borrower's.
    """

    def __init__(
        self,
        source: ShardSource,
        fill: Fill,
        let_go: Callable[[Fill, object], None],
        pool: SlotPool,
        loads: Loads,
    ) -> None:
        self._source = source
        self._fill = fill
        self._let_go = let_go
        self._pool = pool
        self._loads = loads
        self._has_entered = False

    @property
    def spec(self) -> ShardSpec:
        """The shard, with its length once that is known."""
        return self._fill.spec

    @property
    def verified(self) -> asyncio.Future[None]:
        """Done when the shard was found right as a whole, or will not come this way."""
        return self._fill.verified

    @property
    def is_cached(self) -> bool:
        """Whether the shard is on its way into the store."""
        return self._fill.is_cached

    @property
    def has_failed(self) -> bool:
        """Its bytes were found wrong."""
        return self._fill.has_failed and isinstance(self._fill.verified.exception(), IntegrityError)

    @property
    def is_lost(self) -> bool:
        """It ended for reasons of the lender's own."""
        return self._fill.has_failed and not self.has_failed

    @property
    def chunks(self) -> list[tuple[int, SampleIndex]]:
        """See `Fill`."""
        return self._fill.chunks

    @property
    def sample_index(self) -> SampleIndex:
        """See `Fill`."""
        return self._fill.sample_index

    async def decided(self) -> None:
        """See `Fill`."""
        await self._fill.decided()

    def has_passed(self, extent: int) -> bool:
        """The extent came before, and the lender's arena does not have it any more."""
        if not self._fill.has_passed(extent):
            return False
        return self._pool.table.find(self.spec.digest, extent) is None

    def serves(self, extent: int) -> bool:
        """See `Fill`."""
        return not self.is_lost and lends(self._fill)

    async def take(self, extent: int) -> int | None:
        """The slot of a copy of the extent, held for the caller; None: it has to look elsewhere."""
        try:
            return await self._loads.load_lent(self._source, extent, self._fill, self._pool)
        except LentElsewhereError:
            return None

    def enter(self, reader: object) -> None:
        """Somebody waits for the shard from now on."""
        # Readers of a compressed shard are waited for, should it lose its place in the store.
        if not self.spec.codec:
            self._has_entered = True
            self._fill.enter(reader)

    def advance(self, reader: object, extent: int) -> None:
        """A reader that has entered wants `extent` next."""
        if self._has_entered:
            self._fill.advance(reader, extent)

    def leave(self, reader: object) -> None:
        """A reader that has entered goes."""
        if self._has_entered:
            self._has_entered = False
            self._let_go(self._fill, reader)


def lends(fill: Fill) -> bool:
    """Whether another tenant may borrow it."""
    return fill.is_cached or not fill.spec.codec
