"""A flat listing seen as folders: what lies right below one. Pure.

Object stores know keys, not folders; a folder is there while a key has it as its beginning. Keys
that end in ``/`` are what consoles leave behind for an empty folder: they show the folder, and are
no files themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpufeed.cachefs.model import ObjectInfo


@dataclass(frozen=True, slots=True)
class Entry:
    """Something below a folder. A folder's `name` ends with ``/``; it has no size and no etag.

    Attributes:
        name: relative to the folder that was listed.
        size_bytes: length of the object.
        etag: its version.
    """

    name: str
    size_bytes: int = 0
    etag: str = ""


def entries_below(infos: Iterable[ObjectInfo], folder: str, *, recursive: bool) -> Iterator[Entry]:
    """Entries of a listing under `folder`, whose address ends with ``/``.

    With `recursive` all files at any depth, and the folders that have a key of their own; else what
    is right below, each folder once.
    """
    seen = ""
    for info in infos:
        name = info.url.removeprefix(folder)
        first, slash, _ = name.partition("/")
        if not name:
            continue
        if name.endswith("/") and recursive:
            yield Entry(name)
        elif slash and not recursive:
            # Sorted by address, a folder's keys stand together.
            if first != seen:
                yield Entry(first + "/")
            seen = first
        else:
            yield Entry(name, info.size_bytes, info.etag)
