"""A real disk that is too small, and one that dies: the cache steps aside, and comes back."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufeed.cachefs.config import PolicyConfig, StoreConfig
from gpufeed.cachefs.errors import IntegrityError, StorageError
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.nextuse import NextUses
from gpufeed.cachefs.policy import PlanPolicy
from gpufeed.cachefs.shares import Shares
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.testing import shards
from gpufeed.cachefs.testing.clock import ManualClock
from gpufeed.cachefs.units import GIB, MIB

pytestmark = pytest.mark.chaos

DISK_BYTES = 24 * MIB
FS_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = struct.pack("I", 2)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs to mount a small disk: {' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    if request.param == "tmpfs":
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place))
    else:
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(DISK_BYTES)
        _run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
        _run("mount", "-o", "loop", str(image), str(place))
    try:
        yield place
    finally:
        # Lazily, so that a failed test which left files open leaves no mount.
        subprocess.run(["umount", "-l", str(place)], check=True)


def open_store(
    place: Path, clock: ManualClock, metrics: Metrics, floor: float, *, keep_all: bool = False
) -> ShardStore:
    config = StoreConfig(path=str(place / "cache"), capacity_bytes=GIB, free_floor_ratio=floor)
    uses = NextUses()
    store = ShardStore.open(
        config, extent_bytes=shards.EXTENT_BYTES, metrics=metrics, clock=clock,
        policy=PlanPolicy(uses, Shares(PolicyConfig(), GIB)),
    )  # fmt: skip
    if keep_all:
        specs = (shards.make_spec(number) for number in range(1000))
        uses.claim(1, uses.numbers(spec.digest for spec in specs))
    return store


async def fill_until_refused(store: ShardStore) -> list[int]:
    """Numbers of the shards that got in before the disk was full."""
    kept: list[int] = []
    for number in range(1000):
        try:
            stored = await shards.fill(store, shards.make_spec(number))
        except StorageError:
            return kept
        if stored is None:  # measured in time
            return kept
        kept.append(number)
    raise AssertionError("the disk was never full")


async def test_a_full_disk_is_an_error_once_and_then_a_bypass(small_disk: Path) -> None:
    clock, metrics = ManualClock(), Metrics()
    store = open_store(small_disk, clock, metrics, 0.0, keep_all=True)
    # The disk shrinks behind the store's back.
    hog = small_disk / "hog"
    free = os.statvfs(small_disk)
    with hog.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - 2 * MIB)

    kept = await fill_until_refused(store)
    assert kept
    newcomer = shards.make_spec(2000)
    assert await shards.fill(store, newcomer) is None

    for number in kept:
        spec = shards.make_spec(number)
        assert await shards.read(store, spec) == shards.content(spec)
    hog.unlink()
    clock.advance(31)
    if await shards.fill(store, newcomer) is None:
        # That made it measure the disk anew.
        while store._disk.measuring is not None:
            await asyncio.wait([store._disk.measuring])
        assert await shards.fill(store, newcomer) is not None
    assert metrics.get("store_degraded") == 0
    await store.close()
    assert not list((small_disk / "cache").rglob("*.tmp"))


async def test_the_floor_is_kept_whatever_the_capacity_says(small_disk: Path) -> None:
    store = open_store(small_disk, ManualClock(), Metrics(), 0.3)
    for number in range(200):
        await shards.fill(store, shards.make_spec(number))
    await store.close()

    found = os.statvfs(small_disk)
    # The index grows beside the shards; it is small.
    assert found.f_bavail >= 0.3 * found.f_blocks - MIB / found.f_frsize


async def test_a_disk_that_dies_takes_nothing_and_ends_in_peace(small_disk: Path) -> None:
    clock, metrics = ManualClock(), Metrics()
    store = open_store(small_disk, clock, metrics, 0.0)
    spec = shards.make_spec(1)
    await shards.fill(store, spec)
    half = store.reserve(shards.make_spec(2))
    assert half is not None
    if not shut_down(small_disk):
        await store.abort(half)
        await store.close()
        pytest.skip("this file system cannot be shut down under open files")

    with pytest.raises(StorageError):
        await store.write_extent(half, 0, shards.slot(b"x"), shards.EXTENT_BYTES)
    await store.abort(half)

    assert metrics.get("store_degraded") == 1
    assert await shards.fill(store, shards.make_spec(3)) is None
    with pytest.raises(IntegrityError):
        await shards.read(store, spec)
    await store.close()


def shut_down(place: Path) -> bool:
    """As when the device goes away: every call ends in EIO."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(descriptor, FS_IOC_SHUTDOWN, NO_LOG_FLUSH)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
