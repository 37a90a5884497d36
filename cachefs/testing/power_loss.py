"""A cache disk whose power may go: what was not synced survives in part, or not at all.

`LossyFiles` satisfies `Files` over a real directory, and remembers what a disk would owe: blocks
written to files but not synced, and names made, moved and removed in directories but not synced.
At step `loss_at` (every call that changes something is a step, a rename and the sync of its
directory are two) the machine is off: that call and all later ones fail and do nothing.
`survivors` then writes what the disk holds: all that was synced, and of the rest, block by block
and name by name, what a seeded draw keeps. Sizes of unsynced files are drawn too.

LMDB syncs each of its transactions. `lossy_index` makes an `Index` whose transactions are steps and
whose file is copied after each; `survivors` may put back an older copy than the last, as after a
drive that lied about its sync. The copies begin when the environment was opened.

For tests. Thread-safe: the store calls from its disk threads.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpufeed.cachefs.errors import StorageError
from gpufeed.cachefs.store.files import DiskFiles, Files, Space
from gpufeed.cachefs.store.heads import Head
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.units import BLOCK_BYTES

INDEX_COPIES_MAX = 3
_DATA_NAME = "data.mdb"


@dataclass(slots=True, eq=False)
class _File:
    """What of a file is on the disk, and what is owed."""

    durable: bytearray
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    size_bytes: int = 0

    def sync(self) -> None:
        self.durable.extend(bytes(max(0, self.size_bytes - len(self.durable))))
        for offset, data in self.pending:
            self.durable[offset : offset + len(data)] = data
        self.pending.clear()

    def survivor(self, draw: random.Random) -> bytes:
        found = bytearray(self.durable)
        keep_ratio = draw.choice((0.0, 0.5, 1.0))
        for offset, data in self.pending:
            for at in range(0, len(data), BLOCK_BYTES):
                if draw.random() < keep_ratio:
                    end = offset + at + BLOCK_BYTES
                    found.extend(bytes(max(0, end - len(found))))
                    found[offset + at : end] = data[at : at + BLOCK_BYTES]
        if draw.random() < 0.5:
            found.extend(bytes(max(0, self.size_bytes - len(found))))
        return bytes(found)


@dataclass(frozen=True, slots=True)
class _Naming:
    """One change of a directory: names that go, and a name that comes with its file."""

    folder: str
    gone: str | None
    path: str | None = None
    file: _File | None = None

    def apply(self, names: dict[str, _File]) -> None:
        if self.gone is not None:
            names.pop(self.gone, None)
        if self.path is not None and self.file is not None:
            names[self.path] = self.file


class LossyFiles:
    """Satisfies `Files`. See the top of the file.

    Attributes:
        steps_count: steps so far.
        loss_at: the step that is not taken any more, from 1; 0 for none.
        is_off: the power went.
    """

    def __init__(self, root: Path, inner: Files | None = None) -> None:
        self._inner: Files = DiskFiles() if inner is None else inner
        self._root = root
        self._lock = threading.RLock()
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._namings: list[_Naming] = []
        self._descriptors: dict[int, _File] = {}
        self._index_copies: list[bytes] = []
        self.steps_count = 0
        self.loss_at = 0
        self.is_off = False
        for path in (root / "shards").rglob("*") if root.exists() else ():
            if path.is_file():
                data = path.read_bytes()
                self._names[str(path)] = _File(bytearray(data), size_bytes=len(data))
        self._durable_names.update(self._names)

    def step(self) -> None:
        """Count a step; the machine may be off now.

        Raises:
            StorageError: it is.
        """
        self.steps_count += 1
        if self.steps_count == self.loss_at:
            self.is_off = True
        self._check()

    def _check(self) -> None:
        if self.is_off:
            cause = OSError(errno.EIO, os.strerror(errno.EIO))
            raise StorageError("the power is gone") from cause

    def create(self, path: str, size_bytes: int) -> int:
        """See `Files`."""
        with self._lock:
            self.step()
            descriptor = self._inner.create(path, size_bytes)
            made = _File(bytearray(), size_bytes=size_bytes)
            self._names[path] = self._descriptors[descriptor] = made
            self._namings.append(_Naming(os.path.dirname(path), None, path, made))
            return descriptor

    def open(self, path: str) -> int:
        """See `Files`."""
        self._check()
        return self._inner.open(path)

    def close(self, descriptor: int) -> None:
        """See `Files`."""
        with self._lock:
            self._descriptors.pop(descriptor, None)
        self._inner.close(descriptor)

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        """See `Files`."""
        with self._lock:
            self.step()
            self._inner.write(descriptor, data, offset)
            file = self._descriptors[descriptor]
            file.pending.append((offset, bytes(data)))
            file.size_bytes = max(file.size_bytes, offset + len(data))

    def read(self, descriptor: int, target: memoryview, offset: int) -> int:
        """See `Files`."""
        self._check()
        return self._inner.read(descriptor, target, offset)

    def sync(self, descriptor: int) -> None:
        """See `Files`."""
        with self._lock:
            self.step()
            self._descriptors[descriptor].sync()

    def publish(self, source: str, target: str) -> None:
        """See `Files`."""
        with self._lock:
            self.step()
            # The inner one would sync the directory as well: that is our own next step.
            os.rename(source, target)
            file = self._names.pop(source)
            self._names[target] = file
            self._namings.append(_Naming(os.path.dirname(target), source, target, file))
        self.sync_directory(os.path.dirname(target))

    def remove(self, path: str) -> None:
        """See `Files`."""
        with self._lock:
            self.step()
            self._inner.remove(path)
            if self._names.pop(path, None) is not None:
                self._namings.append(_Naming(os.path.dirname(path), path))

    def sync_directory(self, path: str) -> None:
        """See `Files`."""
        with self._lock:
            self.step()
            for naming in [n for n in self._namings if n.folder == path]:
                naming.apply(self._durable_names)
                self._namings.remove(naming)

    def identity(self, path: str) -> tuple[int, int]:
        """See `Files`."""
        self._check()
        return self._inner.identity(path)

    def space(self, path: str) -> Space:
        """See `Files`."""
        self._check()
        return self._inner.space(path)

    def keep_index(self) -> None:
        """A transaction of the index is durable."""
        self._index_copies.append((self._root / "index" / _DATA_NAME).read_bytes())
        del self._index_copies[:-INDEX_COPIES_MAX]

    def survivors(self, target: Path, draw: random.Random, *, index_lies: bool) -> None:
        """Write what the disk holds to `target`. `index_lies`: perhaps an older index."""
        names = dict(self._durable_names)
        if draw.random() < 0.5:
            # Journals keep the order: all changes up to some moment.
            kept = self._namings[: draw.randint(0, len(self._namings))]
        else:
            kept = [naming for naming in self._namings if draw.random() < 0.5]
        for naming in kept:
            naming.apply(names)
        target.mkdir()
        for i in range(256):
            (target / "shards" / f"{i:02x}").mkdir(parents=True)
        for path, file in names.items():
            (target / Path(path).relative_to(self._root)).write_bytes(file.survivor(draw))
        for name in ("gpufeed.json", "lock"):
            shutil.copy(self._root / name, target / name)
        (target / "index").mkdir()
        copy = draw.choice(self._index_copies) if index_lies else self._index_copies[-1]
        (target / "index" / _DATA_NAME).write_bytes(copy)


def lossy_index(files: LossyFiles) -> type[Index]:
    """The class of an index on the same disk as `files`."""

    class LossyIndex(Index):
        """Its transactions are steps, durable one by one."""

        def __init__(self, path: str) -> None:
            super().__init__(path)
            files.keep_index()

        def put(self, entries: Iterable[tuple[str, Head]]) -> None:
            files.step()
            super().put(entries)
            files.keep_index()

        def put_uses(self, uses: Mapping[str, int]) -> None:
            files.step()
            super().put_uses(uses)
            files.keep_index()

        def delete(self, digests: Iterable[str]) -> None:
            files.step()
            super().delete(digests)
            files.keep_index()

        def mark_clean(self) -> None:
            files.step()
            super().mark_clean()
            files.keep_index()

    return LossyIndex
