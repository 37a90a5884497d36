"""What a training process imports to speak with a daemon. No network, no threads of its own.

`open_client`, and `open_async_client` under asyncio, give samples and ranges as views in place
(`gpufeed.cachefs.reading`).

`Session` is one connection, as the loader uses it: a plan goes out, extents and samples come back,
and everything is given back by hand (`gpufeed.cachefs.session`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpufeed.cachefs.reading import (
    Client,
    ClientOptions,
    Readable,
    ReadFile,
    SampleStream,
    open_client,
)
from gpufeed.cachefs.samples import ReadStats, Sample
from gpufeed.cachefs.session import Dataset, DatasetRequest, Session, ShardInfo
from gpufeed.cachefs.wire import Event, ExtentEvent, FailEvent, SamplesEvent, ShardEndEvent

if TYPE_CHECKING:
    from gpufeed.cachefs.areading import AsyncClient

__all__ = [
    "Client",
    "ClientOptions",
    "Dataset",
    "DatasetRequest",
    "Event",
    "ExtentEvent",
    "FailEvent",
    "ReadFile",
    "ReadStats",
    "Readable",
    "Sample",
    "SampleStream",
    "SamplesEvent",
    "Session",
    "ShardEndEvent",
    "ShardInfo",
    "open_async_client",
    "open_client",
]


def open_async_client(daemon: str | None = None, **options: Any) -> AsyncClient:
    """As `open_client`, for asyncio; called in the loop that will read."""
    # Processes that do without asyncio need not load it.
    from gpufeed.cachefs.areading import AsyncClient  # noqa: PLC0415

    return AsyncClient(ClientOptions(daemon=daemon, **options))
