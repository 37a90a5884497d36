"""The origin engine: threads with event loops of their own, in which all origins live.

Downloading flat out must not delay the loop that serves sessions, so it has its own loops, and as
many threads as the network needs (``origin.threads``). A call comes from any running loop, goes to
the thread that has least to do (of equals the first, where connections are warm), crosses over
(`gpufeed.cachefs.origin.crossing`) and ends only when nothing can write into its targets any more,
also when its caller is cancelled.

`start` and `close` are called once, in this order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import OriginUnavailableError, UsageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.origin.account import AccountBook
from gpufeed.cachefs.origin.base import OnTarget
from gpufeed.cachefs.origin.cpus import thread_count, usable_cpus
from gpufeed.cachefs.origin.credentials.chain import CredentialBook
from gpufeed.cachefs.origin.crossing import Crossing
from gpufeed.cachefs.origin.spare import Spares
from gpufeed.cachefs.origin.thread import EngineThread, MakeOrigin, Shared
from gpufeed.cachefs.units import KIB

OBJECTS_LISTED_MAX = 1_000_000
# What a call counts beside its bytes when the least busy thread is sought.
CALL_LOAD_BYTES = 256 * KIB

Infos = list[ObjectInfo]
_Result = TypeVar("_Result")


class OriginEngine:
    """See the top of the file.

    Args:
        config: defaults for every origin; `options` of a call override endpoint and credentials.
        metrics: where requests and bytes are counted.
        origins: makers of further or other origins by scheme; called once on each engine thread.

    Attributes:
        threads_count: how many engine threads there are.
    """

    def __init__(
        self,
        config: OriginConfig,
        metrics: Metrics,
        *,
        origins: Mapping[str, MakeOrigin] | None = None,
    ) -> None:
        count = thread_count(config.threads, config.connections_max, usable_cpus())
        self.threads_count = count
        self._accounts = AccountBook(metrics, count)
        self._shared = Shared(
            config, metrics, count, self._accounts, CredentialBook(os.environ, metrics),
            Spares(config.hedge_spare_bytes, metrics), dict(origins or {}),
        )  # fmt: skip
        # Guards the threads' loads: callers may be on several loops.
        self._lock = threading.Lock()
        self._threads: list[EngineThread] = []

    def start(self) -> None:
        """Start the threads."""
        assert not self._threads, "an engine is started once"
        self._threads = [EngineThread(i, self._shared) for i in range(self.threads_count)]
        for thread in self._threads:
            thread.start()

    async def close(self) -> None:
        """Give up the calls under way, close every origin and end the threads."""
        threads, self._threads = self._threads, []
        for thread in threads:
            await thread.close()
        self._accounts.close()

    # --- calls --------------------------------------------------------------------------------

    async def head(self, url: str, options: Mapping[str, str] | None = None) -> ObjectInfo:
        """See `Origin.head`."""
        return await self._call(lambda thread, _: thread.origin(url, options).head(url))

    async def list(
        self,
        prefix_url: str,
        options: Mapping[str, str] | None = None,
        *,
        limit_count: int = OBJECTS_LISTED_MAX,
    ) -> Infos:
        """All objects under a prefix, sorted by address.

        Raises:
            UsageError: more than `limit_count`.
            GpufeedError: see `Origin.list`.
        """
        return await self._call(
            lambda thread, _: _listed(
                thread.origin(prefix_url, options).list(prefix_url), prefix_url, limit_count
            )
        )

    async def list_folder(
        self,
        folder_url: str,
        options: Mapping[str, str] | None = None,
        *,
        limit_count: int = OBJECTS_LISTED_MAX,
    ) -> Infos:
        """See `Origin.list_folder`, but sorted by address.

        Raises:
            UsageError: more than `limit_count`.
            GpufeedError: see `Origin.list`.
        """
        return await self._call(
            lambda thread, _: _listed(
                thread.origin(folder_url, options).list_folder(folder_url), folder_url, limit_count
            )
        )

    async def has_folder(self, folder_url: str, options: Mapping[str, str] | None = None) -> bool:
        """Whether there is something below a folder, or the folder itself."""
        return await self._call(
            lambda thread, _: _has_any(thread.origin(folder_url, options).list_folder(folder_url))
        )

    async def read_into(
        self,
        info: ObjectInfo,
        begin_bytes: int,
        targets: Sequence[memoryview],
        on_target: OnTarget,
        options: Mapping[str, str] | None = None,
        *,
        demand: bool = True,
    ) -> int | None:
        """See `Origin.read_into`; `on_target` is called on the caller's loop, before this ends."""

        def make(
            thread: EngineThread, crossing: Crossing[int | None]
        ) -> Coroutine[Any, Any, int | None]:
            origin = thread.origin(info.url, options)
            return origin.read_into(info, begin_bytes, targets, crossing.arrived, demand=demand)

        size_bytes = sum(target.nbytes for target in targets)
        return await self._call(make, on_target, len(targets), size_bytes)

    async def _call(
        self,
        make: Callable[[EngineThread, Crossing[_Result]], Coroutine[Any, Any, _Result]],
        on_target: OnTarget | None = None,
        target_count: int = 0,
        size_bytes: int = 0,
    ) -> _Result:
        load_bytes = size_bytes + CALL_LOAD_BYTES
        with self._lock:
            if not self._threads:
                raise OriginUnavailableError("the origin engine is not running")
            thread = min(self._threads, key=_load_bytes)
            thread.load_bytes += load_bytes
        try:
            return await thread.call(
                lambda crossing: make(thread, crossing), on_target, target_count
            )
        finally:
            with self._lock:
                thread.load_bytes -= load_bytes


def _load_bytes(thread: EngineThread) -> int:
    return thread.load_bytes


async def _has_any(found: AsyncIterator[ObjectInfo]) -> bool:
    async for _ in found:
        return True
    return False


async def _listed(found: AsyncIterator[ObjectInfo], prefix_url: str, limit_count: int) -> Infos:
    infos: Infos = []
    async for info in found:
        infos.append(info)
        if len(infos) > limit_count:
            raise UsageError(
                f"more than {limit_count} objects under {prefix_url}; name a narrower "
                "prefix, or put the samples into shards"
            )
    infos.sort(key=lambda info: info.url)
    return infos
