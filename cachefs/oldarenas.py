"""Arenas that this process keeps mapped although their session is over: views are left.

Each new session tells its daemon of them (`held` for HELLO), so that a daemon which replaced
another counts that memory against its limit; when the last view of such an arena is gone those
sessions are told (`DROPPED`). Process-wide, as the memory is.

Any thread, and finalisers: no locks, every step is one call on a dictionary or a set.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from gpufeed.cachefs import wire
from gpufeed.cachefs.session import Session
from gpufeed.cachefs.wire import Kind

if TYPE_CHECKING:
    from gpufeed.cachefs.leases import Leases

_kept: dict[int, tuple[str, int]] = {}
_told: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()


def held() -> tuple[tuple[str, int], ...]:
    """Each arena that is kept, once, and the bytes of memory behind it."""
    found = dict(sorted(_kept.copy().values()))
    return tuple((arena_id, size_bytes) for arena_id, size_bytes in found.items() if arena_id)


def tell_drops_to(session: Session) -> None:
    """The session's daemon was told what is held, so it is told what is dropped.

    One that gives its arena no name counts none.
    """
    if session.arena_id:
        _told[id(session)] = session


def keep(leases: Leases) -> None:
    """The session is over, and views of its arena are left."""
    _kept[id(leases)] = (leases.session.arena_id, leases.session.mapped_bytes())


def drop(leases: Leases) -> None:
    """The last view is gone; nothing happens if it was not kept."""
    arena_id, _ = _kept.pop(id(leases), ("", 0))
    if not arena_id or any(other == arena_id for other, _ in _kept.copy().values()):
        return
    # The list of references is made in one step; a set that is walked may change meanwhile.
    for reference in _told.valuerefs():
        session = reference()
        if session is not None:
            session.post(wire.pack(Kind.DROPPED, wire.pack_json({"arena_id": arena_id})))


def _forget() -> None:
    # The parent keeps them, and has told of them.
    _kept.clear()


os.register_at_fork(after_in_child=_forget)
