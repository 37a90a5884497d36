"""`ShardDataset`: what to read, in which order, and what to make of each sample.

A description, cheap and picklable: it opens nothing. `gpufeed.loaders.DataLoader` runs it with
workers; iterating it directly yields samples one by one in the calling thread. A sample is a dict
as WebDataset makes it: ``{"__key__": str, "__url__": shard name, "jpg": ..., "cls": ...}``, field
names in lower case. Without `decode` the fields are `bytes`. With `decode` they are read-only
memoryviews straight over the shared arena, valid only during the call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from gpufeed.cachefs.errors import UsageError
from gpufeed.cachefs.units import KIB, MIB, format_bytes
from gpufeed.loaders.order import Shuffle
from gpufeed.loaders.segments import window_of

if TYPE_CHECKING:
    from gpufeed.cachefs.client import DatasetRequest

Sample = dict[str, Any]
Kind = Literal["auto", "tar", "loose"]
OnError = Literal["raise", "skip"]

WINDOW_BYTES = 128 * MIB
WINDOW_BYTES_MIN = 256 * KIB
SKIP_LIMIT = 100


class ShardDataset:
    """Samples of tar shards, or of loose objects that the daemon groups into virtual shards.

    Args:
        urls: an address (brace patterns allowed; one ending in ``/`` is a prefix), or several.
        kind: ``"tar"``, ``"loose"``, or ``"auto"`` to tell by the names.
        decode: turns a sample dict into what the trainer wants. Runs in the decode workers, with
            `random`, `numpy.random` and torch seeded for this sample. Must not keep the fields.
        shuffle: ``"shards"`` permutes the shards each epoch; ``window(n)`` also mixes the samples
            of n of them; ``"none"`` keeps the listed order.
        seed: of the order and of the transforms.
        storage_options: endpoint, key, secret, token, region, named as ossfs names them.
        daemon: ``"auto"``, ``"required"``, ``"off"`` or a socket path; None takes the environment.
        on_error: ``"raise"`` ends the epoch at a sample whose `decode` raises; ``"skip"`` leaves
            the sample out of its batch and counts it.
        skip_limit: skipped samples an epoch before an error is raised after all.
        window_bytes: arena bytes this rank may hold at a time.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(  # noqa: PLR0913 every argument is a public option of the dataset
        self,
        urls: str | Sequence[str],
        *,
        kind: Kind = "auto",
        decode: Callable[[Sample], Any] | None = None,
        shuffle: Shuffle = "shards",
        seed: int = 0,
        storage_options: Mapping[str, str] | None = None,
        daemon: str | None = None,
        on_error: OnError = "raise",
        skip_limit: int = SKIP_LIMIT,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self.urls = (urls,) if isinstance(urls, str) else tuple(urls)
        self.kind: Kind = kind
        self.decode = decode
        self.shuffle: Shuffle = shuffle
        self.seed = seed
        self.storage_options = dict(storage_options or {})
        self.daemon = daemon
        self.on_error: OnError = on_error
        self.skip_limit = skip_limit
        self.window_bytes = window_bytes
        self.epoch: int | None = None
        self._check()

    def _check(self) -> None:
        if not self.urls or not all(self.urls):
            raise UsageError(f"urls is {self.urls!r}; give an address or a list of addresses")
        for name, value, allowed in (
            ("kind", self.kind, ("auto", "tar", "loose")),
            ("on_error", self.on_error, ("raise", "skip")),
        ):
            if value not in allowed:
                raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
        if not window_of(self.shuffle) and self.shuffle not in ("shards", "none"):
            raise UsageError(
                f'shuffle is {self.shuffle!r}; it must be "shards", "none" or window(n)'
            )
        if self.decode is not None and not callable(self.decode):
            raise UsageError(f"decode is {self.decode!r}; it must be callable")
        if self.skip_limit < 0:
            raise UsageError(f"skip_limit is {self.skip_limit}; it must not be negative")
        if self.window_bytes < WINDOW_BYTES_MIN:
            raise UsageError(
                f"window_bytes is {format_bytes(self.window_bytes)}; it must be at least "
                f"{format_bytes(WINDOW_BYTES_MIN)}"
            )

    def map(self, function: Callable[[Any], Any]) -> ShardDataset:
        """The same dataset with `function` applied after `decode`.

        With no `decode`, `function` becomes it and gets the sample dict.
        """
        other = copy.copy(self)
        other.decode = function if self.decode is None else _Chain(self.decode, function)
        return other

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration runs; later ones count on from it."""
        self.epoch = epoch

    def request(self) -> DatasetRequest:
        """What the daemon is asked for."""
        from gpufeed.cachefs.client import DatasetRequest  # noqa: PLC0415 light import

        return DatasetRequest(
            urls=self.urls, kind=self.kind, storage_options=dict(self.storage_options)
        )

    def __iter__(self) -> Iterator[Any]:
        """The samples of the next epoch, decoded in the calling thread, unbatched."""
        from gpufeed.loaders.engine import iterate_samples  # noqa: PLC0415 light import

        epoch = self.epoch or 0
        self.epoch = epoch + 1
        return iterate_samples(self, epoch)

    def __repr__(self) -> str:
        more = f" and {len(self.urls) - 1} more" if len(self.urls) > 1 else ""
        return f"ShardDataset({self.urls[0]!r}{more}, kind={self.kind!r}, seed={self.seed})"


class _Chain:
    """Function composition that pickles."""

    def __init__(self, first: Callable[[Any], Any], second: Callable[[Any], Any]) -> None:
        self.first = first
        self.second = second

    def __call__(self, sample: Any) -> Any:
        return self.second(self.first(sample))
