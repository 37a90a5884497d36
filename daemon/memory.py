"""One limit for all memory of a daemon: its arenas, those of daemons before it, and its own heap.

`daemon.memory_bytes` bounds the sum. Some of it is kept for the heap (`heap_reserved_bytes`),
which is bounded part by part (every queue and buffer has a limit); the arenas have the rest. An
arena costs memory as it is used, so after a restart, while clients still map the old one
(`gpufeed.cachefs.arena.ledger` knows), the new one is used only as far as both fit: half of what is
left, so that one more restart finds some too. What earlier ones have is looked at when a session
begins or ends, and where an allocation would be better off with more, at most every `LOOK_PAUSE_S`.

Owned by the daemon's loop.
"""

from __future__ import annotations

import logging

from gpufeed.cachefs.arena.ledger import ArenaLedger
from gpufeed.cachefs.arena.pool import SlotPool
from gpufeed.cachefs.clock import Clock
from gpufeed.cachefs.errors import CapacityError, DaemonUnavailableError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.units import MIB, format_bytes
from gpufeed.daemon.windows import Windows

_LOG = logging.getLogger("gpufeed.memory")

# Seen at most with 500 streams: 84 MiB. In a small container it is half of all.
HEAP_BYTES_RESERVED_MAX = 128 * MIB
LOOK_PAUSE_S = 0.1


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

    Attributes:
        lock_fd: what every client gets with the arena, and keeps as long as it maps that.

    Args:
        limit_bytes: for this arena and earlier ones together.
        pool: the arena's slots.
        windows: what its sessions may hold.
        metrics: has the gauges.
        ledger: of all arenas at the daemon's socket.
        tenant: whose arena it is.
        clock: for the pause between looks.
    """

    def __init__(
        self, limit_bytes: int, pool: SlotPool, windows: Windows, metrics: Metrics, *,
        ledger: ArenaLedger, tenant: str, clock: Clock,
    ) -> None:  # fmt: skip
        self._limit_bytes = limit_bytes
        self._pool = pool
        self._windows = windows
        self._metrics = metrics
        self._ledger = ledger
        self._tenant = tenant
        self._clock = clock
        self._elsewhere_bytes = 0
        self._looked_s = 0.0
        arena = pool.arena
        self._entry = ledger.enter(arena.arena_id, arena.size_bytes, tenant)
        self.lock_fd = self._entry.fd
        pool.on_touched = self._touched
        pool.on_short = self._short
        self.look()

    def look(self) -> None:
        """See what earlier daemons' arenas take now, and use what they leave."""
        arena = self._pool.arena
        self._looked_s = self._clock.monotonic_s()
        try:
            held_bytes = self._ledger.bytes_elsewhere(self._tenant)
        except OSError as error:
            _LOG.warning("arenas of earlier daemons cannot be looked at: %s", error)
            return
        self._elsewhere_bytes = held_bytes
        room_bytes = max(0, self._limit_bytes - held_bytes)
        if held_bytes:
            room_bytes //= 2
        room = room_bytes // arena.extent_bytes
        self._metrics.set("arena_elsewhere_bytes", held_bytes)
        # What was used already is there to be used again.
        room = min(max(room, self._pool.table.touched_count), arena.slot_count)
        self._windows.limit(room)
        self._pool.limit_touched(room)

    def refusal(self) -> DaemonUnavailableError | None:
        """Why no session finds room, where that will pass by itself."""
        if not self._elsewhere_bytes:
            return None
        return DaemonUnavailableError(
            f"readers still map {format_bytes(self._elsewhere_bytes)} of the arenas of earlier "
            f"daemons, and all arenas have {format_bytes(self._limit_bytes)} together: it passes "
            "when they let go of their views; or raise daemon.memory_bytes"
        )

    def close(self) -> None:
        """The daemon's own mapping is gone."""
        self._entry.close()

    def _short(self) -> None:
        if self._clock.monotonic_s() - self._looked_s >= LOOK_PAUSE_S:
            self.look()

    def _touched(self, slot_count: int) -> None:
        self._entry.touched(slot_count * self._pool.arena.extent_bytes)


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
