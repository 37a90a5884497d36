"""Memory of earlier daemons that clients still map, counted against today's limit.

An arena lives as long as somebody maps it. After a restart its readers go on looking at the old one
until their views are gone; the memory of both is charged to the same pod. So each client tells what
it still maps, and the new daemon touches only so many slots that old and new arena fit together
(`gpufeed.daemon.memory`). Several clients map the same memory, which is counted once.

Pure; owned by the daemon's loop.
"""

from __future__ import annotations

from collections.abc import Iterable


class Elsewhere:
    """What the sessions of an arena said, and what it comes to."""

    def __init__(self, arena_id: str) -> None:
        self._own_id = arena_id
        self._told: dict[int, dict[str, int]] = {}

    def hold(self, session: int, held: Iterable[tuple[str, int]]) -> None:
        """A session begins, and its client still maps these arenas."""
        told = {arena_id: size for arena_id, size in held if arena_id != self._own_id}
        if told:
            self._told[session] = told

    def drop(self, session: int, arena_id: str) -> None:
        """The client has let go of one; one that it never told of is nothing to drop."""
        told = self._told.get(session)
        if told is not None:
            told.pop(arena_id, None)
            if not told:
                del self._told[session]

    def forget(self, session: int) -> None:
        """The session is over, and its client gone."""
        self._told.pop(session, None)

    @property
    def total_bytes(self) -> int:
        """All of them, each once; where clients disagree, the larger figure counts."""
        sizes: dict[str, int] = {}
        for told in self._told.values():
            for arena_id, size_bytes in told.items():
                sizes[arena_id] = max(size_bytes, sizes.get(arena_id, 0))
        return sum(sizes.values())
