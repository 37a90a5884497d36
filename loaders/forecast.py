"""Tells the daemon the order of this epoch and of the next: its cache keeps the right shards then.

The forecast is a hint, apart from the plan that is published: nothing waits for it, and nothing
breaks where training breaks off and goes another way. Before the first shards of an epoch are
planned only a first piece is told, so that the first batch does not wait for a long order to be
worked out; `go_on` tells the rest. An epoch that follows on the one before costs one message a
`PLAN_IDS_PER_MESSAGE_MAX` shards.

Used by the feeder's thread.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

from gpufeed.cachefs import wire
from gpufeed.loaders.feed import FeedSource

FIRST_SHARDS = wire.PLAN_IDS_PER_MESSAGE_MAX


class Forecaster:
    """See the top of the file."""

    def __init__(self, source: FeedSource) -> None:
        self._source = source
        self._job = _job_of(source)
        self._planned = -1
        self._told = -1
        self._rest: Iterator[int] | None = None

    def begin(self, epoch: int, start: int = 0) -> None:
        """The shards of `epoch` are about to be planned, from position `start` on."""
        follows = epoch == self._planned + 1 and epoch == self._told and not start
        self._planned = epoch
        self._told = epoch + 1
        following = self._shards(epoch + 1)
        if follows:
            self._rest = following
            return
        self._rest = itertools.chain(self._shards(epoch, start), following)
        self._tell(list(itertools.islice(self._rest, FIRST_SHARDS)), anew=True)

    def go_on(self) -> None:
        """Tell what is left to tell."""
        rest, self._rest = self._rest, None
        if rest is not None:
            self._tell(list(rest), anew=False)

    def _shards(self, epoch: int, start: int = 0) -> Iterator[int]:
        return (part.shard for part in self._source.parts_of(epoch, start))

    def _tell(self, shards: list[int], *, anew: bool) -> None:
        if shards or anew:
            source = self._source
            source.session.forecast(source.dataset, shards, job=self._job, anew=anew)


def _job_of(source: FeedSource) -> str:
    """The same on all ranks of a job that read this dataset in this order, and only there."""
    order, world = source.order, source.world
    text = f"{world.job}\0{source.dataset.manifest_hash}\0{order.seed}\0{world.world_size}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
