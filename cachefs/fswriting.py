"""The writing half of the fsspec door: everything that changes the origin.

It goes to the origin itself, through the filesystem that fsspec has for the target (ossfs, s3fs,
local files), imported when first needed: who only reads never has it. What was written is forgotten
here, in listings; readers look an object up when they open it, in this process and every other, so
none begins with the version before.

What is written through `open` is sent when the file is closed, as one object. Appending sends what
was there again, with what is new. A file opened with mode ``x``, or written with ``mode="create"``,
is looked for first; two writers at the same moment are not told apart, since the filesystems of
object stores offer no way. Deleting what is not there succeeds where the target does not tell, as
OSS and S3 do not.

Whatever the target's filesystem raises is translated in one place, `_at_origin`.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import fsspec

from gpufeed.cachefs.fsoptions import must_be_writable
from gpufeed.cachefs.targeterrors import as_target_errors
from gpufeed.cachefs.units import MIB

# Beyond it, what is written waits on disk.
SPOOL_BYTES_MAX = 32 * MIB


class WritingMixin:
    """Methods of the filesystem; the other half has `target_protocol` and `target_options`."""

    target_protocol: str
    target_options: dict[str, Any]
    _target_made: Any = None

    @property
    def target(self) -> Any:
        """The origin's own filesystem, with no listing of before.

        Raises:
            UsageError: there are no options for it to write with.
        """
        must_be_writable(self.target_protocol, self.target_options)
        if self._target_made is None:
            self._target_made = fsspec.filesystem(self.target_protocol, **self.target_options)
        self._target_made.invalidate_cache()
        return self._target_made

    @contextlib.contextmanager
    def _at_origin(self, path: str) -> Iterator[Any]:
        """The target, for something about `path`.

        Raises:
            OSError: as of `fserrors`.
        """
        target = self.target
        with as_target_errors(self._address(path)):  # type: ignore[attr-defined] # the other half's
            yield target

    def _changed(self, path: str) -> None:
        self.invalidate_cache(path)  # type: ignore[attr-defined] # the other half's

    def _must_be_new(self, path: str) -> None:
        if self.exists(path):  # type: ignore[attr-defined] # as above
            raise FileExistsError(f"{path} exists already")

    def _stripped(self, path: Any) -> Any:
        return self._strip_protocol(path)  # type: ignore[attr-defined] # as above

    def open_for_writing(self, path: str, mode: str, *, autocommit: bool) -> WritingFile:
        """A file that is there, whole, once it is closed; see `WritingFile`."""
        must_be_writable(self.target_protocol, self.target_options)
        if mode == "xb":
            self._must_be_new(path)
        elif mode not in ("wb", "ab"):
            raise ValueError(f"mode {mode!r}: files are opened with rb, wb, xb or ab")
        file = WritingFile(path, self._send, autocommit=autocommit)
        if mode == "ab" and self.exists(path):  # type: ignore[attr-defined] # as above
            file.write(self.cat_file(path))  # type: ignore[attr-defined] # as above
        return file

    def _send(self, path: str, spool: IO[bytes], size_bytes: int) -> None:
        """Put what was written at its place."""
        with self._at_origin(path) as target:
            if size_bytes <= SPOOL_BYTES_MAX:
                target.pipe_file(path, spool.read(size_bytes))
            else:
                target.put_file(spool.name, path)
        self._changed(path)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a whole file."""
        path = self._stripped(path)
        if mode == "create":
            self._must_be_new(path)
        with self._at_origin(path) as target:
            target.pipe_file(path, value, **kwargs)
        self._changed(path)

    def put_file(
        self, lpath: Any, rpath: str, callback: Any = None, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """Copy a local file, or make a folder."""
        rpath = self._stripped(rpath)
        if mode == "create":
            self._must_be_new(rpath)
        more = {} if callback is None else {"callback": callback}
        with self._at_origin(rpath) as target:
            target.put_file(lpath, rpath, **more, **kwargs)
        self._changed(rpath)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy within the origin; of a folder, the folder alone."""
        path1, path2 = self._stripped(path1), self._stripped(path2)
        if self.isdir(path1):  # type: ignore[attr-defined] # the other half's
            self.makedirs(path2, exist_ok=True)
            return
        with self._at_origin(path2) as target:
            target.cp_file(path1, path2, **kwargs)
        self._changed(path2)

    def rm_file(self, path: str) -> None:
        """Delete a file; whether there was one is not told by object stores."""
        path = self._stripped(path)
        with self._at_origin(path) as target:
            target.rm_file(path)
        self._changed(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete files, or whole folders."""
        for one in [path] if isinstance(path, str) else path:
            # One by one: ossfs forgets `recursive` where it gets a list.
            stripped = self._stripped(one)
            with self._at_origin(stripped) as target:
                target.rm(stripped, recursive=recursive, maxdepth=maxdepth)
            self._changed(stripped)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Make a folder, where the target has such a thing."""
        path = self._stripped(path)
        with self._at_origin(path) as target:
            target.mkdir(path, create_parents=create_parents, **kwargs)
        self._changed(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and those above it, where the target has such a thing."""
        path = self._stripped(path)
        with self._at_origin(path) as target:
            target.makedirs(path, exist_ok=exist_ok)
        self._changed(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        path = self._stripped(path)
        with self._at_origin(path) as target:
            target.rmdir(path)
        self._changed(path)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Make an empty file; one that is there stays, without `truncate`, with a new time."""
        if truncate or not self.exists(path):  # type: ignore[attr-defined] # the other half's
            self.pipe_file(path, b"")
            return
        path = self._stripped(path)
        with self._at_origin(path) as target:
            target.touch(path, truncate=False, **kwargs)
        self._changed(path)


def _named_spool() -> IO[bytes]:
    return tempfile.NamedTemporaryFile(prefix="gpufeed-write-")


class WritingFile(io.BufferedIOBase):
    """Keeps what is written, in memory and then on disk, and sends it as a whole when closed.

    So a reader sees the old object or the new one; a writer that dies, and a ``with`` block that
    ends in an error, leave the old. In a transaction it is sent by `commit`. `send` gets the path,
    a file that stands at its start, and its length in bytes.
    """

    mode = "wb"

    def __init__(
        self, path: str, send: Callable[[str, IO[bytes], int], None], *, autocommit: bool
    ) -> None:
        self.path = path
        self._send = send
        self._autocommit = autocommit
        # A name is needed where it is long: the target's filesystem sends it in parts, from disk.
        self._spool: IO[bytes] = io.BytesIO()
        self._size_bytes = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes written."""
        return self._size_bytes

    def write(self, data: Any) -> int:
        """Keep some more."""
        if self.closed:
            raise ValueError(f"{self.path} is closed already")
        view = memoryview(data).cast("B")
        if isinstance(self._spool, io.BytesIO) and self._size_bytes + len(view) > SPOOL_BYTES_MAX:
            kept, self._spool = self._spool, _named_spool()
            self._spool.write(kept.getbuffer())
        self._spool.write(view)
        self._size_bytes += len(view)
        return len(view)

    def commit(self) -> None:
        """Send it; called by `close`, or at the end of a transaction."""
        self._spool.flush()
        self._spool.seek(0)
        try:
            self._send(self.path, self._spool, self._size_bytes)
        finally:
            self._spool.close()

    def discard(self) -> None:
        """A transaction that failed: nothing is sent."""
        self._spool.close()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Send it, if the block went well."""
        if kind is not None and not self.closed:
            super().close()
            self.discard()
        self.close()

    def close(self) -> None:
        """End of writing."""
        if self.closed:
            return
        super().close()
        if self._autocommit:
            self.commit()
