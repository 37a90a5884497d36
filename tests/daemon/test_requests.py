"""Datasets that a session opens: once each, however often it asks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from gpufeed.cachefs.errors import UsageError
from gpufeed.cachefs.wire import Kind
from gpufeed.daemon.datasets import OpenDataset, Wanted
from gpufeed.daemon.requests import DATASETS_PER_SESSION_MAX, Requests


class Listing:
    """Lists a dataset of no shards for each address; its hash is the address."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self.engine = None
        self.given: list[tuple[tuple[str, str], ...]] = []

    async def open(self, wanted: Wanted) -> OpenDataset:
        self.given.append(wanted.options)
        source = SimpleNamespace(
            spec=SimpleNamespace(digest=wanted.urls[0], name=wanted.urls[0]),
            standing=None, options=wanted.options,
        )  # fmt: skip
        return OpenDataset(next(self._ids), "tar", wanted.urls[0], (source,))  # type: ignore[arg-type]

    def sizes(self, dataset: OpenDataset) -> list[int]:
        return [1]

    counts = sizes


class Book:
    """Notes what is claimed."""

    def __init__(self) -> None:
        self.claimed: list[int] = []

    def claim(self, session: int, dataset: int, digests: Iterable[str]) -> None:
        self.claimed.append(dataset)


def requests() -> Requests:
    store: Any = SimpleNamespace(adopt=lambda standings: None)
    cache: Any = SimpleNamespace(tools=SimpleNamespace(store=store, may_share=lambda _: True))
    listing: Any = Listing()
    book: Any = Book()
    lender: Any = None
    return Requests(1, listing, book, cache, lender, lambda data: None)


async def opened(requests: Requests, url: str, **options: str) -> int:
    asked = {"urls": [url], "storage_options": options}
    return int((await requests.answer(Kind.OPEN, asked))["dataset_id"])


async def test_what_is_opened_again_has_its_old_number_and_the_new_credentials() -> None:
    session = requests()
    first = await opened(session, "oss://a/1.tar", key="old")
    for _ in range(2 * DATASETS_PER_SESSION_MAX):
        assert await opened(session, "oss://a/1.tar", key="new") == first
    assert dict(session.dataset(first).sources[0].options) == {"key": "new"}
    assert await opened(session, "oss://a/2.tar") != first


async def test_more_different_ones_than_allowed_are_refused_and_leave_the_rest() -> None:
    session = requests()
    numbers = [await opened(session, f"oss://a/{i}.tar") for i in range(DATASETS_PER_SESSION_MAX)]
    with pytest.raises(UsageError, match=f"at most {DATASETS_PER_SESSION_MAX} datasets"):
        await opened(session, "oss://a/more.tar")
    assert await opened(session, "oss://a/0.tar") == numbers[0]
