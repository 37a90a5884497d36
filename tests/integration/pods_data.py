"""The decode function of `test_pods.py`, importable in spawned workers."""

from __future__ import annotations

import hashlib
from typing import Any


def checksum(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample's key, and what its image adds up to."""
    return {"key": sample["__key__"], "sum": hashlib.sha256(sample["jpg"]).hexdigest()}
