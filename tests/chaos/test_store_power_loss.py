"""The power goes at any step: nothing wrong is served, what was committed is there, nothing leaks.

Many lives in a row, each over what the one before left on the disk: shards come, go, are used; at a
drawn step the machine is off. The seed of a life says everything that happens in it.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from gpufeed.cachefs.clock import SystemClock
from gpufeed.cachefs.config import StoreConfig
from gpufeed.cachefs.errors import GpufeedError, StorageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.store import parts
from gpufeed.cachefs.store.files import DiskFiles, Files
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.testing import shards
from gpufeed.cachefs.testing.power_loss import LossyFiles, lossy_index
from gpufeed.cachefs.units import KIB

pytestmark = pytest.mark.chaos

CAPACITY_BYTES = 500 * KIB
SHARDS_COUNT = 6
LIVES_COUNT = 240
STEPS_MAX = 60
# A commit alone: create, three extents, trailer, header, sync, rename, directory, index.
COMMIT_STEPS = 10


def open_store(path: Path, files: Files) -> ShardStore:
    return ShardStore.open(
        StoreConfig(path=str(path), capacity_bytes=CAPACITY_BYTES, free_floor_ratio=0.0),
        extent_bytes=shards.EXTENT_BYTES, metrics=Metrics(), clock=SystemClock(), files=files,
    )  # fmt: skip


def file_names(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "shards").rglob("*") if file.is_file())


async def live(store: ShardStore, files: LossyFiles, draw: random.Random) -> set[int]:
    """Do what stores do until the power goes or the life is over; returns what it holds."""
    for _ in range(draw.randint(1, 8)):
        number = draw.randrange(SHARDS_COUNT)
        spec = shards.make_spec(number)
        with contextlib.suppress(GpufeedError):
            if store.lookup(spec.digest) is None:
                await shards.fill(store, spec)
            else:
                store.touch(spec.digest)
                assert await shards.read(store, spec) == shards.content(spec)
    return {n for n in range(SHARDS_COUNT) if shards.make_spec(n).digest in store._shards}


async def check_survivors(path: Path, must: set[int], *, index_lies: bool = False) -> None:
    store = open_store(path, DiskFiles())
    assert file_names(path) == sorted(store._shards)
    sizes = sum(file.stat().st_size for file in (path / "shards").rglob("*") if file.is_file())
    assert sizes == store._budget.resident_bytes <= CAPACITY_BYTES
    for number in range(SHARDS_COUNT):
        spec = shards.make_spec(number)
        if store.lookup(spec.digest) is not None:
            assert await shards.read(store, spec) == shards.content(spec)
        elif number in must:
            # An older index knows older uses: a shard evicted since may come back in its place.
            free_bytes = CAPACITY_BYTES - store._budget.resident_bytes
            assert index_lies and free_bytes < spec.size_bytes, f"shard {number} is gone"
    await store.close()


async def one_life(
    place: Path, number: int, loss_at: int, monkeypatch: pytest.MonkeyPatch, *, index_lies: bool
) -> bool:
    """A life over ``place/number``, its survivors in ``place/number+1``; whether the power went."""
    draw = random.Random(number)
    path, after = place / str(number), place / str(number + 1)
    files = LossyFiles(path)
    monkeypatch.setattr(parts, "Index", lossy_index(files))
    files.loss_at = loss_at
    must: set[int] = set()
    try:
        store = open_store(path, files)
    except StorageError:
        assert files.is_off
    else:
        must = await live(store, files, draw)
        # It goes while the store closes, after it has closed, or before.
        files.is_off |= draw.random() < 0.3
        await store.close()
    lost = files.is_off
    monkeypatch.setattr(parts, "Index", Index)
    files.survivors(after, draw, index_lies=index_lies)
    await check_survivors(after, must, index_lies=index_lies)
    return lost


@pytest.mark.slow
@pytest.mark.parametrize("index_lies", [False, True], ids=["index-synced", "index-older"])
async def test_a_power_loss_at_any_step_loses_nothing_committed_and_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index_lies: bool
) -> None:
    (tmp_path / "0").mkdir()
    draw = random.Random(7)
    lost_count = 0
    for number in range(LIVES_COUNT):
        loss_at = draw.randint(1, STEPS_MAX)
        lost_count += await one_life(tmp_path, number, loss_at, monkeypatch, index_lies=index_lies)
    assert lost_count >= 200


async def test_a_power_loss_at_each_step_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, kept = shards.make_spec(0), shards.make_spec(1)
    for step in range(1, 40):
        path, after = tmp_path / f"{step}", tmp_path / f"{step}-after"
        path.mkdir()
        files = LossyFiles(path)
        monkeypatch.setattr(parts, "Index", lossy_index(files))
        store = open_store(path, files)
        await shards.fill(store, kept)
        files.loss_at = files.steps_count + step
        with contextlib.suppress(StorageError):
            await shards.fill(store, spec)
        was_lost = files.is_off
        files.is_off = True
        await store.close()
        monkeypatch.setattr(parts, "Index", Index)
        files.survivors(after, random.Random(step), index_lies=False)
        await check_survivors(after, {1} if was_lost else {0, 1})
        if not was_lost:
            assert step > COMMIT_STEPS
            return
    pytest.fail("the commit never ended")
