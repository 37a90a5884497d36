"""The origin engine: a thread with an event loop of its own, in which all origins live.

Downloading flat out must not delay the loop that serves sessions, so it has its own. Calls cross
over by `call_soon_threadsafe`, once each way, and `on_target` comes back on the caller's loop, in
order, before the call returns.

Invariant: a call ends only when nothing can write into its targets any more, also when its caller
is cancelled: the cancellation is passed on, and waited for.

`start` and `close` are called once. Origins are made on first use, one for each scheme and set of
storage options, at most `ORIGINS_MAX`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import uvloop

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import UsageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.origin.base import OnTarget, Origin
from gpufeed.cachefs.origin.fsspec_origin import FsspecOrigin
from gpufeed.cachefs.origin.local import LocalOrigin
from gpufeed.cachefs.origin.oss import OssOrigin

ORIGINS_MAX = 256
OPTION_NAMES = frozenset({"endpoint", "region", "key", "secret", "token"})

_Result = TypeVar("_Result")
MakeOrigin = Callable[[OriginConfig, Metrics], Origin]
_KNOWN: dict[str, MakeOrigin] = {"oss": OssOrigin, "file": LocalOrigin}


class OriginEngine:
    """See the top of the file.

    Args:
        config: defaults for every origin; `options` of a call override endpoint and credentials.
        metrics: where requests and bytes are counted.
        origins: further or other origins by scheme, for tests.
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
        self._makers = {**_KNOWN, **(origins or {})}
        self._origins: dict[tuple[str, tuple[tuple[str, str], ...]], Origin] = {}
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="gpufeed-origin", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def close(self) -> None:
        """Close every origin and end the thread."""
        if self._thread.is_alive():
            await self._cross(self._close_origins())
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    async def _close_origins(self) -> None:
        for origin in self._origins.values():
            await origin.close()

    # --- calls --------------------------------------------------------------------------------

    async def head(self, url: str, options: Mapping[str, str] | None = None) -> ObjectInfo:
        """See `Origin.head`."""

        async def call() -> ObjectInfo:
            return await self._origin(url, options).head(url)

        return await self._cross(call())

    async def list(
        self,
        prefix_url: str,
        options: Mapping[str, str] | None = None,
        *,
        limit_count: int = 1_000_000,
    ) -> list[ObjectInfo]:
        """All objects under a prefix, sorted by address.

        Raises:
            UsageError: more than `limit_count`.
        """

        async def call() -> list[ObjectInfo]:
            infos = []
            async for info in self._origin(prefix_url, options).list(prefix_url):
                infos.append(info)
                if len(infos) > limit_count:
                    raise UsageError(
                        f"more than {limit_count} objects under {prefix_url}; name a narrower "
                        "prefix, or put the samples into shards"
                    )
            infos.sort(key=lambda info: info.url)
            return infos

        return await self._cross(call())

    async def read_into(
        self,
        info: ObjectInfo,
        begin_bytes: int,
        targets: Sequence[memoryview],
        on_target: OnTarget,
        options: Mapping[str, str] | None = None,
    ) -> int | None:
        """See `Origin.read_into`; `on_target` is called on the caller's loop."""
        here = asyncio.get_running_loop()

        def arrived(i: int) -> None:
            here.call_soon_threadsafe(on_target, i)

        async def call() -> int | None:
            origin = self._origin(info.url, options)
            return await origin.read_into(info, begin_bytes, targets, arrived)

        return await self._cross(call())

    def _origin(self, url: str, options: Mapping[str, str] | None) -> Origin:
        """On the engine's thread."""
        scheme = url.partition("://")[0]
        chosen = {n: v for n, v in (options or {}).items() if n in OPTION_NAMES and v}
        key = (scheme, tuple(sorted(chosen.items())))
        origin = self._origins.get(key)
        if origin is None:
            if len(self._origins) >= ORIGINS_MAX:
                raise UsageError(
                    f"{ORIGINS_MAX} different storage_options are in use; restart the daemon"
                )
            config = dataclasses.replace(self._config, **_overrides(chosen))
            maker = self._makers.get(scheme)
            if maker is None:
                origin = FsspecOrigin(scheme, config, self._metrics)
            else:
                origin = maker(config, self._metrics)
            self._origins[key] = origin
        return origin

    # --- crossing over ------------------------------------------------------------------------

    async def _cross(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine on the engine's loop and await it here."""
        here = asyncio.get_running_loop()
        outcome: asyncio.Future[_Result] = here.create_future()
        started: list[asyncio.Task[_Result]] = []

        def settle(task: asyncio.Task[_Result]) -> None:
            if outcome.done():
                return
            if task.cancelled():
                outcome.cancel()
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        def done(task: asyncio.Task[_Result]) -> None:
            here.call_soon_threadsafe(settle, task)

        def begin() -> None:
            task = self._loop.create_task(coroutine)
            started.append(task)
            task.add_done_callback(done)

        def stop() -> None:
            # Queued behind `begin`, so there is a task by now.
            started[0].cancel()

        self._loop.call_soon_threadsafe(begin)
        cancelled: asyncio.CancelledError | None = None
        while not outcome.done():
            try:
                await asyncio.wait([outcome])
            except asyncio.CancelledError as error:
                cancelled = error
                self._loop.call_soon_threadsafe(stop)
        if cancelled is not None:
            if not outcome.cancelled():
                outcome.exception()
            raise cancelled
        return outcome.result()


def _overrides(options: Mapping[str, str]) -> dict[str, Any]:
    """Options replace the configuration; credentials always as a whole."""
    changes: dict[str, Any] = dict(options)
    if "key" in changes or "secret" in changes:
        for name in ("key", "secret", "token"):
            changes.setdefault(name, "")
    return changes
