"""What a reader of ``cachebench share`` is told and what it answers. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One reader's work.

    Attributes:
        mode: ``session``, ``plain``, ``bare``, ``wake`` or ``ping``.
        go_fd: reading one byte from it is the sign to begin.
        passes: over the data, in each of two readings.
        first_shard: the readers begin at different shards.
        socket: of the daemon.
        url: of the data set.
        window_bytes: wish for the session's window; 0 is the daemon's choice.
        map_fd: of the plain mapping.
        sizes_bytes: of the shards, in that mapping one after the other, in whole extents.
        extent_bytes: read at a time.
        files: read by ``bare``.
        depth: reads under way at a time, in ``bare``.
        turns: round trips, in ``wake`` and ``ping``.
        cpus: that the two ends of a round trip are kept to, ours first; empty: wherever they are
            put.
    """

    mode: str
    go_fd: int
    passes: int = 1
    first_shard: int = 0
    socket: str = ""
    url: str = ""
    window_bytes: int = 0
    map_fd: int = -1
    sizes_bytes: tuple[int, ...] = ()
    extent_bytes: int = 0
    files: tuple[str, ...] = ()
    depth: int = 4
    turns: int = 0
    cpus: tuple[int, ...] = ()

    def dump(self) -> str:
        """As text for a command line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def load(cls, text: str) -> Job:
        """See `dump`."""
        value = json.loads(text)
        value["sizes_bytes"] = tuple(value["sizes_bytes"])
        value["files"] = tuple(value["files"])
        value["cpus"] = tuple(value["cpus"])
        return cls(**value)
