"""What is in the store, as the daemon's memory has it: columns of numbers, a row a shard.

A million shards cost their keys and 40 bytes each, and are loaded as whole columns; a `StoredShard`
is made when somebody asks for one. Rows of shards that left are used again. Nothing here reads the
index: once loaded, serving never looks there (`store.index`).

Pure; used on the loop's thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from gpufeed.cachefs.store.heads import ADOPTED_USE, Head, Heads


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A committed shard."""

    digest: str
    size_bytes: int
    file_bytes: int
    sample_count: int | None


class Catalog:
    """See the top of the file."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._sizes = array("q")
        self._file_sizes = array("q")
        self._sample_counts = array("q")
        self._uses = array("q")
        self._vacant: list[int] = []
        self._unsaved: dict[str, int] = {}
        self._use = ADOPTED_USE

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, digest: object) -> bool:
        return digest in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def load(self, digests: list[str], heads: Heads) -> dict[str, int]:
        """Take over what a start found, into an empty catalog. Returns their rows, to be copied."""
        assert not self._rows
        self._rows = dict(zip(digests, range(len(digests)), strict=True))
        for column, name in (
            (self._sizes, "size_bytes"), (self._file_sizes, "file_bytes"),
            (self._sample_counts, "sample_count"), (self._uses, "last_use"),
        ):  # fmt: skip
            column.frombytes(heads[name].astype("<i8").tobytes())
        self._use = int(heads["last_use"].max(initial=ADOPTED_USE))
        return self._rows

    def get(self, digest: str) -> StoredShard | None:
        """The shard, if it is here."""
        row = self._rows.get(digest)
        if row is None:
            return None
        count = self._sample_counts[row]
        return StoredShard(
            digest, self._sizes[row], self._file_sizes[row], None if count < 0 else count
        )

    def add(self, digest: str, head: Head) -> StoredShard:
        """A shard was committed."""
        assert digest not in self._rows, digest
        count = -1 if head.sample_count is None else head.sample_count
        values = (head.size_bytes, head.file_bytes, count, head.last_use)
        columns = (self._sizes, self._file_sizes, self._sample_counts, self._uses)
        if self._vacant:
            row = self._vacant.pop()
            for column, value in zip(columns, values, strict=True):
                column[row] = value
        else:
            row = len(self._sizes)
            for column, value in zip(columns, values, strict=True):
                column.append(value)
        self._rows[digest] = row
        return StoredShard(digest, head.size_bytes, head.file_bytes, head.sample_count)

    def remove(self, digest: str) -> StoredShard:
        """A shard left; returns what it was."""
        stored = self.get(digest)
        assert stored is not None, digest
        self._vacant.append(self._rows.pop(digest))
        self._unsaved.pop(digest, None)
        return stored

    def touch(self, digest: str) -> None:
        """A shard of these was used."""
        self._unsaved[digest] = self._uses[self._rows[digest]] = self.next_use()

    def next_use(self) -> int:
        """A serial number, later than all before."""
        self._use += 1
        return self._use

    def unsaved_uses(self) -> dict[str, int]:
        """Last uses that the index does not know yet."""
        return dict(self._unsaved)
