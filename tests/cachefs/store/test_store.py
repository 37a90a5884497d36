"""The store on a real directory: in, out, evicted, refused."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from pathlib import Path

import pytest
from store_rig import Rig

from gpufeed.cachefs.config import StoreConfig
from gpufeed.cachefs.errors import (
    DiskLateError,
    IntegrityError,
    ProtocolError,
    StorageError,
    UsageError,
)
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.sampleindex import Member, SampleIndexBuilder
from gpufeed.cachefs.store import writer
from gpufeed.cachefs.store.files import DiskFiles, Space
from gpufeed.cachefs.store.store import ShardStore
from gpufeed.cachefs.testing.clock import ManualClock
from gpufeed.cachefs.testing.faulty_files import FaultyFiles
from gpufeed.cachefs.testing.shards import (
    EXTENT_BYTES,
    content,
    make_spec,
    slot,
)
from gpufeed.cachefs.units import KIB


def sample_index(count: int = 1) -> bytes:
    builder = SampleIndexBuilder()
    for number in range(count):
        builder.add(f"key-{number}", [Member("jpg", 5 * number, 5)])
    return builder.build().encode()


class GatedFiles(DiskFiles):
    """Holds one kind of call until the test lets it go."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.began = threading.Event()
        self.gate = threading.Event()

    def _wait(self, kind: str) -> None:
        if kind == self.kind:
            self.began.set()
            assert self.gate.wait(30)

    def write(self, descriptor, data, offset):
        self._wait("write")
        super().write(descriptor, data, offset)

    def publish(self, source, target):
        super().publish(source, target)
        self._wait("publish")

    def remove(self, path):
        self._wait("remove")
        super().remove(path)

    def read(self, descriptor, target, offset):
        self._wait("read")
        return super().read(descriptor, target, offset)


async def begun(files: GatedFiles) -> None:
    assert await asyncio.to_thread(files.began.wait, 30)


# --- in, out and restart --------------------------------------------------------------------------


async def test_a_committed_shard_reads_back_and_survives_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    spec = make_spec(1)
    stored = await rig.fill(spec, index=sample_index())
    assert stored is not None
    assert stored.sample_count == 1
    assert await rig.read(spec) == content(spec)
    await rig.close()

    rig = Rig(tmp_path)
    assert rig.store.lookup(spec.digest) == stored
    assert await rig.store.sample_index(spec.digest) == sample_index()
    assert await rig.read(spec) == content(spec)
    assert rig.metrics.get("nvme_read_bytes_total") == spec.size_bytes
    await rig.close()


@pytest.mark.parametrize("size", [0, 1, 4096, EXTENT_BYTES, EXTENT_BYTES + 1])
async def test_shards_of_any_length_come_back(tmp_path: Path, size: int) -> None:
    rig = Rig(tmp_path)
    spec = make_spec(1, size)
    await rig.fill(spec)
    assert await rig.read(spec) == content(spec)
    await rig.close()


async def test_modes_are_private(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "cache")
    await rig.fill(make_spec(1))
    await rig.close()
    for path in (tmp_path / "cache").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


async def test_without_a_path_nothing_is_kept() -> None:
    store = ShardStore.open(
        StoreConfig(), extent_bytes=EXTENT_BYTES, metrics=Metrics(), clock=ManualClock()
    )
    assert store.memory_only
    assert store.reserve(make_spec(1)) is None
    assert store.lookup(make_spec(1).digest) is None
    with pytest.raises(IntegrityError):
        await store.sample_index(make_spec(1).digest)
    with pytest.raises(IntegrityError):
        await store.read_extent(make_spec(1).digest, 0, slot())
    await store.close()


async def test_a_shard_without_room_for_its_sample_index_is_not_kept(tmp_path: Path) -> None:
    spec = make_spec(1)
    builder = SampleIndexBuilder()
    draw = random.Random(1)
    for _ in range(9000):
        builder.add(draw.randbytes(12).hex(), [Member("jpg", draw.getrandbits(60), 5)])
    rig = Rig(tmp_path, capacity_bytes=spec.size_bytes + 100 * KIB)

    with pytest.raises(StorageError, match=r"raise store\.capacity"):
        await rig.fill(spec, index=builder.build().encode())

    assert not rig.holds(spec)
    assert rig.metrics.get("store_degraded") == 0
    await rig.close()


