"""What a session asks for and gets one answer to: datasets opened and indexed.

Owns the session's open datasets. Values come from a client and are checked here; whatever is wrong
with one is an error in its answer, never the end of the session.

Owned by the daemon's loop; several requests of one session run at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpufeed.cachefs import wire
from gpufeed.cachefs.cache import ShardCache
from gpufeed.cachefs.errors import ProtocolError, UsageError
from gpufeed.cachefs.plan import PlanBook
from gpufeed.cachefs.units import MIB
from gpufeed.cachefs.wire import Kind
from gpufeed.daemon.datasets import Datasets, OpenDataset, Wanted

REQUEST_KINDS = frozenset({Kind.OPEN, Kind.INDEX})
DATASETS_PER_SESSION_MAX = 256
OPTION_NAMES = ("endpoint", "key", "secret", "token", "region")


class Requests:
    """See the top of the file. `send` takes a packed message: progress on the way to an answer."""

    def __init__(
        self,
        session: int,
        datasets: Datasets,
        book: PlanBook,
        cache: ShardCache,
        send: Callable[[bytes], None],
    ) -> None:
        self._session = session
        self._all = datasets
        self._book = book
        self._cache = cache
        self._send = send
        self._open_datasets: dict[int, OpenDataset] = {}

    def dataset(self, dataset_id: object) -> OpenDataset:
        """A dataset that this session opened.

        Raises:
            ProtocolError: it opened none of that number.
        """
        found = self._open_datasets.get(dataset_id) if isinstance(dataset_id, int) else None
        if found is None:
            raise ProtocolError(f"dataset {dataset_id} is not open in this session")
        return found

    async def answer(self, kind: Kind, value: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            GpufeedError: the request cannot be served; the session goes on.
        """
        if kind is Kind.OPEN:
            return await self._open(value)
        return await self._index(value)

    async def _open(self, value: dict[str, Any]) -> dict[str, Any]:
        if len(self._open_datasets) >= DATASETS_PER_SESSION_MAX:
            raise UsageError(f"a session opens at most {DATASETS_PER_SESSION_MAX} datasets")
        dataset = await self._all.open(_wanted(value))
        self._open_datasets[dataset.dataset_id] = dataset
        digests = [source.spec.digest for source in dataset.sources]
        self._book.claim(self._session, digests)
        return self._describe(dataset)

    async def _index(self, value: dict[str, Any]) -> dict[str, Any]:
        dataset = self.dataset(value.get("dataset_id"))

        def progress(done: int, total: int) -> None:
            report = {"id": value.get("id"), "done": done, "total": total}
            self._send(wire.pack(Kind.PROGRESS, wire.pack_json(report)))

        await self._all.index(dataset, self._cache, progress)
        return self._describe(dataset)

    def _describe(self, dataset: OpenDataset) -> dict[str, Any]:
        return {
            "dataset_id": dataset.dataset_id,
            "kind": dataset.kind,
            "manifest_hash": dataset.manifest_hash,
            "names": [source.spec.name for source in dataset.sources],
            "sizes": [source.spec.size_bytes for source in dataset.sources],
            "counts": self._all.counts(dataset),
        }


def options_of(value: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The checked storage options of a request, sorted; empty ones left out.

    Raises:
        UsageError: no mapping, or a name that is not one of `OPTION_NAMES`.
    """
    options = value.get("storage_options", {})
    if not isinstance(options, dict):
        raise UsageError("storage_options must be a mapping of names to strings")
    unknown = [name for name in options if name not in OPTION_NAMES]
    if unknown:
        raise UsageError(
            f"storage_options has {', '.join(unknown)}; known are {', '.join(OPTION_NAMES)}"
        )
    return tuple(sorted((name, str(option)) for name, option in options.items() if option))


def _wanted(value: dict[str, Any]) -> Wanted:
    urls, size = value.get("urls"), value.get("virtual_shard_bytes", 32 * MIB)
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise ProtocolError("OPEN: urls is no list of strings")
    if not isinstance(size, int) or size < MIB:
        raise UsageError("virtual_shard_bytes must be at least 1 MiB")
    return Wanted(
        urls=tuple(urls),
        kind=str(value.get("kind", "auto")),
        virtual_shard_bytes=size,
        options=options_of(value),
    )
