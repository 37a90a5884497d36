"""A disk that hangs, vanishes, or refuses: readers go on at once, and keep what is still good."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from pathlib import Path

import pytest
from store_rig import Rig

from gpufeed.cachefs.errors import DiskLateError, IntegrityError, StorageError
from gpufeed.cachefs.store import reader, unlinker, writer
from gpufeed.cachefs.store.files import DiskFiles, Space
from gpufeed.cachefs.store.health import BACKOFF_S, STRIKES_MAX
from gpufeed.cachefs.testing.faulty_files import FaultyFiles
from gpufeed.cachefs.testing.shards import EXTENT_BYTES, content, make_spec, slot
from gpufeed.cachefs.units import KIB, MIB


class Hanging(DiskFiles):
    """Calls of one kind hang while `gate` is shut."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind
        self.gate = threading.Event()
        self.gate.set()

    def _pass(self, kind: str) -> None:
        if kind == self.kind:
            assert self.gate.wait(30)

    def open(self, path):
        self._pass("open")
        return super().open(path)

    def read(self, descriptor, target, offset):
        if len(target) == EXTENT_BYTES:
            self._pass("read")
        return super().read(descriptor, target, offset)

    def sync(self, descriptor):
        self._pass("sync")
        super().sync(descriptor)

    def publish(self, source, target):
        self._pass("publish")
        super().publish(source, target)

    def remove(self, path):
        self._pass("remove")
        super().remove(path)


async def measured(rig: Rig) -> None:
    while rig.store._disk.measuring is not None:
        await asyncio.wait([rig.store._disk.measuring])


@pytest.mark.parametrize("kind", ["open", "read"])
async def test_a_read_that_hangs_lets_its_reader_go_on_and_owns_the_slot_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    files = Hanging(kind)
    rig = Rig(tmp_path, files=files)
    spec = make_spec(1)
    await rig.fill(spec)
    rig.store.lease(spec.digest)
    if kind == "read":
        await rig.read(spec)  # it stays open
    monkeypatch.setattr(reader, "READ_LATE_S", 0.0)
    files.gate.clear()
    target = slot()

    with pytest.raises(DiskLateError) as caught:
        await rig.store.read_extent(spec.digest, 0, target)

    assert not caught.value.over.done()
    assert rig.metrics.get("store_degraded") == 1
    # The next ones do not even try, for a read or for a fill.
    with pytest.raises(StorageError, match="left alone"):
        await rig.store.read_extent(spec.digest, 1, slot())
    with pytest.raises(StorageError, match="left alone"):
        await rig.store.sample_index(spec.digest)
    assert rig.store.reserve(make_spec(2)) is None
    files.gate.set()
    await asyncio.wait([caught.value.over])
    if kind == "read":
        assert bytes(target) == content(spec)[:EXTENT_BYTES]

    monkeypatch.setattr(reader, "READ_LATE_S", 30.0)
    rig.clock.advance(BACKOFF_S)
    assert await rig.read(spec) == content(spec)
    assert rig.holds(spec)
    await rig.fill(make_spec(2))
    assert rig.metrics.get("store_degraded") == 0
    rig.store.release(spec.digest)
    await rig.close()


@pytest.mark.parametrize("kind", ["sync", "publish"])
async def test_a_commit_that_hangs_degrades_the_disk_and_is_whole_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(writer, "SYNC_LATE_S", 0.0)
    files = Hanging(kind)
    rig = Rig(tmp_path, files=files)
    degraded = asyncio.Event()
    failed = rig.store._failed

    def on_failed(why: object) -> None:
        failed(why)
        degraded.set()

    monkeypatch.setattr(rig.store._disk.writer, "_on_late", on_failed)
    files.gate.clear()
    task = asyncio.ensure_future(rig.fill(make_spec(1)))

    await degraded.wait()

    assert rig.metrics.get("store_degraded") == 1
    assert rig.store.reserve(make_spec(2)) is None
    files.gate.set()
    while not task.done():
        await asyncio.wait([task])
    await rig.close()


async def test_commits_that_hang_leave_threads_for_those_who_read(tmp_path: Path) -> None:
    files = Hanging("sync")
    rig = Rig(tmp_path, files=files)
    kept = make_spec(1)
    await rig.fill(kept)
    rig.store.lease(kept.digest)
    files.gate.clear()
    count = 2 * rig.store._disk.threads.count
    commits = [asyncio.ensure_future(rig.fill(make_spec(10 + i))) for i in range(count)]
    for _ in range(count):
        await asyncio.sleep(0)  # each begins, and comes as far as it can
    async with asyncio.timeout(30):
        assert await rig.read(kept) == content(kept)
    assert not any(commit.done() for commit in commits)
    files.gate.set()
    await asyncio.gather(*commits)
    rig.store.release(kept.digest)
    await rig.close()


