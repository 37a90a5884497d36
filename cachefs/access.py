"""Which cached shards a tenant may have: those that its own credentials were seen to read.

The store is shared by all tenants of a daemon, so that a shard is in it says nothing about who may
read it. A **proof** is an answer of the origin to the tenant's own credentials: a HEAD of each of
the shard's objects, of the same version (OSS asks the right to read for it; a listing asks less),
or a fill of its own that was verified. It is good for `PROOF_S`, and longer only while the origin
does not answer (`OUTAGE_PROOF_S`): an outage must not stop whoever was let in before it.

A tenant is one domain of trust: a proof by one of its sessions, with whatever storage options, is
good for all of them. A daemon without tenants has no such thing, and sends no request for it.

Bounded: `PROOFS_MAX` proofs, the oldest go first; `HEADS_IN_FLIGHT` requests under way. Sessions
that need the same proof share it. Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from typing import Protocol

from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.errors import (
    AccessDeniedError,
    GpufeedError,
    OriginUnavailableError,
    ShardChangedError,
    again,
)
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.sources import ShardSource

_LOG = logging.getLogger("gpufeed.access")

PROOF_S = 15 * 60.0
OUTAGE_PROOF_S = 6 * 3600.0
PROOFS_MAX = 1 << 17
HEADS_IN_FLIGHT = 32
# Proofs sought before somebody needs them, at a time.
AHEAD_MAX = 16


class Headed(Protocol):
    """What a proof needs of the origin engine."""

    async def head(self, url: str, options: dict[str, str] | None = None) -> ObjectInfo:
        """See `gpufeed.cachefs.origin.engine.OriginEngine`."""
        ...


class Access:
    """One tenant's proofs. See the top of the file."""

    def __init__(self, engine: Headed, clock: Clock, metrics: Metrics) -> None:
        self._engine = engine
        self._clock = clock
        self._metrics = metrics
        self._proven_at_s: collections.OrderedDict[str, float] = collections.OrderedDict()
        self._seeking: dict[str, asyncio.Task[None]] = {}
        self._heads = asyncio.Semaphore(HEADS_IN_FLIGHT)

    def is_proven(self, digest: str) -> bool:
        """Whether the tenant may have this shard from the cache now."""
        return self._age_s(digest) < PROOF_S

    def _age_s(self, digest: str) -> float:
        proven_at_s = self._proven_at_s.get(digest)
        return float("inf") if proven_at_s is None else self._clock.monotonic_s() - proven_at_s

    def note(self, digest: str) -> None:
        """The tenant's own credentials have just read the shard, or looked up all of it."""
        self._proven_at_s[digest] = self._clock.monotonic_s()
        self._proven_at_s.move_to_end(digest)
        if len(self._proven_at_s) > PROOFS_MAX:
            self._proven_at_s.popitem(last=False)

    def ahead(self, source: ShardSource) -> None:
        """Seek a proof that will be needed soon. What comes of it is told when it is needed."""
        digest = source.spec.digest
        if len(self._seeking) < AHEAD_MAX and not self.is_proven(digest):
            self._seek(source)

    async def prove(self, source: ShardSource) -> None:
        """See that the tenant may read the shard.

        Raises:
            AccessDeniedError: its own credentials may not.
            ShardChangedError: what it may read is another version.
            GpufeedError: the origin cannot say.
        """
        digest = source.spec.digest
        if self.is_proven(digest):
            return
        task = self._seeking.get(digest) or self._seek(source)
        try:
            await asyncio.shield(task)
        except GpufeedError as error:
            raise again(error) from None

    def _seek(self, source: ShardSource) -> asyncio.Task[None]:
        digest = source.spec.digest
        task = asyncio.get_running_loop().create_task(self._look(source))
        self._seeking[digest] = task

        def over(_: asyncio.Task[None]) -> None:
            del self._seeking[digest]
            if not task.cancelled():
                task.exception()  # who needs it asks again, and is told

        task.add_done_callback(over)
        return task

    async def _look(self, source: ShardSource) -> None:
        spec = source.spec
        try:
            async with asyncio.TaskGroup() as group:
                for part in spec.sources:
                    group.create_task(self._head(part.info, source))
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            if isinstance(error, OriginUnavailableError) and (
                self._age_s(spec.digest) < OUTAGE_PROOF_S
            ):
                _LOG.warning("%s: access cannot be seen again for now: %s", spec.name, error)
                return
            if isinstance(error, AccessDeniedError):
                self._metrics.add("access_refused_total")
                raise AccessDeniedError(
                    f"{spec.name} is cached, but this tenant's own credentials may not read it, so "
                    f"it is not served: {error}"
                ) from None
            raise error from None
        self.note(spec.digest)

    async def _head(self, known: ObjectInfo, source: ShardSource) -> None:
        async with self._heads:
            self._metrics.add("access_checks_total")
            found = await self._engine.head(known.url, dict(source.options))
        if (found.etag, found.size_bytes) != (known.etag, known.size_bytes):
            raise ShardChangedError(
                f"{known.url} was overwritten: the dataset was opened with version {known.etag}, "
                f"now it is {found.etag}; open it again"
            )

    async def close(self) -> None:
        """Give up what is being sought."""
        tasks = list(self._seeking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
