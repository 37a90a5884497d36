"""kill -9 while a store is being filled: what it said was committed is served, the rest is gone."""

from __future__ import annotations

import os
import random
import selectors
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpufeed.cachefs.clock import SystemClock
from gpufeed.cachefs.config import StoreConfig
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.testing import shards
from gpufeed.cachefs.units import GIB, MIB

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

ROUNDS = 20
CHILD = Path(__file__).with_name("store_child.py")
START_TIMEOUT_S = 60.0
KILL_AFTER_S_MAX = 0.25


def fill_and_kill(path: Path, capacity_bytes: int, seed: int) -> list[int]:
    """Numbers of the shards that the child reported as committed before it was killed."""
    draw = random.Random(seed)
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(path), str(capacity_bytes), str(seed)],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    reported = b""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    killed_at_s: float | None = None
    with child, selectors.DefaultSelector() as selector:
        try:
            selector.register(child.stdout, selectors.EVENT_READ)
            while killed_at_s is None or time.monotonic() < killed_at_s:
                wait_s = (killed_at_s or deadline_s) - time.monotonic()
                if selector.select(max(wait_s, 0.0)):
                    piece = os.read(child.stdout.fileno(), 1 << 16)
                    assert piece, "the child ended by itself"
                    reported += piece
                    if killed_at_s is None:
                        killed_at_s = time.monotonic() + draw.uniform(0.0, KILL_AFTER_S_MAX)
                assert time.monotonic() < deadline_s, "the child did not start"
        finally:
            child.kill()
        reported += child.stdout.read()
    lines = reported.decode().split("\n")[:-1]
    assert lines[0] == "ready"
    return [int(line) for line in lines[1:]]


@pytest.mark.parametrize("capacity_bytes", [GIB, 2 * MIB], ids=["roomy", "tight"])
async def test_a_store_killed_at_random_moments_loses_and_invents_nothing(
    tmp_path: Path, capacity_bytes: int
) -> None:
    path = tmp_path / "cache"
    committed: set[int] = set()
    mid_fill = 0
    for seed in range(ROUNDS):
        committed |= set(fill_and_kill(path, capacity_bytes, seed))
        mid_fill += any(name.endswith(".tmp") for name in file_names(path))

        store = ShardStore.open(
            StoreConfig(path=str(path), capacity_bytes=capacity_bytes, free_floor_ratio=0.0),
            extent_bytes=shards.EXTENT_BYTES, metrics=Metrics(), clock=SystemClock(),
        )  # fmt: skip
        held = 0
        for number in range(400):
            spec = shards.make_spec(number)
            if store.lookup(spec.digest) is not None:
                assert await shards.read(store, spec) == shards.content(spec)
                held += 1
            else:
                assert number not in committed or capacity_bytes < GIB, f"seed {seed}: {number}"
        assert held == len(file_names(path))
        await store.close()
        assert disk_bytes(path) <= capacity_bytes
        assert not [name for name in file_names(path) if name.endswith(".tmp")]
    assert committed, "nothing was ever committed: the run proves nothing"
    assert mid_fill, "no kill landed in a fill: the run proves nothing"


def file_names(path: Path) -> list[str]:
    return [file.name for file in (path / "shards").rglob("*") if file.is_file()]


def disk_bytes(path: Path) -> int:
    files = [file for file in (path / "shards").rglob("*") if file.is_file()]
    return sum(file.stat().st_blocks * 512 for file in files)
