"""The origin engine: a thread with an event loop of its own, in which all origins live.

Downloading flat out must not delay the loop that serves sessions, so it has its own. Calls come
from any running loop, cross over (`gpufeed.cachefs.origin.crossing`) and end only when nothing can
write into their targets any more, also when their caller is cancelled.

`start` and `close` are called once, in this order. Origins are made on first use, one for each
scheme and set of storage options, at most `ORIGINS_MAX`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import uvloop

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import OriginUnavailableError, UsageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.origin.base import OnTarget, Origin
from gpufeed.cachefs.origin.credentials.chain import CredentialBook
from gpufeed.cachefs.origin.crossing import Crossing
from gpufeed.cachefs.origin.fsspec_origin import FsspecOrigin
from gpufeed.cachefs.origin.local import LocalOrigin
from gpufeed.cachefs.origin.oss import OssOrigin

ORIGINS_MAX = 256
OBJECTS_LISTED_MAX = 1_000_000
OPTION_NAMES = frozenset({"endpoint", "region", "key", "secret", "token"})

MakeOrigin = Callable[[OriginConfig], Origin]
Infos = list[ObjectInfo]
_Result = TypeVar("_Result")
_OriginKey = tuple[str, tuple[tuple[str, str], ...]]


class OriginEngine:
    """See the top of the file.

    Args:
        config: defaults for every origin; `options` of a call override endpoint and credentials.
        metrics: where requests and bytes are counted.
        origins: makers of further or other origins by scheme; called on the engine's thread.
    """

    def __init__(
        self,
        config: OriginConfig,
        metrics: Metrics,
        *,
        origins: Mapping[str, MakeOrigin] | None = None,
    ) -> None:
        self._config = config
        self._metrics = metrics
        book = CredentialBook(os.environ, metrics)
        self._makers: dict[str, MakeOrigin] = {
            "oss": lambda chosen: OssOrigin(chosen, metrics, book),
            "file": lambda _: LocalOrigin(metrics),
            **(origins or {}),
        }
        self._origins: dict[_OriginKey, Origin] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        assert self._thread is None, "an engine is started once"
        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()

        def run() -> None:
            loop.run_forever()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

        self._thread = threading.Thread(target=run, name="gpufeed-origin", daemon=True)
        self._thread.start()
        self._loop = loop

    async def close(self) -> None:
        """Give up the calls under way, close every origin and end the thread."""
        loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        await Crossing(loop, set(), lambda _: self._end_origins()).run()
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def _end_origins(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        for origin in self._origins.values():
            await origin.close()
        self._origins.clear()

    # --- calls --------------------------------------------------------------------------------

    async def head(self, url: str, options: Mapping[str, str] | None = None) -> ObjectInfo:
        """See `Origin.head`."""
        return await self._call(lambda _: self._origin(url, options).head(url))

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
        return await self._call(lambda _: self._list(prefix_url, options, limit_count))

    async def _list(
        self, prefix_url: str, options: Mapping[str, str] | None, limit_count: int
    ) -> Infos:
        infos: Infos = []
        async for info in self._origin(prefix_url, options).list(prefix_url):
            infos.append(info)
            if len(infos) > limit_count:
                raise UsageError(
                    f"more than {limit_count} objects under {prefix_url}; name a narrower "
                    "prefix, or put the samples into shards"
                )
        infos.sort(key=lambda info: info.url)
        return infos

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

        def make(crossing: Crossing[int | None]) -> Coroutine[Any, Any, int | None]:
            origin = self._origin(info.url, options)
            return origin.read_into(info, begin_bytes, targets, crossing.arrived, demand=demand)

        return await self._call(make, on_target, len(targets))

    async def _call(
        self,
        make: Callable[[Crossing[_Result]], Coroutine[Any, Any, _Result]],
        on_target: OnTarget | None = None,
        target_count: int = 0,
    ) -> _Result:
        loop = self._loop
        if loop is None:
            raise OriginUnavailableError("the origin engine is not running")
        return await Crossing(loop, self._tasks, make, on_target, target_count).run()

    # --- on the engine's thread ---------------------------------------------------------------

    def _origin(self, url: str, options: Mapping[str, str] | None) -> Origin:
        scheme = url.partition("://")[0]
        chosen = {n: v for n, v in options.items() if n in OPTION_NAMES and v} if options else {}
        key = (scheme, tuple(sorted(chosen.items())))
        origin = self._origins.get(key)
        if origin is None:
            if len(self._origins) >= ORIGINS_MAX:
                raise UsageError(
                    f"{ORIGINS_MAX} different storage_options are in use; use fewer, or restart "
                    "the daemon"
                )
            origin = self._origins[key] = self._make(scheme, chosen)
        return origin

    def _make(self, scheme: str, chosen: Mapping[str, str]) -> Origin:
        config = dataclasses.replace(self._config, **_overrides(chosen))
        maker = self._makers.get(scheme)
        return maker(config) if maker else FsspecOrigin(scheme, config, self._metrics)


def _overrides(options: Mapping[str, str]) -> dict[str, Any]:
    """Options replace the configuration; credentials always as a whole."""
    changes: dict[str, Any] = dict(options)
    if "key" in changes or "secret" in changes:
        for name in ("key", "secret", "token", "role_arn"):
            changes.setdefault(name, "")
        changes["credentials"] = "static"
    return changes
