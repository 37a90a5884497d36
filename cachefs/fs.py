"""The fsspec door: ``gpufeed::oss://bucket/key`` and ``gpufeed://bucket/key``.

A filesystem that is always the client of a daemon: looking, listing and reading go through it, to
the same cache as the loader's, so the process that reads holds no network client and no cache of
bytes. Writing goes to the origin through the target's own filesystem (`fswriting`).

Paths are those of the target without its scheme: ``bucket/key``, or ``/path`` of files. Listings
are kept for `LISTINGS_EXPIRY_S`, as fsspec's filesystems do; what is opened is always looked up at
the origin first, so a read never begins with a version that was overwritten before.

May be used by several threads and over forks; state that both share is in `calls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from fsspec.implementations.chained import ChainedFileSystem

from gpufeed.cachefs import fsoptions
from gpufeed.cachefs.fserrors import FileUsageError, as_os_errors
from gpufeed.cachefs.fswriting import WritingMixin
from gpufeed.cachefs.remotefile import BUFFER_BYTES, Place, ReadingFile, RemoteFile, read_range
from gpufeed.cachefs.wire import Kind

LISTINGS_EXPIRY_S = 10.0
# Files read at once by `cat` and `cat_ranges`; each waits for the origin by itself.
FILES_AT_ONCE = 8
_FILE_PROTOCOLS = ("file", "local")


class GpufeedFileSystem(WritingMixin, ChainedFileSystem):  # type: ignore[misc] # fsspec is untyped
    """See the top of the file.

    Args:
        target_protocol: scheme of the origin.
        target_options: storage options of the origin's own filesystem, as ossfs and s3fs name them.
            Endpoint, key, secret, token and region go to the daemon with each request; where there
            are none, the daemon's own count. All of them make the filesystem that writes.
        daemon: as ``GPUFEED_DAEMON``: auto, required, off or a path.
        block_size: bytes of the buffer of files opened for reading.
        fo: ignored; where a chain begins.
        **options: fsspec's own, for example `use_listings_cache` and `listings_expiry_time`.

    Raises:
        UsageError: an option, or one of the target's, has no such name, or a value that is none.
    """

    protocol: ClassVar[str] = "gpufeed"
    _strip_tokenize_options: ClassVar[tuple[str, ...]] = ("fo",)

    def __init__(
        self,
        target_protocol: str = "oss",
        target_options: Mapping[str, Any] | None = None,
        daemon: str | None = None,
        block_size: int = BUFFER_BYTES,
        fo: str | None = None,
        **options: Any,
    ) -> None:
        fsoptions.refuse_unknown(options, target_protocol)
        options.setdefault("listings_expiry_time", LISTINGS_EXPIRY_S)
        super().__init__(**options)
        self.target_protocol = target_protocol
        self.target_options = fsoptions.target_options(target_protocol, target_options)
        self._is_local = target_protocol in _FILE_PROTOCOLS
        self._buffer_bytes = fsoptions.buffer_bytes(block_size)
        self._place = Place(daemon, fsoptions.daemon_options(self.target_options))
        # Each instance has another target, whose scheme may stand before a path; see
        # `fsspec.implementations.cached`, which does the same.
        self._strip_protocol = self._strip_target  # type: ignore[method-assign] # as told

    # --- paths --------------------------------------------------------------------------------

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if path is None:
            # What fsspec makes of a chain that ends here.
            raise FileUsageError(
                "gpufeed:// names no file: give gpufeed://bucket/key, or gpufeed:: before a whole "
                "address, as gpufeed::oss://bucket/key"
            )
        return super()._strip_protocol(path)

    def _strip_target(self, path: Any) -> Any:
        if isinstance(path, list):
            return [self._strip_target(one) for one in path]
        stripped: str = type(self)._strip_protocol(path).removeprefix(f"{self.target_protocol}://")
        if self._is_local:
            return stripped.rstrip("/") or "/"
        return stripped.strip("/")

    def _address(self, path: str) -> str:
        """The full address of a stripped path."""
        return f"file://{path}" if self._is_local else f"{self.target_protocol}://{path}"

    # --- looking ------------------------------------------------------------------------------

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Name, type, size and etag of a file or a folder.

        Raises:
            FileNotFoundError: neither is there.
        """
        path = self._strip_protocol(path)
        if not path:
            return _folder(path)
        if not kwargs.get("refresh"):
            for entry in self._kept_listing(path.rpartition("/")[0]) or ():
                if entry["name"] == path:
                    return dict(entry)
        with as_os_errors():
            told = self._place.ask(Kind.STAT, self._address(path))
        if told["type"] == "directory":
            return _folder(path)
        return _file(path, told["size"], told["etag"])

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether a file or a folder is there; a daemon that does not answer is an error."""
        try:
            self.info(path, **kwargs)
        except FileNotFoundError:
            return False
        return True

    def isdir(self, path: str) -> bool:
        """Whether it is a folder."""
        return self._type(path) == "directory"

    def isfile(self, path: str) -> bool:
        """Whether it is a file."""
        return self._type(path) == "file"

    def _type(self, path: str) -> str:
        try:
            return str(self.info(path)["type"])
        except FileNotFoundError:
            return ""

    def modified(self, path: str) -> Any:
        """Not told: a daemon knows versions, which are etags; see fsspec."""
        raise NotImplementedError(
            f"{path}: gpufeed tells no times, since versions of files are etags here: compare "
            "info(path)['etag'], or ask the target's own filesystem"
        )

    def created(self, path: str) -> Any:
        """Not told, as `modified`."""
        return self.modified(path)

    def ls(self, path: str, detail: bool = True, refresh: bool = False, **_: Any) -> list[Any]:
        """Entries right below a folder; of a file, the file itself.

        Raises:
            FileNotFoundError: there is nothing.
        """
        path = self._strip_protocol(path)
        entries = None if refresh else self._kept_listing(path)
        if entries is None:
            entries = self._listed(path, recursive=False)
            if entries or self.isdir(path):
                self.dircache[path] = entries
            else:
                entries = [self.info(path)]
        return [dict(e) for e in entries] if detail else [e["name"] for e in entries]

    def _kept_listing(self, path: str) -> list[dict[str, Any]] | None:
        try:
            kept: list[dict[str, Any]] = self.dircache[path]
        except KeyError:
            return None
        return kept

    def _listed(self, path: str, *, recursive: bool) -> list[dict[str, Any]]:
        if not path:
            raise FileNotFoundError(
                f"gpufeed lists no buckets: name one, for example gpufeed://bucket/ "
                f"({self.target_protocol})"
            )
        address = self._address(path).rstrip("/") + "/"
        cursor: int | None = None
        entries = []
        while True:
            more = {"recursive": recursive} if cursor is None else {"cursor": cursor}
            with as_os_errors():
                page = self._place.ask(Kind.LIST, address, **more)
            for url, size_bytes, etag in page["entries"]:
                is_folder = url.endswith("/")
                name = self._strip_protocol(url)
                entries.append(_folder(name) if is_folder else _file(name, size_bytes, etag))
            cursor = page["cursor"]
            if cursor is None:
                return entries

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **kwargs: Any,
    ) -> Any:
        """All files below a folder, at any depth by one listing; see fsspec."""
        path = self._strip_protocol(path)
        if maxdepth is not None or withdirs or not path:
            return super().find(path, maxdepth, withdirs, detail, **kwargs)
        found = {
            entry["name"]: entry
            for entry in self._listed(path, recursive=True)
            if entry["type"] == "file"
        }
        if not found and self.isfile(path):
            found[path] = self.info(path)
        names = sorted(found)
        return {name: found[name] for name in names} if detail else names

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget listings: all, or those in which `path` and what is below it appear."""
        if path is None:
            self.dircache.clear()
        else:
            path = self._strip_protocol(path)
            for kept in list(self.dircache):
                if kept == path or kept.startswith(f"{path}/") or path.startswith(f"{kept}/"):
                    self.dircache.pop(kept, None)
        super().invalidate_cache(path)

    # --- reading ------------------------------------------------------------------------------

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **kwargs: Any,
    ) -> Any:
        if mode != "rb":
            return self.open_for_writing(path, mode, autocommit=autocommit)
        size_bytes = fsoptions.buffer_bytes(block_size or self._buffer_bytes)
        remote = self._remote(path, kwargs.get("etag"))
        return ReadingFile(self, path, remote, size_bytes)

    def _remote(self, path: str, etag: str | None = None) -> RemoteFile:
        with as_os_errors():
            return RemoteFile(self._place, self._address(path), etag=etag)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """The bytes ``[start, end)`` of a file; negative ones count from its end."""
        return self._cat_pieces(self._strip_protocol(path), [(start, end)])[0]

    def _cat_pieces(self, path: str, pieces: list[tuple[int | None, int | None]]) -> list[bytes]:
        remote = self._remote(path)
        try:
            return [
                read_range(remote, *_absolute(start, end, remote.size_bytes))
                for start, end in pieces
            ]
        finally:
            remote.close()

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """Ranges of files; each file is opened once, so its ranges are of one version."""
        count = len(paths)
        starts = starts if isinstance(starts, list) else [starts] * count
        ends = ends if isinstance(ends, list) else [ends] * count
        if len(starts) != count or len(ends) != count:
            raise ValueError(f"{count} paths, {len(starts)} starts, {len(ends)} ends")
        wanted: dict[str, list[int]] = {}
        for i, path in enumerate(paths):
            wanted.setdefault(self._strip_protocol(path), []).append(i)
        results: list[Any] = [None] * count

        def read(path: str) -> None:
            numbers = wanted[path]
            try:
                found: list[Any] = self._cat_pieces(path, [(starts[i], ends[i]) for i in numbers])
            except OSError as error:
                if on_error != "return":
                    raise
                found = [error] * len(numbers)
            for i, data in zip(numbers, found, strict=True):
                results[i] = data

        with ThreadPoolExecutor(FILES_AT_ONCE, "gpufeed-cat") as threads:
            list(threads.map(read, wanted))
        return results

    def cat(
        self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any
    ) -> Any:
        """The contents of one file, or of several by their paths; see fsspec."""
        paths = self.expand_path(path, recursive=recursive, **kwargs)
        is_one = (
            isinstance(path, str) and len(paths) == 1 and paths[0] == self._strip_protocol(path)
        )
        if is_one:
            return self.cat_file(paths[0])
        # A folder among them has no contents.
        files = [one for one in paths if not recursive or self.isfile(one)]
        ways = "raise" if on_error == "raise" else "return"
        found = self.cat_ranges(files, None, None, on_error=ways)
        pairs = zip(files, found, strict=True)
        if on_error == "omit":
            return {one: data for one, data in pairs if not isinstance(data, Exception)}
        return dict(pairs)


def _absolute(start: int | None, end: int | None, size_bytes: int) -> tuple[int, int]:
    """A half-open range as slices have it, within the file."""
    begin, stop, _ = slice(start, end).indices(size_bytes)
    return begin, stop


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "type": "directory", "size": 0}


def _file(path: str, size_bytes: int, etag: str) -> dict[str, Any]:
    # Under both spellings: readers that fingerprint files know one or the other.
    return {"name": path, "type": "file", "size": size_bytes, "etag": etag, "ETag": etag}
