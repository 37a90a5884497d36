"""One engine thread: its event loop, the origins that live in it, and the calls under way.

Origins belong to a loop, so each thread has its own, made on first use, one for each scheme and set
of storage options, at most `ORIGINS_MAX`. What the threads share (limits, health, credentials,
spare memory) is in `Shared`.

Threads: `start`, `close` and `call` are for callers on any loop; what begins with an underscore
below "on the thread" runs there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import UsageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin.account import Account, AccountBook
from gpufeed.cachefs.origin.base import OnTarget, Origin
from gpufeed.cachefs.origin.credentials.chain import CredentialBook
from gpufeed.cachefs.origin.crossing import Crossing
from gpufeed.cachefs.origin.fsspec_origin import FsspecOrigin
from gpufeed.cachefs.origin.local import LocalOrigin
from gpufeed.cachefs.origin.oss import OssOrigin
from gpufeed.cachefs.origin.oss_address import region_of
from gpufeed.cachefs.origin.pool import ConnectionPool
from gpufeed.cachefs.origin.spare import Spares

ORIGINS_MAX = 256
OPTION_NAMES = frozenset(
    {"endpoint", "region", "credentials", "key", "secret", "token", "role_arn"}
)

MakeOrigin = Callable[[OriginConfig], Origin]
_Result = TypeVar("_Result")
_OriginKey = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Shared:
    """What all threads of an engine have in common. All of it is thread-safe."""

    config: OriginConfig
    metrics: Metrics
    threads_count: int
    accounts: AccountBook
    credentials: CredentialBook
    spares: Spares
    makers: Mapping[str, MakeOrigin]


class EngineThread:
    """See the top of the file.

    Attributes:
        load_bytes: what the engine has given it to do; the engine's to keep.
    """

    def __init__(self, index: int, shared: Shared) -> None:
        self._index = index
        self._shared = shared
        self.load_bytes = 0
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._origins: dict[_OriginKey, Origin] = {}
        self._pools: dict[Account, ConnectionPool] = {}
        self._thread = threading.Thread(
            target=self._run, name=f"gpufeed-origin-{index}", daemon=True
        )

    def start(self) -> None:
        """Start it."""
        self._thread.start()

    async def call(
        self,
        make: Callable[[Crossing[_Result]], Coroutine[Any, Any, _Result]],
        on_target: OnTarget | None = None,
        target_count: int = 0,
    ) -> _Result:
        """Run what `make` gives on the thread; see `Crossing`."""
        return await Crossing(self._loop, self._tasks, make, on_target, target_count).run()

    async def close(self) -> None:
        """Give up the calls under way, close every origin and end the thread."""
        await Crossing(self._loop, set(), lambda _: self._end()).run()
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    # --- on the thread ------------------------------------------------------------------------

    def origin(self, url: str, options: Mapping[str, str] | None) -> Origin:
        """The one that serves `url`; called on the thread.

        Raises:
            UsageError: too many sets of options.
            ConfigError: see the origin.
        """
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
        shared = self._shared
        config = dataclasses.replace(shared.config, **_overrides(chosen))
        if scheme in shared.makers:
            return shared.makers[scheme](config)
        if scheme == "oss":
            pool, spares = self._pool(config), shared.spares
            hedges = spares if config.hedge_ratio_max > 0 else None
            return OssOrigin(config, shared.metrics, shared.credentials, pool, hedges)
        if scheme == "file":
            return LocalOrigin(shared.metrics)
        return FsspecOrigin(scheme, config, shared.metrics)

    def _pool(self, config: OriginConfig) -> ConnectionPool:
        account = self._shared.accounts.account(config)
        pool = self._pools.get(account)
        if pool is None:
            pool = self._pools[account] = ConnectionPool(
                config, account, self._shared.metrics,
                thread_index=self._index, threads_count=self._shared.threads_count,
            )  # fmt: skip
        return pool

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        for origin in self._origins.values():
            await origin.close()
        self._origins.clear()
        for pool in self._pools.values():
            await pool.close()
        self._pools.clear()


def _overrides(options: Mapping[str, str]) -> dict[str, Any]:
    """Options replace the configuration; credentials always as a whole."""
    changes: dict[str, Any] = dict(options)
    if "key" in changes or "secret" in changes:
        changes["credentials"] = "static"
    if "credentials" in changes:
        for name in ("key", "secret", "token", "role_arn"):
            changes.setdefault(name, "")
    if "endpoint" in changes and region_of(changes["endpoint"]):
        # Another endpoint's region is its own, not the one that was configured beside ours.
        changes.setdefault("region", "")
    return changes
