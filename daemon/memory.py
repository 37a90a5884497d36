"""One limit for all memory of a daemon: its arenas, those of daemons before it, and its own heap.

`daemon.memory_bytes` bounds the sum. Some of it is kept for the heap (`heap_reserved_bytes`),
which is bounded part by part (every queue and buffer has a limit); the arenas have the rest. An
arena costs memory as it is used, so after a restart, while clients still map the old one, the new
one is used only as far as both fit: half of what is left, so that one more restart finds some too.

Owned by the daemon's loop.
"""

from __future__ import annotations

from gpufeed.cachefs.arena.elsewhere import Elsewhere
from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.errors import CapacityError, DaemonUnavailableError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.units import MIB, format_bytes
from gpufeed.daemon.windows import Windows

# Seen at most with 500 streams: 84 MiB. In a small container it is half of all.
HEAP_BYTES_RESERVED_MAX = 128 * MIB


def heap_reserved_bytes(memory_bytes: int) -> int:
    """What the arenas leave of the limit."""
    return min(HEAP_BYTES_RESERVED_MAX, memory_bytes // 2)


def heap_bytes(process: int | str = "self") -> int:
    """What a process has of memory that is nobody else's: not the arena, not files."""
    with open(f"/proc/{process}/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0  # a kernel that does not tell; then nothing is refused for it


class ArenaMemory:
    """What of an arena may be used beside earlier ones.

    Args:
        limit_bytes: for this arena and earlier ones together.
        pool: the arena's slots.
        windows: what its sessions may hold.
        metrics: has the gauges.
    """

    def __init__(
        self, limit_bytes: int, pool: SlotPool, windows: Windows, metrics: Metrics
    ) -> None:
        self._limit_bytes = limit_bytes
        self._pool = pool
        self._windows = windows
        self._metrics = metrics
        self._elsewhere = Elsewhere(pool.arena.arena_id)

    def begin(self, session: int, held: tuple[tuple[str, int], ...]) -> None:
        """A client that still maps these comes; its window is granted of what is left."""
        self._elsewhere.hold(session, held)
        self._count()

    def dropped(self, session: int, arena_id: str) -> None:
        """It has let go of one."""
        self._elsewhere.drop(session, arena_id)
        self._count()

    def refusal(self) -> DaemonUnavailableError | None:
        """Why no session finds room, where that will pass by itself."""
        held_bytes = self._elsewhere.total_bytes
        if not held_bytes:
            return None
        return DaemonUnavailableError(
            f"readers still map {format_bytes(held_bytes)} of the arenas of earlier daemons, and "
            f"all arenas have {format_bytes(self._limit_bytes)} together: it passes when they let "
            "go of their views; or raise daemon.memory_bytes"
        )

    def end(self, session: int) -> None:
        """The client is gone."""
        self._elsewhere.forget(session)
        self._count()

    def _count(self) -> None:
        held_bytes = self._elsewhere.total_bytes
        arena = self._pool.arena
        room_bytes = max(0, self._limit_bytes - held_bytes)
        if held_bytes:
            room_bytes //= 2
        room = room_bytes // arena.extent_bytes
        self._metrics.set("arena_elsewhere_bytes", held_bytes)
        self._pool.limit_touched(min(room, arena.slot_count))
        # What was used already is there to be used again.
        self._windows.limit(min(max(room, self._pool.table.touched_count), arena.slot_count))


def require_heap(limit_bytes: int, metrics: Metrics) -> None:
    """One more session may come.

    Raises:
        CapacityError: the heap has outgrown what the arenas leave of the limit.
    """
    used_bytes = heap_bytes()
    metrics.set("heap_bytes", used_bytes)
    if used_bytes > limit_bytes:
        raise CapacityError(
            f"the daemon's own heap is {format_bytes(used_bytes)}; daemon.memory leaves it "
            f"{format_bytes(limit_bytes)} beside the arena: close sessions, raise "
            "daemon.memory_bytes, or lower arena.size_bytes"
        )
