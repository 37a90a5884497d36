"""The data path of a training process: sharded datasets and a drop-in `DataLoader`.

``from gpufeed.loaders import DataLoader, ShardDataset``. Importing this package is light: torch and
the engine are imported when a name is first used. The data path is Linux only (memfd, epoll,
descriptor passing); elsewhere the import works, warns once, and using it raises `UsageError`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpufeed.loaders.dataloader import DataLoader
    from gpufeed.loaders.dataset import ShardDataset
    from gpufeed.loaders.decode import image_crop
    from gpufeed.loaders.segments import window
    from gpufeed.loaders.transfer import record_stream, to_device
    from gpufeed.loaders.world import World

__all__ = [
    "DataLoader",
    "ShardDataset",
    "World",
    "decode",
    "image_crop",
    "record_stream",
    "to_device",
    "window",
]

_HOMES = {
    "DataLoader": "gpufeed.loaders.dataloader",
    "ShardDataset": "gpufeed.loaders.dataset",
    "World": "gpufeed.loaders.world",
    "image_crop": "gpufeed.loaders.decode",
    "record_stream": "gpufeed.loaders.transfer",
    "to_device": "gpufeed.loaders.transfer",
    "window": "gpufeed.loaders.segments",
}

if sys.platform != "linux":
    warnings.warn(
        f"gpufeed's data path is Linux only; on {sys.platform} it imports but cannot run",
        stacklevel=2,
    )


def __getattr__(name: str) -> Any:
    """Import the home of `name` on first use."""
    if name == "decode":
        return importlib.import_module("gpufeed.loaders.decode")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gpufeed.loaders' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names that are offered, imported or not."""
    return sorted(__all__)
