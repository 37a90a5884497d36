"""What an origin is: list, head, read into the caller's memory.

Every adapter (OSS, local files, fsspec) passes `gpufeed.cachefs.testing.origin_contract`. All
methods run on the origin engine's own event loop (`gpufeed.cachefs.origin.engine`); the daemon's
loop never awaits them directly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from gpufeed.cachefs.model import ObjectInfo

# Called on the engine's thread when target number i holds its bytes.
OnTarget = Callable[[int], None]


class Origin(Protocol):
    """A place that stores immutable objects under addresses of one scheme."""

    async def head(self, url: str) -> ObjectInfo:
        """Look one object up.

        Raises:
            NotFoundError: no such bucket or object.
            AccessDeniedError: credentials refused.
            OriginUnavailableError: the retries are spent.
        """
        ...

    def list(self, prefix_url: str) -> AsyncIterator[ObjectInfo]:
        """All objects whose address begins with `prefix_url`, in ascending order of address."""
        ...

    def list_folder(self, folder_url: str) -> AsyncIterator[ObjectInfo]:
        """What is right below a folder, whose address ends with ``/``, in any order.

        Folders come as `folder_info`, each once; so may the folder itself, as a sign that it is
        there though it is empty. Nothing at all: there is no such folder.
        """
        ...

    async def read_into(
        self,
        info: ObjectInfo,
        begin_bytes: int,
        targets: Sequence[memoryview],
        on_target: OnTarget,
        *,
        demand: bool = True,
    ) -> int | None:
        """Receive ``[begin_bytes, begin_bytes + sum of lengths)`` into `targets`, in order.

        Each target is reported by `on_target(i)` once, when all of its bytes have arrived and the
        answer's status, version and range have been checked. A retry goes on where the last
        attempt ended: a target reported is never written again. `demand` says that somebody waits:
        where an origin has to choose, such reads go first, and only they are not paced.

        Returns:
            The whole object's CRC-64/XZ if the answer told it, else None.

        Raises:
            ShardChangedError: the object is not of `info.etag` any more.
            NotFoundError, AccessDeniedError, OriginUnavailableError, IntegrityError.
        """
        ...

    async def close(self) -> None:
        """Close connections. No read is under way."""
        ...
