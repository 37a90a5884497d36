"""What a session asks for and gets one answer to: datasets opened and indexed, files.

Owns the session's open datasets; its files are in `daemon.files`. Values come from a client and are
checked here; whatever is wrong with one is an error in its answer, never the end of the session.

Owned by the daemon's loop; several requests of one session run at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpufeed.cachefs import wire
from gpufeed.cachefs.cache import ShardCache
from gpufeed.cachefs.errors import ProtocolError, UsageError
from gpufeed.cachefs.plan import PlanBook
from gpufeed.cachefs.units import MIB
from gpufeed.cachefs.wire import Kind
from gpufeed.daemon.datasets import Datasets, OpenDataset, Wanted
from gpufeed.daemon.files import FILE_KINDS, Lender, SessionFiles
from gpufeed.daemon.storageoptions import options_of

REQUEST_KINDS = frozenset({Kind.OPEN, Kind.INDEX}) | FILE_KINDS
DATASETS_PER_SESSION_MAX = 256


class Requests:
    """See the top of the file.

    Args:
        session: its number.
        datasets: of the daemon.
        book: where the session's claims are entered.
        cache: of the daemon.
        lender: lends the slots of files that are read.
        send: takes a packed message that may be lost: progress on the way to an answer.
    """

    def __init__(
        self,
        session: int,
        datasets: Datasets,
        book: PlanBook,
        cache: ShardCache,
        lender: Lender,
        send: Callable[[bytes], None],
    ) -> None:
        self._session = session
        self._all = datasets
        self._book = book
        self._cache = cache
        self._send = send
        self._files = SessionFiles(datasets, cache, lender)
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
        if kind in FILE_KINDS:
            return await self._files.answer(kind, value)
        if kind is Kind.OPEN:
            return await self._open(value)
        return await self._index(value)

    def close_file(self, value: dict[str, Any]) -> None:
        """See `SessionFiles`."""
        self._files.close_file(value)

    def close(self) -> None:
        """The session is over."""
        self._files.close()

    async def _open(self, value: dict[str, Any]) -> dict[str, Any]:
        dataset = self._known(await self._all.open(_wanted(value)))
        if len(self._open_datasets) > DATASETS_PER_SESSION_MAX:
            del self._open_datasets[dataset.dataset_id]
            raise UsageError(f"a session opens at most {DATASETS_PER_SESSION_MAX} datasets")
        digests = (source.spec.digest for source in dataset.sources)
        self._book.claim(self._session, dataset.dataset_id, digests)
        self._cache.tools.store.adopt(
            (source.spec.digest, source.standing)
            for source in dataset.sources
            if self._cache.tools.may_share(source.spec.digest)
        )
        return self._describe(dataset)

    def _known(self, dataset: OpenDataset) -> OpenDataset:
        """Under the number that the session has for it; opened again, it is not one more.

        What was given with it this time counts from now on: its credentials may be new.
        """
        for known in self._open_datasets.values():
            if (known.kind, known.manifest_hash) == (dataset.kind, dataset.manifest_hash):
                dataset = replace(dataset, dataset_id=known.dataset_id)
                break
        self._open_datasets[dataset.dataset_id] = dataset
        return dataset

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
            "sizes": self._all.sizes(dataset),
            "counts": self._all.counts(dataset),
        }


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
