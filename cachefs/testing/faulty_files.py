"""A cache disk that fails when told to: wraps any `gpufeed.cachefs.store.files.Files`.

`FaultyFiles(DiskFiles(), fail_at=n)` fails the n-th call, counted over all methods and threads. A
test that raises n until its scenario passes has tried every call of it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from gpufeed.cachefs.errors import StorageError
from gpufeed.cachefs.store.files import Files, Space

_Result = TypeVar("_Result")


class FaultyFiles:
    """Satisfies `Files`.

    Attributes:
        calls_count: calls so far, closing apart (it cannot fail).
        fail_at: number of the call that fails, from 1; 0 for none.
        is_broken: every call fails while this is set.
        happens_anyway: a failing call does its work first, as a lost acknowledgement would.
    """

    def __init__(
        self, inner: Files, *, fail_at: int = 0, code: int = errno.EIO, happens_anyway: bool = False
    ) -> None:
        self._inner = inner
        self._code = code
        self._lock = threading.Lock()
        self.calls_count = 0
        self.fail_at = fail_at
        self.is_broken = False
        self.happens_anyway = happens_anyway

    def _call(self, function: Callable[..., _Result], *args: object) -> _Result:
        with self._lock:
            self.calls_count += 1
            fails = self.is_broken or self.calls_count == self.fail_at
        if not fails:
            return function(*args)
        if self.happens_anyway and function not in (self._inner.create, self._inner.open):
            function(*args)
        cause = OSError(self._code, os.strerror(self._code))
        raise StorageError(f"a fault on demand in call {self.calls_count}: {cause}") from cause

    def create(self, path: str, size_bytes: int) -> int:
        """See `Files`."""
        return self._call(self._inner.create, path, size_bytes)

    def open(self, path: str) -> int:
        """See `Files`."""
        return self._call(self._inner.open, path)

    def close(self, descriptor: int) -> None:
        """See `Files`."""
        self._inner.close(descriptor)

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        """See `Files`."""
        self._call(self._inner.write, descriptor, data, offset)

    def read(self, descriptor: int, target: memoryview, offset: int) -> int:
        """See `Files`."""
        return self._call(self._inner.read, descriptor, target, offset)

    def sync(self, descriptor: int) -> None:
        """See `Files`."""
        self._call(self._inner.sync, descriptor)

    def publish(self, source: str, target: str) -> None:
        """See `Files`."""
        self._call(self._inner.publish, source, target)

    def remove(self, path: str) -> None:
        """See `Files`."""
        self._call(self._inner.remove, path)

    def sync_directory(self, path: str) -> None:
        """See `Files`."""
        self._call(self._inner.sync_directory, path)

    def identity(self, path: str) -> tuple[int, int]:
        """See `Files`."""
        return self._call(self._inner.identity, path)

    def space(self, path: str) -> Space:
        """See `Files`."""
        return self._call(self._inner.space, path)
