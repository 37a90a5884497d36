"""Every other scheme, through the fsspec filesystem that serves it (``s3://``, ``memory://``, …).

fsspec is the source only; the cache is ours. Its synchronous calls run in threads of our own, never
on its event loop, whose state does not survive forks and whose caches have no verification. Bytes
are copied once more than by the OSS engine. A filesystem that tells no etag is identified by what
it does tell: modification time and size; where it tells neither, overwriting goes unnoticed, and
such a dataset must not be overwritten in place.
"""

from __future__ import annotations

import datetime
import functools
import gc
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gpufeed.cachefs.config import OriginConfig
from gpufeed.cachefs.errors import (
    AccessDeniedError,
    ConfigError,
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

THREADS = 16
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "md5", "checksum", "generation", "mtime", "created")
_MODIFIED_KEYS = ("LastModified", "last_modified", "modified", "updated")
Infos = list[ObjectInfo]
_Result = TypeVar("_Result")


def _etag(details: dict[str, Any]) -> str:
    """The strongest version that is told; times in one form, since filesystems mix theirs."""
    for name in (*_VERSION_KEYS, *_MODIFIED_KEYS):
        told = details.get(name)
        if told:
            break
    else:
        return f"size-{details.get('size')}"
    if isinstance(told, datetime.datetime):
        told = told.timestamp()
    if isinstance(told, float):
        return f"{told:.6f}-{details.get('size')}"
    return str(told).strip('"')


def _size_bytes(url: str, details: dict[str, Any]) -> int:
    size = details.get("size")
    if size is None:
        raise IntegrityError(
            f"{url}: its server does not tell the length, so it cannot be cached; copy it to "
            "storage that does"
        )
    return int(size)


