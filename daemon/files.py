"""One session's access to single objects as files: look up, list, open, read extent by extent.

A file is one version of one object: its etag is fixed when it is opened, and each read is of that
version or an error. Bytes go the way of every other reader: through the cache, into an arena slot
that is lent to the client until it gives it back.

Invariants:
    - a slot is lent under a credit of the session's window, taken before the bytes are sought;
    - files are numbered by the session and never reused; a client that reconnects opens anew;
    - readers of files that are open but not read do not pile up: beyond `READERS_MAX` the least
      recently used lets go of its shard.

Owned by the daemon's loop.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from gpufeed.cachefs import urls as addresses
from gpufeed.cachefs.cache import RangeReader, ShardCache, ShardSource
from gpufeed.cachefs.errors import CapacityError, NotFoundError, ProtocolError, ShardChangedError
from gpufeed.cachefs.model import ObjectInfo, ShardSpec, Source
from gpufeed.cachefs.sources import Indexer
from gpufeed.cachefs.wire import Kind
from gpufeed.daemon.datasets import Datasets
from gpufeed.daemon.storageoptions import options_of

FILES_MAX = 4096
READERS_MAX = 32
# A listing is handed over in pages, so that no message holds up the daemon's loop.
ENTRIES_PER_PAGE = 5000
LISTINGS_MAX = 4
OBJECTS_LISTED_MAX = 1_000_000

FILE_KINDS = frozenset({Kind.STAT, Kind.LIST, Kind.FILE_OPEN, Kind.FILE_READ})


class Lender(Protocol):
    """Lends slots of the arena to the session's client within its window."""

    async def take_credit(self) -> None:
        """Wait until one more slot may be lent."""
        ...

    def return_credit(self) -> None:
        """The slot was not lent after all."""
        ...

    def lend(self, slot: int, digest: str) -> int:
        """Hand a held slot over, under a credit taken before; returns what the client releases."""
        ...


class _File:
    """An open file; `reader` is there while it is read, and begun anew after it has failed."""

    __slots__ = ("has_failed", "reader", "source", "users")

    def __init__(self, source: ShardSource) -> None:
        self.source = source
        self.reader: RangeReader | None = None
        self.users = 0
        self.has_failed = False