async def test_a_removal_that_hangs_costs_the_newcomer_its_room_and_counts_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unlinker, "REMOVAL_LATE_S", 0.0)
    files = Hanging("remove")
    rig = Rig(tmp_path, capacity_bytes=KIB * 256, files=files)
    old, new = make_spec(1), make_spec(2)
    await rig.fill(old)
    files.gate.clear()
    reservation = rig.store.reserve(new)
    assert reservation is not None
    assert not rig.holds(old)

    with pytest.raises(StorageError, match="cache disk"):
        await asyncio.wait_for(
            rig.store.write_extent(reservation, 0, slot(), EXTENT_BYTES), timeout=20
        )

    assert rig.metrics.get("store_degraded") == 1
    await rig.store.abort(reservation)
    assert rig.store._budget.unlinking_bytes == sum(f.stat().st_size for f in rig.files()) > 0
    files.gate.set()
    await rig.store._disk.unlinker.drain()
    assert rig.store._budget.unlinking_bytes == 0
    assert rig.files() == []
    monkeypatch.setattr(unlinker, "REMOVAL_LATE_S", 30.0)
    rig.clock.advance(BACKOFF_S)
    assert await rig.fill(new) is not None
    assert rig.metrics.get("store_degraded") == 0
    await rig.close()


async def test_sectors_that_cannot_be_read_cost_their_shards_but_a_dying_disk_costs_few(
    tmp_path: Path,
) -> None:
    files = FaultyFiles(DiskFiles())
    rig = Rig(tmp_path, files=files)
    specs = [make_spec(number) for number in range(STRIKES_MAX + 3)]
    for spec in specs:
        await rig.fill(spec)
    await measured(rig)
    files.is_broken = True

    found = []
    for spec in specs:
        with pytest.raises((StorageError, IntegrityError)) as caught:
            await rig.read(spec)
        found.append(caught.type)

    assert found == [IntegrityError] * (STRIKES_MAX - 1) + [StorageError] * 4
    assert rig.metrics.get("quarantined_total") == STRIKES_MAX - 1
    files.is_broken = False
    rig.clock.advance(BACKOFF_S)
    for spec in specs[STRIKES_MAX - 1 :]:
        assert await rig.read(spec) == content(spec)
    await rig.close()


@pytest.mark.parametrize("impostor", ["nothing", "an empty directory", "a like directory"])
async def test_a_directory_that_went_away_is_never_replaced_by_what_lies_below(
    tmp_path: Path, impostor: str
) -> None:
    path = tmp_path / "cache"
    rig = Rig(path)
    kept, other = make_spec(1), make_spec(2)
    await rig.fill(kept)
    half = rig.store.reserve(other)
    await rig.store.write_extent(half, 0, slot(b"x"), EXTENT_BYTES)
    path.rename(tmp_path / "elsewhere")
    if impostor != "nothing":
        path.mkdir()
    if impostor == "a like directory":
        below = Rig(path)
        await below.close()
        below.store = None
    before = sorted(path.rglob("*"))

    with pytest.raises(StorageError, match="not the one"):
        await rig.read(kept)
    for extent in (1, 2):
        await rig.store.write_extent(half, extent, slot(b"x"), EXTENT_BYTES)
    with pytest.raises(StorageError, match="not the one"):
        await rig.store.commit(half, [1, 2, 3], None)
    assert await rig.fill(make_spec(3)) is None

    assert rig.metrics.get("store_degraded") == 1
    assert rig.holds(kept)
    assert sorted(path.rglob("*")) == before
    if impostor != "nothing":
        path.rename(tmp_path / "impostor")
    (tmp_path / "elsewhere").rename(path)
    rig.clock.advance(BACKOFF_S)
    assert await rig.read(kept) == content(kept)
    assert await rig.fill(make_spec(3)) is not None
    await rig.close()


async def test_a_file_system_short_of_inodes_makes_room_or_passes_by(tmp_path: Path) -> None:
    class FewInodes(DiskFiles):
        free_inodes = 100

        def space(self, path):
            return Space(64 * MIB, 64 * MIB, self.free_inodes, 1000)

    files = FewInodes()
    rig = Rig(tmp_path, files=files, floor_ratio=0.05)
    await rig.fill(make_spec(1))
    await measured(rig)
    files.free_inodes = 50
    rig.store._measure()
    await measured(rig)

    rig.store.lease(make_spec(1).digest)
    assert await rig.fill(make_spec(2)) is None
    rig.store.release(make_spec(1).digest)
    assert await rig.fill(make_spec(2)) is not None
    assert [rig.holds(make_spec(number)) for number in (1, 2)] == [False, True]
    await rig.close()


async def test_everything_is_private_even_under_an_open_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        rig = Rig(tmp_path / "cache", capacity_bytes=500 * KIB)
        for number in range(4):
            await rig.fill(make_spec(number))
        for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path
        await rig.close()
    finally:
        os.umask(old)
