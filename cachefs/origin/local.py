"""Files of this machine, and mounted file systems, as an origin: ``file:///path``.

The etag is made of inode, size and modification time, and checked when a file is opened to be read
and again after the last byte, so a file replaced meanwhile is an error and not a mixture; only then
are its targets reported.

Blocking calls run in a few threads of the origin's own.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gpufeed.cachefs.errors import (
    AccessDeniedError,
    GpufeedError,
    IntegrityError,
    NotFoundError,
    OriginUnavailableError,
    ShardChangedError,
)
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.model import ObjectInfo
from gpufeed.cachefs.origin.base import OnTarget
from gpufeed.cachefs.tasks import in_thread

THREADS = 8
_Result = TypeVar("_Result")
Infos = list[ObjectInfo]


def path_of(url: str) -> str:
    """The path in a ``file://`` address."""
    return url.removeprefix("file://")


def _etag(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"


def _translate(url: str, error: OSError) -> GpufeedError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotFoundError(f"{path_of(url)} does not exist")
    if isinstance(error, PermissionError):
        return AccessDeniedError(f"{path_of(url)} may not be read by this user")
    return OriginUnavailableError(f"reading {path_of(url)} failed: {error.strerror or error}")


def _unreadable(error: OSError) -> None:
    """A directory left out silently would be samples left out; one that is not there is empty."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise _translate(f"file://{error.filename}", error) from None


class LocalOrigin:
    """Satisfies `Origin` for ``file://``."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(THREADS, "gpufeed-local")

    async def head(self, url: str) -> ObjectInfo:
        """See `Origin`."""
        return await self._run(lambda: self._stat(url))

    def _stat(self, url: str) -> ObjectInfo:
        try:
            found = os.stat(path_of(url))
        except OSError as error:
            raise _translate(url, error) from None
        if not stat.S_ISREG(found.st_mode):
            raise NotFoundError(f"{path_of(url)} is not a file (a directory's address ends with /)")
        return ObjectInfo(url, found.st_size, _etag(found))

    async def list(self, prefix_url: str) -> AsyncIterator[ObjectInfo]:
        """See `Origin`."""
        for info in await self._run(lambda: self._walk(prefix_url)):
            yield info

    def _walk(self, prefix_url: str) -> Infos:
        prefix = path_of(prefix_url)
        top = prefix if prefix.endswith("/") else os.path.dirname(prefix)
        infos = []
        for directory, _, names in os.walk(top, onerror=_unreadable):
            for name in names:
                path = os.path.join(directory, name)
                if path.startswith(prefix):
                    infos.append(self._stat(f"file://{path}"))
        return sorted(infos, key=lambda info: info.url)

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
        self._metrics.add("origin_requests_total")
        self._metrics.add("origin_in_flight", 1)
        try:
            await in_thread(
                self._threads, lambda stop: self._read(info, begin_bytes, targets, stop)
            )
        finally:
            self._metrics.add("origin_in_flight", -1)
        for i in range(len(targets)):
            on_target(i)
        return None

    def _read(
        self,
        info: ObjectInfo,
        begin_bytes: int,
        targets: Sequence[memoryview],
        stop: threading.Event,
    ) -> None:
        try:
            # A pipe put in the file's place must not hang the thread.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path_of(info.url), flags)
        except OSError as error:
            raise _translate(info.url, error) from None
        try:
            self._check(info, descriptor)
            at = begin_bytes
            for target in targets:
                if stop.is_set():
                    return
                self._read_exactly(info, descriptor, target, at)
                at += len(target)
            self._check(info, descriptor)
        finally:
            os.close(descriptor)

    @staticmethod
    def _check(info: ObjectInfo, descriptor: int) -> None:
        now = _etag(os.fstat(descriptor))
        if now != info.etag:
            raise ShardChangedError(
                f"{path_of(info.url)} was replaced: it had version {info.etag}, now {now}; open "
                "the dataset again to read the new version"
            )

    def _read_exactly(self, info: ObjectInfo, descriptor: int, target: memoryview, at: int) -> None:
        done = 0
        while done < len(target):
            try:
                found = os.preadv(descriptor, [target[done:]], at + done)
            except OSError as error:
                raise _translate(info.url, error) from None
            if found == 0:
                self._check(info, descriptor)
                raise IntegrityError(
                    f"{path_of(info.url)} ends at byte {at + done} of {info.size_bytes}"
                )
            done += found
        self._metrics.add("origin_bytes_total", done)

    async def _run(self, function: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def close(self) -> None:
        """See `Origin`."""
        self._threads.shutdown()
