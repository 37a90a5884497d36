"""What a training process imports to speak with a daemon. No network, no threads of its own.

`Session` is one connection, as the loader uses it: a plan goes out, extents and samples come back,
and everything is given back by hand (`gpufeed.cachefs.session`).
"""

from __future__ import annotations

from gpufeed.cachefs.session import Dataset, DatasetRequest, Session, ShardInfo
from gpufeed.cachefs.wire import Event, ExtentEvent, FailEvent, SamplesEvent, ShardEndEvent

__all__ = [
    "Dataset",
    "DatasetRequest",
    "Event",
    "ExtentEvent",
    "FailEvent",
    "SamplesEvent",
    "Session",
    "ShardEndEvent",
    "ShardInfo",
]
