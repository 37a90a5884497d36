"""A thousand wrong bytes, one at a time, anywhere in a shard's file: none is ever served."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gpufeed.cachefs import layout
from gpufeed.cachefs.clock import SystemClock
from gpufeed.cachefs.config import StoreConfig
from gpufeed.cachefs.errors import IntegrityError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.testing import shards
from gpufeed.cachefs.units import MIB

pytestmark = pytest.mark.chaos

FLIPS_COUNT = 1000
SEED = 11


def place_of(at: int, size_bytes: int) -> str:
    """Which part of the file byte `at` is in."""
    if at < layout.DATA_OFFSET:
        return "header"
    if at < layout.DATA_OFFSET + size_bytes:
        return "data"
    return "padding" if at < layout.trailer_offset(size_bytes) else "trailer"


def flip(path: Path, at: int, mask: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


@pytest.mark.slow
async def test_no_flipped_byte_is_served_and_each_shard_comes_back(tmp_path: Path) -> None:
    metrics = Metrics()
    store = ShardStore.open(
        StoreConfig(path=str(tmp_path), capacity_bytes=64 * MIB, free_floor_ratio=0.0),
        extent_bytes=shards.EXTENT_BYTES, metrics=metrics, clock=SystemClock(),
    )  # fmt: skip
    spec = shards.make_spec(1, shards.EXTENT_BYTES + 5000)
    path = tmp_path / "shards" / spec.digest[:2] / spec.digest
    whole = shards.content(spec)
    draw = random.Random(SEED)
    found: dict[str, int] = {}
    for _ in range(FLIPS_COUNT):
        if store.lookup(spec.digest) is None:
            await shards.fill(store, spec)
        # As often in each part: the data are most of the file.
        part = draw.choice(["header", "data", "padding", "trailer"])
        size_bytes = path.stat().st_size
        while place_of(at := draw.randrange(size_bytes), spec.size_bytes) != part:
            pass
        mask = draw.randrange(1, 256)
        flip(path, at, mask)
        try:
            assert await shards.read(store, spec) == whole
        except IntegrityError:
            assert store.lookup(spec.digest) is None
            found[part] = found.get(part, 0) + 1
        else:
            # What is padding is nobody's byte.
            assert part == "padding", f"byte {at} ^ {mask} of the {part} was not noticed"
            flip(path, at, mask)
    await store.close()
    assert set(found) == {"header", "data", "trailer"}
    assert metrics.get("quarantined_total") == sum(found.values()) > FLIPS_COUNT // 2