class FsspecOrigin:
    """Satisfies `Origin` for one scheme."""

    def __init__(self, scheme: str, config: OriginConfig, metrics: Metrics) -> None:
        self._scheme = scheme
        self._config = config
        self._metrics = metrics
        self._threads = ThreadPoolExecutor(THREADS, "gpufeed-fsspec")
        self._making = threading.Lock()
        self._made: Any = None

    @property
    def _fs(self) -> Any:
        """In a thread: importing a filesystem takes a while, which the loop does not have."""
        with self._making:
            if self._made is None:
                self._made = _filesystem(self._scheme, self._config)
            return self._made

    async def head(self, url: str) -> ObjectInfo:
        """See `Origin`."""
        return await self._run(url, lambda: self._info(url))

    def _info(self, url: str) -> ObjectInfo:
        details = self._fs.info(self._path(url))
        if details.get("type") == "directory":
            raise NotFoundError(f"{url} is a directory, not an object; a prefix ends with /")
        return ObjectInfo(url, _size_bytes(url, details), _etag(details))

    async def list(self, prefix_url: str) -> AsyncIterator[ObjectInfo]:
        """See `Origin`."""
        for info in await self._run(prefix_url, lambda: self._find(prefix_url)):
            yield info

    async def list_folder(self, folder_url: str) -> AsyncIterator[ObjectInfo]:
        """See `Origin`."""
        for info in await self._run(folder_url, lambda: self._below(folder_url)):
            yield info

    def _below(self, folder_url: str) -> Infos:
        folder = self._path(folder_url)
        try:
            found: list[dict[str, Any]] = self._fs.ls(folder.rstrip("/"), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        infos = [folder_info(folder_url)]
        for details in found:
            name = details["name"].rstrip("/").rpartition("/")[2]
            url = folder_url + name
            if details.get("type") == "directory":
                infos.append(folder_info(f"{url}/"))
            elif not details["name"].endswith("/"):
                infos.append(ObjectInfo(url, _size_bytes(url, details), _etag(details)))
        return infos

    def _find(self, prefix_url: str) -> Infos:
        prefix = self._path(prefix_url)
        root = prefix.rpartition("/")[0]
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(root, detail=True)
        except FileNotFoundError:
            return []
        named = [
            (prefix_url + path[len(prefix) :], details)
            for path, details in sorted(found.items())
            if path.startswith(prefix) and details.get("type") != "directory"
        ]
        if named and not self._agrees(*named[0]):
            # This filesystem's listings know less than its look-ups, which reads are checked by.
            with ThreadPoolExecutor(THREADS, "gpufeed-fsspec-info") as threads:
                return list(threads.map(self._info, [url for url, _ in named]))
        return [ObjectInfo(url, _size_bytes(url, told), _etag(told)) for url, told in named]

    def _agrees(self, url: str, details: dict[str, Any]) -> bool:
        """Whether a listing identifies an object as looking it up does."""
        if details.get("size") is None:
            return False
        return self._info(url) == ObjectInfo(url, int(details["size"]), _etag(details))

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
            await self._run(info.url, functools.partial(self._read, info, begin_bytes, targets))
        finally:
            self._metrics.add("origin_in_flight", -1)
        for i in range(len(targets)):
            on_target(i)
        return None

    def _read(self, info: ObjectInfo, begin_bytes: int, targets: Sequence[memoryview]) -> None:
        size = sum(len(target) for target in targets)
        end_bytes = begin_bytes + size
        data = b""
        if size:
            data = self._fs.cat_file(self._path(info.url), start=begin_bytes, end=end_bytes)
        # After the bytes, before anybody sees them: these filesystems know no conditional read.
        now = self._info(info.url).etag
        if now != info.etag:
            raise ShardChangedError(
                f"{info.url} was overwritten: it had version {info.etag}, now {now}; open the "
                "dataset again to read the new version"
            )
        if len(data) != size:
            raise IntegrityError(
                f"{info.url}: {len(data)} bytes came for bytes {begin_bytes}-{end_bytes}"
            )
        rest = memoryview(data)
        for target in targets:
            target[:] = rest[: len(target)]
            rest = rest[len(target) :]
        self._metrics.add("origin_bytes_total", size)

    def _path(self, url: str) -> str:
        path: str = self._fs._strip_protocol(url)
        return path + "/" if url.endswith("/") and not path.endswith("/") else path

    async def _run(self, url: str, function: Callable[[], _Result]) -> _Result:
        """In a thread; not given up before the thread has ended, as it may write into targets."""

        def translated(stop: threading.Event) -> _Result:
            if stop.is_set():
                raise OriginUnavailableError(f"{url}: given up before it began")
            try:
                return function()
            except GpufeedError:
                raise
            except FileNotFoundError:
                raise NotFoundError(f"{url} does not exist") from None
            except PermissionError as error:
                raise AccessDeniedError(f"{url}: access denied ({error})") from None
            except Exception as error:  # filesystems raise what their clients raise
                raise OriginUnavailableError(
                    f"{url}: the {self._scheme} filesystem failed: {type(error).__name__}: {error}"
                ) from error

        return await in_thread(self._threads, translated)

    async def close(self) -> None:
        """See `Origin`."""
        await in_thread(self._threads, self._let_go)
        self._threads.shutdown()

    def _let_go(self, _: threading.Event) -> None:
        """End the filesystem's connections, here rather than wherever it is collected.

        Those with a loop of their own end them when they are collected, and in a thread that runs
        another loop they try it on that one and fail. They are in reference cycles.
        """
        self._made = None
        gc.collect()


def _s3_options(config: OriginConfig) -> dict[str, Any]:
    """Ours in s3fs's words. What is not set is left to AWS's own variables and files."""
    client = {
        "endpoint_url": config.endpoint, "region_name": config.region, "verify": config.ca_file
    }  # fmt: skip
    pair = {"key": config.key, "secret": config.secret, "token": config.token}
    return {
        **{name: value for name, value in pair.items() if value},
        "anon": config.credentials == "anonymous",
        "client_kwargs": {name: value for name, value in client.items() if value},
        "config_kwargs": {"max_pool_connections": THREADS},
    }


def _filesystem(scheme: str, config: OriginConfig) -> Any:
    # Imported here: the daemon of a node that reads OSS alone never pays for it.
    import fsspec  # noqa: PLC0415
    from fsspec.dircache import DirCache  # noqa: PLC0415

    options = _s3_options(config) if scheme in ("s3", "s3a") else {}
    try:
        made = fsspec.filesystem(scheme, skip_instance_cache=True, **options)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{scheme}:// needs a filesystem that is not installed: {error}"
        ) from None
    # No listings kept: what one knew an hour ago is not what a read is checked by. (Not as an
    # argument: some filesystems hand those they do not know on to their client.)
    made.dircache = DirCache(use_listings_cache=False)
    return made
