"""Room for one shard on its way into the store, and the disk space that all of them leave free."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from gpufeed.cachefs.model import ShardSpec
from gpufeed.cachefs.policy import Want
from gpufeed.cachefs.store.files import Space


@dataclass(slots=True, eq=False)
class Reservation:
    """Ended by exactly one `commit` or `abort`; made by `ShardStore.reserve`.

    Attributes:
        spec: the shard.
        want: what the policy admitted.
        number: tells it from others of the same shard.
        size_bytes: what the budget holds for it.
        granted: done once the room is there (evicted files are gone); fails if it never will be.
        is_probe: how it ends decides whether a failed disk is trusted again.
        state: `committing` while `commit` is under way.
        opening: the descriptor of its file, from the first write on.
        written: extents on the disk.
        has_published: from here on the shard's own name and record may be ours.
    """

    spec: ShardSpec
    want: Want
    number: int
    size_bytes: int
    granted: asyncio.Future[None]
    is_probe: bool = False
    state: Literal["open", "committing", "committed", "aborted"] = "open"
    opening: asyncio.Task[int] | None = None
    writes: set[asyncio.Future[Any]] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    has_published: bool = False

    def fail(self, error: Exception) -> None:
        """Whoever waits for the room gets `error`."""
        if not self.granted.done():
            self.granted.set_exception(error)
            # Seen: perhaps nobody waits.
            self.granted.exception()


class DiskRoom:
    """How much the file system has left, known without asking it on the loop.

    `measured` takes what the file system said, last time somebody asked in a disk thread; the
    files made and removed since then are added up here. Bytes and inodes have the same floor.
    """

    def __init__(self, floor_ratio: float) -> None:
        self._floor_ratio = floor_ratio
        self._free_bytes = 0
        self._floor_bytes = 0
        self._unmade_bytes = 0
        self._free_inodes: float = 0
        self._unmade_count = 0

    def measured(self, space: Space) -> None:
        """The truth, for a moment."""
        self._free_bytes = space.free_bytes
        self._floor_bytes = int(space.total_bytes * self._floor_ratio)
        floor_inodes = int(space.total_inodes * self._floor_ratio)
        # Some file systems do not count them.
        self._free_inodes = space.free_inodes - floor_inodes if space.total_inodes else math.inf

    def reserved(self, size_bytes: int) -> None:
        """A file of this size will be made."""
        self._unmade_bytes += size_bytes
        self._unmade_count += 1

    def grown(self, more_bytes: int, *, made: bool) -> None:
        """A file, made already or not, will be so much longer."""
        if made:
            self._free_bytes -= more_bytes
        else:
            self._unmade_bytes += more_bytes

    def settled(self, size_bytes: int, *, made: bool) -> None:
        """It was made, or will not be."""
        self._unmade_bytes -= size_bytes
        self._unmade_count -= 1
        if made:
            self._free_bytes -= size_bytes
            self._free_inodes -= 1

    def available_bytes(self, unlinking_bytes: int) -> int:
        """What may be taken above the floor, once the queued unlinks are done. May be negative."""
        return self._free_bytes + unlinking_bytes - self._unmade_bytes - self._floor_bytes

    def has_inode(self) -> bool:
        """Whether one more file may be made above the floor."""
        return self._free_inodes - self._unmade_count >= 1
