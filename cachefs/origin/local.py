"""Files of this machine, and mounted file systems (NAS, CPFS), as an origin: ``file:///path``.

The etag is made of inode, size and modification time, and checked when a file is opened to be read
(a network file system asks its server then) and again after the last byte, so a file replaced
meanwhile is an error and not a mixture; only then are its targets reported.

Listings follow links to files and to directories, as datasets are often put together of them; a
directory that leads back to one above it is not entered again. A handle that the server of a
network file system has forgotten (ESTALE) is opened again once: the file may be the same.

Blocking calls run in a few threads of the origin's own, one a part, so that parts of a large file
are read beside each other.
"""

from __future__ import annotations

import asyncio
import errno
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
from gpufeed.cachefs.model import ObjectInfo, folder_info
from gpufeed.cachefs.origin.base import OnTarget
from gpufeed.cachefs.tasks import in_thread

THREADS = 8
_Result = TypeVar("_Result")
Infos = list[ObjectInfo]
_Identity = tuple[int, int]


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
    return OriginUnavailableError(
        f"reading {path_of(url)} failed: {error.strerror or error}; it may work later: check its "
        "disk, or the mount and its server"
    )


def _entries(directory: str) -> tuple[list[os.DirEntry[str]], _Identity]:
    """What is in a directory, and which one it is, by whatever path; empty if it is not there.

    Raises:
        GpufeedError: it cannot be read. Left out silently, its samples would be.
    """
    try:
        found = os.stat(directory)
        with os.scandir(directory) as entries:
            return list(entries), (found.st_dev, found.st_ino)
    except (FileNotFoundError, NotADirectoryError):
        return [], (0, 0)
    except OSError as error:
        raise _translate(f"file://{directory}", error) from None


def _stat_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Of what an entry is or leads to; None if it has gone since.

    Raises:
        NotFoundError: a link to nothing.
        GpufeedError: it cannot be looked at.
    """
    try:
        return entry.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            if not entry.is_symlink():
                return None
            raise NotFoundError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, where there is nothing; "
                "mend or remove it"
            ) from None
        raise _translate(f"file://{entry.path}", error) from None


def _opened(url: str) -> int:
    try:
        # A pipe put in the file's place must not hang the thread.
        return os.open(path_of(url), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _translate(url, error) from None


class _OpenFile:
    """A file of a known version, open. A context manager.

    Raises:
        ShardChangedError: it is of another version.
        GpufeedError: it cannot be opened.
    """

    def __init__(self, info: ObjectInfo) -> None:
        self._info = info
        self._descriptor = _opened(info.url)
        self._was_reopened = False

    def __enter__(self) -> _OpenFile:
        try:
            self.check()
        except GpufeedError:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)

    def check(self) -> None:
        """See the class."""
        info = self._info
        try:
            now = _etag(os.fstat(self._descriptor))
        except OSError as error:
            raise _translate(info.url, error) from None
        if now != info.etag:
            raise ShardChangedError(
                f"{path_of(info.url)} was replaced: it had version {info.etag}, now {now}; open "
                "the dataset again to read the new version"
            )

    def read_into(self, place: memoryview, at: int) -> int:
        """Bytes from `at` on; how many, at least one."""
        url = self._info.url
        try:
            found = os.preadv(self._descriptor, [place], at)
        except OSError as error:
            if error.errno != errno.ESTALE or self._was_reopened:
                raise _translate(url, error) from None
            self._reopen()
            return self.read_into(place, at)
        if found == 0:
            self.check()
            raise IntegrityError(f"{path_of(url)} ends at byte {at} of {self._info.size_bytes}")
        return found

    def _reopen(self) -> None:
        self._was_reopened = True
        fresh = _opened(self._info.url)
        os.close(self._descriptor)
        self._descriptor = fresh
        self.check()


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

    async def list_folder(self, folder_url: str) -> AsyncIterator[ObjectInfo]:
        """See `Origin`."""
        for info in await self._run(lambda: self._below(folder_url)):
            yield info

    def _below(self, folder_url: str) -> Infos:
        folder = path_of(folder_url)
        if not os.path.isdir(folder):
            return []
        infos = [folder_info(folder_url)]
        for entry in _entries(folder)[0]:
            found = _stat_of(entry)
            if found is None:
                continue
            url = f"file://{entry.path}"
            if stat.S_ISDIR(found.st_mode):
                infos.append(folder_info(f"{url}/"))
            elif stat.S_ISREG(found.st_mode):
                infos.append(ObjectInfo(url, found.st_size, _etag(found)))
        return infos

    def _walk(self, prefix_url: str) -> Infos:
        prefix = path_of(prefix_url)
        top = prefix if prefix.endswith("/") else os.path.dirname(prefix)
        infos: Infos = []
        waiting: list[tuple[str, frozenset[_Identity]]] = [(top, frozenset())]
        while waiting:
            directory, above = waiting.pop()
            entries, identity = _entries(directory)
            if identity in above:
                continue
            for entry in entries:
                found = _stat_of(entry)
                if found is None:
                    continue
                if stat.S_ISDIR(found.st_mode) and f"{entry.path}/".startswith(prefix):
                    waiting.append((entry.path, above | {identity}))
                elif stat.S_ISREG(found.st_mode) and entry.path.startswith(prefix):
                    infos.append(ObjectInfo(f"file://{entry.path}", found.st_size, _etag(found)))
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
        with _OpenFile(info) as file:
            at = begin_bytes
            for target in targets:
                done = 0
                while done < len(target):
                    if stop.is_set():
                        return
                    done += file.read_into(target[done:], at + done)
                at += done
                self._metrics.add("origin_bytes_total", done)
            file.check()

    async def _run(self, function: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def close(self) -> None:
        """See `Origin`."""
        self._threads.shutdown()
