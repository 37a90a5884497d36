"""What a start finds, and makes of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import lmdb
import pytest
from store_rig import Rig

from gpufeed.cachefs import layout
from gpufeed.cachefs.errors import IntegrityError, OperatorError, StorageError
from gpufeed.cachefs.sampleindex import Member, SampleIndexBuilder
from gpufeed.cachefs.store.directory import IDENTITY_NAME
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.testing.shards import (
    EXTENT_BYTES,
    content,
    make_spec,
    slot,
)
from gpufeed.cachefs.units import KIB


def encoded() -> bytes:
    builder = SampleIndexBuilder()
    builder.add("k", [Member("jpg", 0, 5)])
    return builder.build().encode()


async def with_shards(path: Path, count: int, *, crash: bool = False) -> list:
    rig = Rig(path)
    specs = [make_spec(number) for number in range(count)]
    for spec in specs:
        await rig.fill(spec, index=encoded())
    if crash:
        await rig.crash()
    else:
        await rig.close()
    return specs


def everything(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


def damage_nothing(index: Path) -> None:
    """The index is as it was."""


def damage_remove(index: Path) -> None:
    for file in index.iterdir():
        file.unlink()


def damage_garbage(index: Path) -> None:
    (index / "data.mdb").write_bytes(b"garbage" * 10_000)


def damage_empty(index: Path) -> None:
    (index / "data.mdb").write_bytes(b"")


def damage_schema(index: Path) -> None:
    with lmdb.open(str(index), max_dbs=4) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as transaction:
            transaction.put(b"schema", b"1", db=meta)


def damage_record(index: Path) -> None:
    with lmdb.open(str(index), max_dbs=4) as env:
        records = env.open_db(b"shards")
        with env.begin(write=True) as transaction:
            transaction.put(bytes.fromhex(make_spec(0).digest), b"short", db=records)


@pytest.mark.parametrize(
    "damage",
    [damage_nothing, damage_remove, damage_garbage, damage_empty, damage_schema, damage_record],
)
async def test_the_index_is_rebuilt_from_the_files_alone(tmp_path: Path, damage) -> None:
    specs = await with_shards(tmp_path, 3)
    damage(tmp_path / "index")

    rig = Rig(tmp_path)

    rig.check()
    for spec in specs:
        assert rig.store.lookup(spec.digest).sample_count == 1
        assert await rig.store.sample_index(spec.digest) == encoded()
        assert await rig.read(spec) == content(spec)
    await rig.close()


@pytest.mark.parametrize("ending", ["clean", "crash", "clean, then damaged"])
async def test_after_a_clean_end_the_files_are_not_even_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    (spec,) = await with_shards(tmp_path, 1, crash=ending == "crash")
    if "damaged" in ending:
        damage_record(tmp_path / "index")
    listed: list[str] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))

    rig = Rig(tmp_path)

    assert len([path for path in listed if "shards" in str(path)]) == (
        0 if ending == "clean" else 256
    )
    assert await rig.read(spec) == content(spec)
    await rig.crash()
    listed.clear()
    rig = Rig(tmp_path)  # the mark is gone at once, not when it ends
    assert listed
    await rig.close()


async def test_a_file_removed_after_a_clean_end_is_a_miss_when_it_is_read(tmp_path: Path) -> None:
    gone, kept = await with_shards(tmp_path, 2)
    (tmp_path / "shards" / gone.digest[:2] / gone.digest).unlink()

    rig = Rig(tmp_path)
    assert await rig.read(kept) == content(kept)
    with pytest.raises(IntegrityError):
        await rig.read(gone)
    assert not rig.holds(gone)
    await rig.fill(gone)
    assert await rig.read(gone) == content(gone)
    await rig.close()


async def test_interrupted_fills_are_removed_and_committed_shards_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    kept, lost = make_spec(1), make_spec(2)
    await rig.fill(kept)
    reservation = rig.store.reserve(lost)
    await rig.store.write_extent(reservation, 0, slot(b"x"), EXTENT_BYTES)
    await rig.crash()
    assert len(rig.files()) == 2

    rig = Rig(tmp_path)
    rig.check()
    assert (rig.holds(kept), rig.holds(lost)) == (True, False)
    await rig.close()


async def test_records_without_files_are_dropped(tmp_path: Path) -> None:
    gone, kept = await with_shards(tmp_path, 2, crash=True)
    (tmp_path / "shards" / gone.digest[:2] / gone.digest).unlink()

    rig = Rig(tmp_path)
    rig.check()
    assert (rig.holds(gone), rig.holds(kept)) == (False, True)
    await rig.close()
    index = Index(str(tmp_path / "index"))
    assert index.load().digests == [kept.digest]
    index.close()


@pytest.mark.parametrize("part", ["header", "trailer", "all"])
async def test_a_file_without_a_record_and_with_a_wrong_description_is_removed(
    tmp_path: Path, part: str
) -> None:
    (spec,) = await with_shards(tmp_path, 1)
    path = tmp_path / "shards" / spec.digest[:2] / spec.digest
    data = bytearray(path.read_bytes())
    if part == "all":
        data.clear()
    else:
        data[20 if part == "header" else layout.trailer_offset(spec.size_bytes) + 20] ^= 1
    path.write_bytes(data)
    damage_remove(tmp_path / "index")

    rig = Rig(tmp_path)
    rig.check()
    assert rig.files() == []
    await rig.close()


async def test_a_file_under_another_shards_name_is_not_adopted(tmp_path: Path) -> None:
    (spec,) = await with_shards(tmp_path, 1, crash=True)
    path = tmp_path / "shards" / spec.digest[:2] / spec.digest
    path.rename(path.with_name(spec.digest[:-1] + ("0" if spec.digest[-1] != "0" else "1")))

    rig = Rig(tmp_path)
    rig.check()
    assert rig.files() == []
    await rig.close()


async def test_a_smaller_capacity_keeps_what_was_used_last(tmp_path: Path) -> None:
    specs = await with_shards(tmp_path, 4)
    rig = Rig(tmp_path)
    rig.store.touch(specs[0].digest)
    await rig.close()

    rig = Rig(tmp_path, capacity_bytes=300 * KIB)
    rig.check()
    assert [rig.holds(spec) for spec in specs] == [True, False, False, True]
    await rig.close()


async def test_shards_of_another_extent_size_are_removed(tmp_path: Path) -> None:
    await with_shards(tmp_path, 2)

    rig = Rig(tmp_path, extent_bytes=2 * EXTENT_BYTES)
    rig.check()
    assert rig.files() == []
    await rig.close()


async def test_a_second_daemon_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with pytest.raises(OperatorError, match=f"{tmp_path}: stop it"):
        Rig(tmp_path)
    assert await rig.fill(make_spec(1)) is not None
    await rig.close()


@pytest.mark.parametrize("name", ["thesis.tex", ".bashrc", "index", "shards"])
async def test_a_foreign_directory_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")

    with pytest.raises(OperatorError, match="not empty"):
        Rig(tmp_path)

    assert os.listdir(tmp_path) == [name]


async def test_a_first_start_that_was_interrupted_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lock").touch()
    (tmp_path / f"{IDENTITY_NAME}.tmp").write_text('{"form')

    rig = Rig(tmp_path)
    await rig.close()
    assert json.loads((tmp_path / IDENTITY_NAME).read_text())["format"] == 1


@pytest.mark.parametrize("identity", ['{"format": 2}', "[]", "not json", "{}"])
async def test_a_cache_of_another_format_is_refused_untouched(
    tmp_path: Path, identity: str
) -> None:
    await with_shards(tmp_path, 1)
    (tmp_path / IDENTITY_NAME).write_text(identity)
    before = everything(tmp_path)

    with pytest.raises(OperatorError, match="format"):
        Rig(tmp_path)

    assert everything(tmp_path) == before


async def test_foreign_files_among_the_shards_are_ignored(tmp_path: Path) -> None:
    (spec,) = await with_shards(tmp_path, 1)
    (tmp_path / "shards" / "00" / "README").write_text("x")
    (tmp_path / "shards" / "00" / ("z" * 32)).write_text("x")
    misplaced = tmp_path / "shards" / "00" / ("f" * 32)
    misplaced.write_text("x")

    rig = Rig(tmp_path)
    assert rig.holds(spec)
    await rig.store.close()
    assert misplaced.exists()


async def test_a_path_that_cannot_be_a_directory_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="--memory-only"):
        Rig(tmp_path / "file" / "cache")


async def test_a_moved_cache_directory_still_serves(tmp_path: Path) -> None:
    (spec,) = await with_shards(tmp_path / "old", 1)
    shutil.move(tmp_path / "old", tmp_path / "new")

    rig = Rig(tmp_path / "new")
    assert await rig.read(spec) == content(spec)
    await rig.close()
