"""What a training process imports to speak with a daemon. No network, no threads of its own.

`open_client` gives samples and ranges as views in place (`gpufeed.cachefs.reading`).

`Session` is one connection, as the loader uses it: a plan goes out, extents and samples come back,
and everything is given back by hand (`gpufeed.cachefs.session`).
"""

from __future__ import annotations

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
    "open_client",
]
