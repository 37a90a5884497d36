"""Which shards enter the store and which leave it. Decisions only; the store acts on them.

`NeverEvict`: a shard that a live plan wants stays once it is in. For one job that reads a fresh
permutation each epoch no policy hits more often, and least-recently-used hits far less. Victims
are shards that no live plan wants and nobody leases, oldest last use first; where they do not make
enough room the newcomer is streamed past the cache.

Being found wanted counts as use: the search moves such shards behind the others. So a search looks
at no more than `SCAN_LIMIT` shards however many are wanted, and the next search goes on from there.

Pure and deterministic: no I/O, no clock, no randomness; the same calls give the same answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# Shards looked at in one decision: about a millisecond of the loop's time.
SCAN_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Admit:
    """Cache it, after these have been evicted."""

    victims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bypass:
    """Stream it without caching. `reason` is for logs."""

    reason: str


class Policy(Protocol):
    """What the store tells and asks. Digests name shards; sizes are bytes on disk."""

    def add(self, digest: str, size_bytes: int) -> None:
        """The shard is resident, and was used just now."""
        ...

    def use(self, digest: str) -> None:
        """The shard was used."""
        ...

    def remove(self, digest: str) -> None:
        """The shard is not resident any more."""
        ...

    def decide(
        self,
        size_bytes: int,
        available_bytes: int,
        *,
        wanted: Callable[[str], bool],
        leased: Callable[[str], bool],
    ) -> Admit | Bypass:
        """May a shard of `size_bytes` enter, where `available_bytes` are free?"""
        ...


class NeverEvict:
    """The policy described at the top of the file."""

    def __init__(self, *, scan_limit: int = SCAN_LIMIT) -> None:
        assert scan_limit > 0, scan_limit
        self._scan_limit = scan_limit
        self._order: OrderedDict[str, int] = OrderedDict()  # digest -> bytes, oldest use first
        self._total_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, digest: str, size_bytes: int) -> None:
        """See `Policy`."""
        assert digest not in self._order, digest
        self._order[digest] = size_bytes
        self._total_bytes += size_bytes

    def use(self, digest: str) -> None:
        """See `Policy`."""
        self._order.move_to_end(digest)

    def remove(self, digest: str) -> None:
        """See `Policy`."""
        self._total_bytes -= self._order.pop(digest)

    def decide(
        self,
        size_bytes: int,
        available_bytes: int,
        *,
        wanted: Callable[[str], bool],
        leased: Callable[[str], bool],
    ) -> Admit | Bypass:
        """See `Policy`. Victims are named, not removed: the store calls `remove` for each."""
        if size_bytes <= available_bytes:
            return Admit()
        if size_bytes > available_bytes + self._total_bytes:
            return Bypass("larger than all that could be evicted")
        victims: list[str] = []
        kept: list[str] = []
        room_bytes = available_bytes
        for looked_at, (digest, victim_bytes) in enumerate(self._order.items()):
            if room_bytes >= size_bytes or looked_at >= self._scan_limit:
                break
            if leased(digest) or wanted(digest):
                kept.append(digest)
            else:
                victims.append(digest)
                room_bytes += victim_bytes
        for digest in kept:
            self._order.move_to_end(digest)
        if room_bytes < size_bytes:
            return Bypass("every other shard looked at is leased, or wanted by a live plan")
        return Admit(tuple(victims))
