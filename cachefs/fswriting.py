"""The writing half of the fsspec door: everything that changes the origin.

It goes to the origin itself, through the filesystem that fsspec has for the target (ossfs, s3fs,
local files), imported when first needed: who only reads never has it. What was written is forgotten
here, in listings; readers look an object up when they open it, in this process and every other, so
none begins with the version before.

A file opened with mode ``x``, or written with ``mode="create"``, is looked for first. Two writers
at the same moment are not told apart: object stores' filesystems offer no way.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import fsspec


class WritingMixin:
    """Methods of the filesystem; the other half has `target_protocol` and `target_options`."""

    target_protocol: str
    target_options: dict[str, Any]
    _target_made: Any = None

    @property
    def target(self) -> Any:
        """The origin's own filesystem, with no listing of before."""
        if self._target_made is None:
            self._target_made = fsspec.filesystem(self.target_protocol, **self.target_options)
        self._target_made.invalidate_cache()
        return self._target_made

    def _changed(self, path: str) -> None:
        self.invalidate_cache(path)  # type: ignore[attr-defined] # the other half's

    def _must_be_new(self, path: str) -> None:
        if self.exists(path):  # type: ignore[attr-defined] # as above
            raise FileExistsError(f"{path} exists already")

    def _stripped(self, path: Any) -> Any:
        return self._strip_protocol(path)  # type: ignore[attr-defined] # as above

    def open_for_writing(
        self, path: str, mode: str, block_size: int | None, autocommit: bool, **kwargs: Any
    ) -> WritingFile:
        """A file that is there when it is closed."""
        if mode == "xb":
            self._must_be_new(path)
            mode = "wb"
        inner = self.target.open(path, mode, block_size=block_size, autocommit=autocommit, **kwargs)
        return WritingFile(inner, lambda: self._changed(path))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a whole file."""
        path = self._stripped(path)
        if mode == "create":
            self._must_be_new(path)
        self.target.pipe_file(path, value, **kwargs)
        self._changed(path)

    def put_file(
        self, lpath: Any, rpath: str, callback: Any = None, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """Copy a local file, or make a folder."""
        rpath = self._stripped(rpath)
        if mode == "create":
            self._must_be_new(rpath)
        more = {} if callback is None else {"callback": callback}
        self.target.put_file(lpath, rpath, **more, **kwargs)
        self._changed(rpath)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy within the origin."""
        path1, path2 = self._stripped(path1), self._stripped(path2)
        self.target.cp_file(path1, path2, **kwargs)
        self._changed(path2)

    def rm_file(self, path: str) -> None:
        """Delete a file."""
        path = self._stripped(path)
        self.target.rm_file(path)
        self._changed(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete files, or whole folders."""
        path = self._stripped(path)
        self.target.rm(path, recursive=recursive, maxdepth=maxdepth)
        for one in [path] if isinstance(path, str) else path:
            self._changed(one)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Make a folder, where the target has such a thing."""
        path = self._stripped(path)
        self.target.mkdir(path, create_parents=create_parents, **kwargs)
        self._changed(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and those above it, where the target has such a thing."""
        path = self._stripped(path)
        self.target.makedirs(path, exist_ok=exist_ok)
        self._changed(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        path = self._stripped(path)
        self.target.rmdir(path)
        self._changed(path)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Make an empty file."""
        path = self._stripped(path)
        self.target.touch(path, truncate=truncate, **kwargs)
        self._changed(path)


class WritingFile(io.BufferedIOBase):
    """The target's own file; `changed` is called when its bytes are there, or not wanted."""

    def __init__(self, inner: Any, changed: Callable[[], None]) -> None:
        self._inner = inner
        self._has_changed = changed
        self.mode = inner.mode
        self.path = inner.path

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """See the target's file."""
        return int(self._inner.write(data))

    def tell(self) -> int:
        """Bytes written."""
        return int(self._inner.tell())

    def flush(self) -> None:
        """See the target's file."""
        if not self.closed:
            self._inner.flush()

    def commit(self) -> None:
        """End of a transaction: the file gets its place."""
        self._inner.commit()
        self._has_changed()

    def discard(self) -> None:
        """A transaction that failed."""
        self._inner.discard()
        self._has_changed()

    def close(self) -> None:
        """Write what is left."""
        if self.closed:
            return
        try:
            super().close()
        finally:
            self._inner.close()
            self._has_changed()
