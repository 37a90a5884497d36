"""The power goes at any step: nothing wrong is served, what was committed is there, nothing leaks.

Many lives in a row, each over what the one before left on the disk: shards come, go, are used; at a
drawn step the machine is off. The seed of a life says everything that happens in it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
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
SHM = "/dev/shm"
LOSSES_COUNT = 200
LIVES_MAX = 300
STEPS_MAX = 36
# A commit alone: create, three extents, trailer, header, sync, rename, directory, index.
COMMIT_STEPS = 10


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is room for it: what is lost is simulated, syncs need not be real."""
    if not os.access(SHM, os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(dir=SHM, prefix="gpufeed-power-"))
    yield path
    shutil.rmtree(path)


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
            assert index_lies, f"shard {number} was committed and is gone"
            assert free_bytes < spec.size_bytes
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
    place: Path, monkeypatch: pytest.MonkeyPatch, index_lies: bool
) -> None:
    (place / "0").mkdir()
    draw = random.Random(7)
    lost_count = 0
    for number in range(LIVES_MAX):
        loss_at = draw.randint(1, STEPS_MAX)
        lost_count += await one_life(place, number, loss_at, monkeypatch, index_lies=index_lies)
        shutil.rmtree(place / str(number))
        if lost_count == LOSSES_COUNT:
            return
    pytest.fail(f"only {lost_count} losses")


async def test_a_power_loss_at_each_step_of_a_commit(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, kept = shards.make_spec(0), shards.make_spec(1)
    for step in range(1, 40):
        path, after = place / f"{step}", place / f"{step}-after"
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