class SessionFiles:
    """See the top of the file."""

    def __init__(self, datasets: Datasets, cache: ShardCache, lender: Lender) -> None:
        self._datasets = datasets
        self._cache = cache
        self._lender = lender
        self._numbers = itertools.count(1)
        # Credits go in the order of asking. A reader has asked for what it needs first before what
        # it reads ahead; were the latter served first, readers could wait for one another.
        self._turns = asyncio.Lock()
        self._files: dict[int, _File] = {}
        # Files with a reader, the least recently used first.
        self._reading: collections.OrderedDict[int, _File] = collections.OrderedDict()
        self._listings: dict[int, collections.deque[ObjectInfo]] = {}

    async def answer(self, kind: Kind, value: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request of `FILE_KINDS`.

        Raises:
            GpufeedError: it cannot be served; the session goes on.
        """
        if kind is Kind.FILE_READ:
            return await self._read(value)
        if kind is Kind.FILE_OPEN:
            return await self._open(value)
        if kind is Kind.STAT:
            return await self._stat(value)
        return await self._list(value)

    def close_file(self, value: dict[str, Any]) -> None:
        """The client is done with a file; one that it has not opened is nothing to close."""
        number = value.get("file")
        file = self._files.pop(number, None) if isinstance(number, int) else None
        if isinstance(number, int) and file is not None and not file.users:
            self._forget(number, file)

    def close(self) -> None:
        """The session is over; lent slots are the lender's business."""
        self._listings.clear()
        self._files.clear()
        for file in self._reading.values():
            _let_go(file)
        self._reading.clear()

    # --- looking ------------------------------------------------------------------------------

    async def _stat(self, value: dict[str, Any]) -> dict[str, Any]:
        url, options = self._asked(value)
        engine = self._datasets.engine
        if not _is_container(url):
            try:
                info = await engine.head(url, options)
                return {"type": "file", "size": info.size_bytes, "etag": info.etag}
            except NotFoundError:
                # Object stores have no folders: one is there while something is below it.
                if not await engine.has_folder(f"{url}/", options):
                    raise
        return {"type": "directory", "size": 0, "etag": ""}

    async def _list(self, value: dict[str, Any]) -> dict[str, Any]:
        cursor = value.get("cursor")
        if not isinstance(cursor, int):
            rest = collections.deque(await self._below(value))
            cursor = next(self._numbers)
        else:
            found = self._listings.pop(cursor, None)
            if found is None:
                raise ProtocolError(
                    "this listing is not known: the daemon was restarted, or more than "
                    f"{LISTINGS_MAX} were begun and not fetched to their end; list again"
                )
            rest = found
        page = [rest.popleft() for _ in range(min(len(rest), ENTRIES_PER_PAGE))]
        if rest:
            self._listings[cursor] = rest
            if len(self._listings) > LISTINGS_MAX:
                del self._listings[next(iter(self._listings))]
        return {
            "entries": [[info.url, info.size_bytes, info.etag] for info in page],
            "cursor": cursor if rest else None,
        }

    async def _below(self, value: dict[str, Any]) -> list[ObjectInfo]:
        url, options = self._asked(value)
        folder = url if url.endswith("/") else f"{url}/"
        engine = self._datasets.engine
        if value.get("recursive"):
            # Keys that stand for folders are no files.
            infos = await engine.list(folder, options, limit_count=OBJECTS_LISTED_MAX)
            return [info for info in infos if not info.url.endswith("/")]
        infos = await engine.list_folder(folder, options, limit_count=OBJECTS_LISTED_MAX)
        return [info for info in infos if info.url != folder]

    # --- reading ------------------------------------------------------------------------------

    async def _open(self, value: dict[str, Any]) -> dict[str, Any]:
        if len(self._files) >= FILES_MAX:
            raise CapacityError(
                f"{FILES_MAX} files are open in this session already: close some, or read fewer "
                "at a time"
            )
        url, options = self._asked(value)
        info = await self._datasets.engine.head(url, options)
        pinned = value.get("etag")
        if pinned is not None and pinned != info.etag:
            raise ShardChangedError(
                f"{url} was overwritten while it was open: it had version {pinned}, now "
                f"{info.etag}; open it again to read the new version"
            )
        number = next(self._numbers)
        source = self._source(info, options)
        self._datasets.note_access(source)
        self._files[number] = _File(source)
        return {"file": number, "size": info.size_bytes, "etag": info.etag}

    async def _read(self, value: dict[str, Any]) -> dict[str, Any]:
        number, extent = value.get("file"), value.get("extent")
        file = self._files.get(number) if isinstance(number, int) else None
        if not isinstance(number, int) or file is None:
            raise ProtocolError(f"file {number} is not open in this session")
        count = file.source.spec.extent_count(self._cache.tools.extent_bytes)
        if not isinstance(extent, int) or not 0 <= extent < count:
            raise ProtocolError(f"extent {extent} of a file that has {count}")
        async with self._turns:
            await self._lender.take_credit()
        file.users += 1
        try:
            await self._cache.permit(file.source)
            reader = self._reader(number, file)
            slot, _ = await reader.extent(extent)
        except BaseException:
            self._lender.return_credit()
            file.has_failed = True
            raise
        finally:
            file.users -= 1
            if not file.users and (file.has_failed or number not in self._files):
                self._forget(number, file)
        seq = self._lender.lend(slot, file.source.spec.digest)
        self._cache.tools.metrics.add("published_bytes_total", reader.length(extent))
        return {"seq": seq, "slot": slot, "length": reader.length(extent)}

    def _source(self, info: ObjectInfo, options: Mapping[str, str]) -> ShardSource:
        """As a dataset's shard where that is stored; else as a file, which has no samples."""
        spec = ShardSpec(
            info.url, info.size_bytes, (Source(info, 0),),
            origin=self._datasets.origin_of(options),
        )  # fmt: skip
        if self._cache.tools.store.lookup(spec.digest) is None:
            spec = replace(spec, is_plain=True)
        return ShardSource(
            spec=spec, options=options, make_indexer=_no_indexer, adhoc=spec.is_plain,
            tenant=self._datasets.tenant,
        )  # fmt: skip

    def _reader(self, number: int, file: _File) -> RangeReader:
        if file.reader is None:
            file.reader = self._cache.open_ranges(file.source)
            self._reading[number] = file
        self._reading.move_to_end(number)
        if len(self._reading) > READERS_MAX:
            for other, idle in self._reading.items():
                if not idle.users:
                    self._forget(other, idle)
                    break
        return file.reader

    def _forget(self, number: int, file: _File) -> None:
        self._reading.pop(number, None)
        file.has_failed = False
        _let_go(file)

    def _asked(self, value: dict[str, Any]) -> tuple[str, Mapping[str, str]]:
        """The checked address and storage options of a request.

        Raises:
            AccessDeniedError: this daemon does not serve the address, or not from that endpoint.
            UsageError: it is none, or the options are none.
        """
        url = value.get("url")
        if not isinstance(url, str):
            raise ProtocolError("a request for a file without its address")
        url = addresses.normalise(url, working_directory="/")
        self._datasets.check_allowed(url)
        return url, self._datasets.options(options_of(value))


def _is_container(url: str) -> bool:
    """A bucket, or written as a folder."""
    _, bucket, key = addresses.split_bucket(url)
    return url.endswith("/") or bool(bucket and not key)


def _no_indexer(_: ShardSpec) -> Indexer | None:
    return None


def _let_go(file: _File) -> None:
    if file.reader is not None:
        file.reader.close()
        file.reader = None
