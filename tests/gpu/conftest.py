"""All of this folder needs a CUDA device, and skips itself where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "loaders"))  # contracts and the fake daemon
sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # Drivers and devices warn of much that is no concern of ours.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if not torch.cuda.is_available():
                item.add_marker(missing)
