"""A daemon's log, read as it is written: what its store decided, and what a kill interrupted.

The reading thread ends with the pipe, that is with the daemon; nothing is lost by a kill, because
what a process wrote into a pipe stays there.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import BinaryIO

LINE_S_MAX = 60.0
_EVENT = re.compile(r" gpufeed\.store: (reserved|committing|committed|aborted|evicted) (\S+)")


class DaemonLog:
    """The lines so far."""

    def __init__(self, pipe: BinaryIO) -> None:
        self.lines: list[str] = []
        self._pipe = pipe
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="daemon-log")
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            for line in self._pipe:
                with self._changed:
                    self.lines.append(line.decode(errors="replace").rstrip())
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, pattern: str, count: int = 1, timeout_s: float = LINE_S_MAX) -> bool:
        """Wait until `count` more lines match. False: the daemon ended, or it took too long."""
        looked_at = len(self.lines)
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                while looked_at < len(self.lines):
                    count -= re.search(pattern, self.lines[looked_at]) is not None
                    looked_at += 1
                    if count == 0:
                        return True
                left_s = deadline_s - time.monotonic()
                if self._ended or left_s <= 0:
                    return False
                self._changed.wait(left_s)

    def finish(self) -> list[str]:
        """All lines, once the daemon is dead."""
        self._thread.join()
        return self.lines

    def text(self) -> str:
        """All lines in one."""
        return "\n".join(self.lines)


@dataclass(slots=True)
class Ledger:
    """What the store of one directory holds according to its log, over any number of daemons.

    Attributes:
        committed: digests that must be there.
        open: reserved by the daemon at hand, neither committed nor aborted.
        committing: commits under way.
        evicted: digests evicted by the daemon at hand.
        names: url of each digest ever reserved.
    """

    committed: set[str] = field(default_factory=set)
    open: set[str] = field(default_factory=set)
    committing: set[str] = field(default_factory=set)
    evicted: set[str] = field(default_factory=set)
    names: dict[str, str] = field(default_factory=dict)

    def absorb(self, lines: Iterable[str]) -> None:
        """A daemon's whole log."""
        self.open.clear()
        self.committing.clear()
        self.evicted.clear()
        for line in lines:
            found = _EVENT.search(line)
            if found is not None:
                self._event(found[1], found[2], line)

    def _event(self, what: str, digest: str, line: str) -> None:
        if what == "reserved":
            self.open.add(digest)
            self.names[digest] = line.rpartition(" ")[2]
        elif what == "committing":
            self.committing.add(digest)
        elif what in ("committed", "aborted"):
            self.open.discard(digest)
            self.committing.discard(digest)
            if what == "committed":
                self.committed.add(digest)
                self.evicted.discard(digest)
        else:
            self.committed.discard(digest)
            self.evicted.add(digest)

    def urls(self) -> list[str]:
        """Addresses of what must be there, sorted."""
        return sorted(self.names[digest] for digest in self.committed)