# --- reservations and their ends ------------------------------------------------------------------


async def test_an_abort_gives_the_room_back_and_may_be_repeated(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    reservation = rig.store.reserve(make_spec(1))
    await rig.store.write_extent(reservation, 0, slot(b"x"), EXTENT_BYTES)

    await rig.store.abort(reservation)
    await rig.store.abort(reservation)

    rig.check()
    await rig.close()


async def test_an_incomplete_shard_is_not_committed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    reservation = rig.store.reserve(make_spec(1))
    await rig.store.write_extent(reservation, 0, slot(b"x"), EXTENT_BYTES)

    with pytest.raises(UsageError, match="3 extents; 1 were written"):
        await rig.store.commit(reservation, [1, 2, 3], None)
    await rig.store.abort(reservation)

    assert not rig.holds(make_spec(1))
    await rig.close()


async def test_a_wrong_sample_index_is_refused_before_anything_is_visible(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with pytest.raises(ProtocolError):
        await rig.fill(make_spec(1), index=b"no index")
    assert not rig.holds(make_spec(1))
    await rig.close()


async def test_a_cancelled_commit_is_whole_all_the_same(tmp_path: Path) -> None:
    files = GatedFiles("publish")
    rig = Rig(tmp_path, files=files)
    spec = make_spec(1)
    task = asyncio.ensure_future(rig.fill(spec))
    await begun(files)

    task.cancel()
    files.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await rig.read(spec) == content(spec)
    await rig.close()


async def test_a_cancelled_write_waits_until_the_disk_lets_go_of_the_slot(tmp_path: Path) -> None:
    files = GatedFiles("write")
    rig = Rig(tmp_path, files=files)
    reservation = rig.store.reserve(make_spec(1))
    task = asyncio.ensure_future(rig.store.write_extent(reservation, 0, slot(b"x"), EXTENT_BYTES))
    await begun(files)

    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    files.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    await rig.store.abort(reservation)
    await rig.close()


async def test_closing_aborts_what_is_reserved(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    reservation = rig.store.reserve(make_spec(1))
    await rig.store.write_extent(reservation, 0, slot(b"x"), EXTENT_BYTES)
    rig.store.reserve(make_spec(2))

    await rig.close()

    assert rig.files() == []


async def test_two_reservations_of_one_shard_do_not_disturb_each_other(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    spec = make_spec(1)
    first = rig.store.reserve(spec)
    await rig.store.write_extent(first, 0, slot(b"half"), EXTENT_BYTES)

    assert await rig.fill(spec) is not None
    await rig.store.abort(first)

    assert await rig.read(spec) == content(spec)
    await rig.close()


async def test_two_commits_of_one_shard_at_once_keep_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    spec = make_spec(1)

    first, second = await asyncio.gather(rig.fill(spec), rig.fill(spec))

    assert first == second
    assert await rig.read(spec) == content(spec)
    await rig.close()


# --- eviction -------------------------------------------------------------------------------------


async def test_claimed_and_leased_shards_stay_and_the_newcomer_passes_by(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity_bytes=480 * KIB)
    first, second, third = (make_spec(i) for i in range(3))
    await rig.fill(first)
    await rig.fill(second)

    rig.claim(first, second)
    assert await rig.fill(third) is None
    rig.uses.drop(1)
    rig.store.lease(first.digest)
    assert await rig.fill(third) is not None

    assert rig.holds(first)
    assert not rig.holds(second)
    assert rig.metrics.get("evictions_total") == 1
    rig.store.release(first.digest)
    await rig.close()


async def test_a_reservation_waits_until_its_victims_are_unlinked(tmp_path: Path) -> None:
    files = GatedFiles("remove")
    rig = Rig(tmp_path, capacity_bytes=300 * KIB, files=files)
    first, second = make_spec(1), make_spec(2)
    await rig.fill(first)

    filling = asyncio.ensure_future(rig.fill(second))
    await begun(files)
    rig.check_limit()
    assert [path.name for path in rig.files()] == [first.digest]
    assert rig.store._budget.promised_bytes > 0
    files.gate.set()

    assert await filling is not None
    assert [path.name for path in rig.files()] == [second.digest]
    await rig.close()


async def test_last_uses_survive_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity_bytes=480 * KIB)
    first, second, third = (make_spec(i) for i in range(3))
    await rig.fill(first)
    await rig.fill(second)
    rig.store.touch(first.digest)
    await rig.close()

    rig = Rig(tmp_path, capacity_bytes=480 * KIB)
    await rig.fill(third)
    assert (rig.holds(first), rig.holds(second)) == (True, False)
    await rig.close()


async def test_a_floor_of_free_space_is_kept_and_noticed_when_it_lifts(tmp_path: Path) -> None:
    class Narrow(DiskFiles):
        free_bytes = 400 * KIB

        def space(self, path):
            return Space(self.free_bytes, 1000 * KIB)

    files = Narrow()
    rig = Rig(tmp_path, files=files, floor_ratio=0.25)
    assert await rig.fill(make_spec(1)) is None
    await asyncio.wait([rig.store._disk.measuring])

    files.free_bytes = 1000 * KIB
    assert await rig.fill(make_spec(1)) is None  # it asks the disk anew, off the loop
    await asyncio.wait([rig.store._disk.measuring])
    assert await rig.fill(make_spec(1)) is not None
    await rig.close()


# --- wrong bytes ----------------------------------------------------------------------------------


def flip_a_bit(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


async def test_a_wrong_byte_is_never_served_and_a_fill_brings_the_shard_back(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    spec = make_spec(1)
    for trial in range(30):
        assert await rig.fill(spec) is not None
        flip_a_bit(rig.shard_file(spec), 4096 + random.Random(trial).randrange(spec.size_bytes))
        with pytest.raises(IntegrityError, match="wrong on disk"):
            await rig.read(spec)
        assert not rig.holds(spec)
    assert await rig.fill(spec) is not None
    assert await rig.read(spec) == content(spec)
    assert rig.metrics.get("quarantined_total") == 30
    await rig.close()


async def test_many_readers_of_a_wrong_shard_set_it_aside_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    spec = make_spec(1)
    await rig.fill(spec)
    flip_a_bit(rig.shard_file(spec), 5000)
    rig.store.lease(spec.digest)

    results = await asyncio.gather(
        *(rig.store.read_extent(spec.digest, 0, slot()) for _ in range(8)), return_exceptions=True
    )

    assert all(isinstance(result, IntegrityError) for result in results)
    assert rig.metrics.get("quarantined_total") == 1
    # The old reader's lease is still there; the new file is another one.
    assert await rig.fill(spec) is not None
    assert await rig.read(spec) == content(spec)
    rig.store.release(spec.digest)
    await rig.close()


@pytest.mark.parametrize("damage", ["removed", "cut"])
async def test_a_file_that_somebody_removed_or_cut_is_fetched_again(
    tmp_path: Path, damage: str
) -> None:
    rig = Rig(tmp_path)
    spec = make_spec(1)
    await rig.fill(spec)
    if damage == "removed":
        rig.shard_file(spec).unlink()
    else:
        with rig.shard_file(spec).open("r+b") as file:
            file.truncate(5000)

    with pytest.raises(IntegrityError):
        await rig.read(spec)

    assert not rig.holds(spec)
    assert rig.metrics.get("store_degraded") == 0
    await rig.fill(spec)
    assert await rig.read(spec) == content(spec)
    await rig.close()


async def test_a_file_put_under_another_shards_name_is_not_served(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    one, other = make_spec(1), make_spec(2)
    await rig.fill(one)
    await rig.fill(other)
    rig.shard_file(one).replace(rig.shard_file(other))

    with pytest.raises(IntegrityError):
        await rig.read(other)
    with pytest.raises(IntegrityError):
        await rig.read(one)
    await rig.close()


async def test_a_shortage_of_descriptors_costs_no_shard(tmp_path: Path) -> None:
    files = FaultyFiles(DiskFiles(), code=errno.EMFILE)
    rig = Rig(tmp_path, files=files)
    spec = make_spec(1)
    await rig.fill(spec)
    files.is_broken = True
    with pytest.raises(StorageError):
        await rig.read(spec)
    files.is_broken = False

    assert await rig.read(spec) == content(spec)
    await rig.close()


async def test_a_disk_that_cannot_read_a_shard_loses_that_shard_only(tmp_path: Path) -> None:
    files = FaultyFiles(DiskFiles())
    rig = Rig(tmp_path, files=files)
    one, other = make_spec(1), make_spec(2)
    await rig.fill(one)
    await rig.fill(other)
    await asyncio.wait([rig.store._disk.measuring]) if rig.store._disk.measuring else None
    files.fail_at = files.calls_count + 2  # open, then read

    with pytest.raises(IntegrityError):
        await rig.read(one)

    assert await rig.read(other) == content(other)
    assert rig.metrics.get("store_errors_total") == 1
    assert rig.metrics.get("quarantined_total") == 1
    await rig.close()


# --- a sick disk ----------------------------------------------------------------------------------


async def test_a_degraded_disk_is_probed_and_comes_back(tmp_path: Path) -> None:
    files = FaultyFiles(DiskFiles())
    rig = Rig(tmp_path, files=files)
    files.is_broken = True
    with pytest.raises(StorageError):
        await rig.fill(make_spec(1))
    files.is_broken = False
    assert await rig.fill(make_spec(1)) is None
    assert rig.metrics.get("store_degraded") == 1

    rig.clock.advance(31)
    probe = rig.store.reserve(make_spec(1))
    assert rig.store.reserve(make_spec(2)) is None
    await rig.store.abort(probe)  # its reader left: that says nothing of the disk

    assert await rig.fill(make_spec(1)) is not None
    assert rig.metrics.get("store_degraded") == 0
    assert await rig.fill(make_spec(2)) is not None
    await rig.close()


async def test_a_bypass_does_not_use_up_the_probe(tmp_path: Path) -> None:
    files = FaultyFiles(DiskFiles())
    rig = Rig(tmp_path, files=files)
    files.is_broken = True
    with pytest.raises(StorageError):
        await rig.fill(make_spec(1))
    files.is_broken = False
    rig.clock.advance(31)

    assert rig.store.reserve(make_spec(9, 1 << 30)) is None

    assert await rig.fill(make_spec(1)) is not None
    await rig.close()


async def test_what_cannot_be_unlinked_stays_counted_and_is_tried_again(tmp_path: Path) -> None:
    files = FaultyFiles(DiskFiles())
    rig = Rig(tmp_path, capacity_bytes=300 * KIB, files=files)
    first, second = make_spec(1), make_spec(2)
    await rig.fill(first)
    files.is_broken = True

    with pytest.raises(StorageError):
        await rig.fill(second)

    rig.check_limit()
    assert rig.store._budget.unlinking_bytes > 0
    assert rig.metrics.get("store_degraded") == 1
    files.is_broken = False
    rig.clock.advance(31)
    assert await rig.fill(second) is not None
    assert rig.store._budget.unlinking_bytes == 0
    await rig.close()


async def test_a_write_that_hangs_turns_the_cache_off_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WRITE_LATE_S", 0.0)
    files = GatedFiles("write")
    rig = Rig(tmp_path, files=files)
    reservation = rig.store.reserve(make_spec(1))

    with pytest.raises(DiskLateError) as caught:
        await rig.store.write_extent(reservation, 0, slot(b"x"), EXTENT_BYTES)

    assert not caught.value.over.done()
    assert rig.metrics.get("store_degraded") == 1
    assert rig.store.reserve(make_spec(2)) is None
    files.gate.set()
    await rig.store.abort(reservation)
    assert caught.value.over.done()
    await rig.close()
