"""An origin around another that fails on demand: the n-th call of a kind, before or after its work.

For tests of what stands above an origin. Faults of the wire are the OSS stand-in's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpufeed.cachefs.errors import GpufeedError, OriginUnavailableError
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.origin.base import OnTarget, Origin

Kind = Literal["head", "list", "read_into"]


@dataclass(frozen=True, slots=True)
class OriginFault:
    """Which call fails, and how.

    Attributes:
        kind: of the call.
        at: the how manieth call of that kind fails, from 1.
        after_targets: a read first delivers so many of its targets.
        error: what is raised.
    """

    kind: Kind
    at: int
    after_targets: int = 0
    error: GpufeedError = field(
        default_factory=lambda: OriginUnavailableError("a fault that the test asked for")
    )


class FaultyOrigin:
    """Satisfies `Origin`. `calls` counts, failed ones included."""

    def __init__(self, inner: Origin, faults: Sequence[OriginFault] = ()) -> None:
        self._inner = inner
        self._faults = {(fault.kind, fault.at): fault for fault in faults}
        self.calls: Counter[Kind] = Counter()

    def _count(self, kind: Kind) -> OriginFault | None:
        self.calls[kind] += 1
        return self._faults.get((kind, self.calls[kind]))

    async def head(self, url: str) -> ObjectInfo:
        """See `Origin`."""
        if fault := self._count("head"):
            raise fault.error
        return await self._inner.head(url)

    async def list(self, prefix_url: str) -> AsyncIterator[ObjectInfo]:
        """See `Origin`; a listing fails after its first object."""
        fault = self._count("list")
        async for info in self._inner.list(prefix_url):
            yield info
            if fault:
                break
        if fault:
            raise fault.error

    async def list_folder(self, folder_url: str) -> AsyncIterator[ObjectInfo]:
        """See `Origin`; counts as a listing."""
        if fault := self._count("list"):
            raise fault.error
        async for info in self._inner.list_folder(folder_url):
            yield info

    async def read_into(
        self,
        info: ObjectInfo,
        begin_bytes: int,
        targets: Sequence[memoryview],
        on_target: OnTarget,
        *,
        demand: bool = True,
    ) -> int | None:
        """See `Origin`."""
        fault = self._count("read_into")
        if fault is None:
            return await self._inner.read_into(info, begin_bytes, targets, on_target, demand=demand)
        delivered = targets[: fault.after_targets]
        if delivered:
            await self._inner.read_into(info, begin_bytes, delivered, on_target, demand=demand)
        raise fault.error

    async def close(self) -> None:
        """See `Origin`."""
        await self._inner.close()
