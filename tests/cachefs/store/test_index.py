"""The index across versions: the schema before is brought along, a later one is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import lmdb
import pytest
from store_rig import Rig

from gpufeed.cachefs.errors import OperatorError
from gpufeed.cachefs.sampleindex import Member, SampleIndexBuilder
from gpufeed.cachefs.store.heads import Head
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.testing.shards import content, make_spec
from gpufeed.cachefs.units import KIB

# What schema 2 wrote of a shard of 5000 bytes in extents of 4096, last used at 258.
RECORD_2 = bytes.fromhex(
    "01000000" "00100000" "8813000000000000" "0040000000000000" "ffffffffffffffff"
    "02000000" "0100000000000000" "0200000000000000"
)  # fmt: skip
USE_2 = bytes.fromhex("0201000000000000")
KEY = bytes(range(16))


def make_schema_2(path: Path, entries: dict[bytes, tuple[bytes, bytes | None]]) -> None:
    path.mkdir(exist_ok=True)
    for file in path.iterdir():
        file.unlink()
    with lmdb.open(str(path), max_dbs=4) as env:
        meta, records, samples, uses = (
            env.open_db(name) for name in (b"meta", b"records", b"samples", b"uses")
        )
        with env.begin(write=True) as transaction:
            transaction.put(b"schema", b"2", db=meta)
            for key, (record, use) in entries.items():
                transaction.put(key, record, db=records)
                transaction.put(key, b"packed samples", db=samples)
                if use is not None:
                    transaction.put(key, use, db=uses)


def record_2(size_bytes: int, file_bytes: int, count: int, samples: int) -> bytes:
    head = struct.pack("<HHIQQqI", 1, 0, 64 * KIB, size_bytes, file_bytes, samples, count)
    return head + bytes(8 * count)


def test_heads_of_the_schema_before_are_taken_over(tmp_path: Path) -> None:
    other = bytes(range(1, 17))
    make_schema_2(
        tmp_path,
        {KEY: (RECORD_2, USE_2), other: (RECORD_2, None), b"short key": (RECORD_2, None),
         bytes(16): (b"damaged", None)},
    )  # fmt: skip

    index = Index(str(tmp_path))
    found = index.load()
    assert found.digests == [KEY.hex(), other.hex()]
    assert found.heads["size_bytes"].tolist() == [5000, 5000]
    assert found.heads["file_bytes"].tolist() == [16384, 16384]
    assert found.heads["sample_count"].tolist() == [-1, -1]
    assert found.heads["last_use"].tolist() == [258, 0]
    assert not index.is_clean
    index.close()
    # Once brought along it is an index like any other.
    index = Index(str(tmp_path))
    assert index.load().digests == found.digests
    index.close()
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin() as transaction:
        names = [bytes(name) for name, _ in transaction.cursor()]
    assert names == [b"meta", b"shards"]


async def test_a_cache_of_the_schema_before_loses_no_shard_and_no_order(tmp_path: Path) -> None:
    builder = SampleIndexBuilder()
    builder.add("k", [Member("jpg", 0, 5)])
    rig = Rig(tmp_path, capacity_bytes=700 * KIB)
    specs = [make_spec(number) for number in range(3)]
    for spec in specs:
        await rig.fill(spec, index=builder.build().encode())
    stored = [rig.store.lookup(spec.digest) for spec in specs]
    await rig.close()
    make_schema_2(
        tmp_path / "index",
        {
            bytes.fromhex(shard.digest): (
                record_2(shard.size_bytes, shard.file_bytes, 3, 1), struct.pack("<Q", use)
            )
            for shard, use in zip(stored, (30, 10, 20), strict=True)
        },
    )  # fmt: skip

    rig = Rig(tmp_path, capacity_bytes=500 * KIB)

    rig.check()
    for spec in specs:
        assert await rig.read(spec) == content(spec)
        assert await rig.store.sample_index(spec.digest) == builder.build().encode()
    await rig.fill(make_spec(3))
    assert [rig.holds(spec) for spec in specs] == [True, False, True]
    await rig.close()


async def test_a_later_schema_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    spec = make_spec(1)
    await rig.fill(spec)
    await rig.close()
    with lmdb.open(str(tmp_path / "index"), max_dbs=8) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as transaction:
            transaction.put(b"schema", b"4", db=meta)
            transaction.put(b"writer", b"gpufeed 9.1", db=meta)

    with pytest.raises(OperatorError, match=r"written by gpufeed 9\.1 in schema 4"):
        Rig(tmp_path)

    with lmdb.open(str(tmp_path / "index"), max_dbs=8) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as transaction:
            transaction.put(b"schema", b"3", db=meta)
    rig = Rig(tmp_path)  # its lock was let go, and nothing was touched
    assert rig.holds(spec)
    await rig.close()


def test_the_clean_mark_lasts_until_the_next_open(tmp_path: Path) -> None:
    index = Index(str(tmp_path))
    assert not index.is_clean
    index.mark_clean()
    index.close()
    index = Index(str(tmp_path))
    assert index.is_clean
    index.close()
    index = Index(str(tmp_path))
    assert not index.is_clean
    index.close()


def test_entries_of_a_wrong_length_are_damage_and_hide_no_other(tmp_path: Path) -> None:
    index = Index(str(tmp_path))
    index.put([(KEY.hex(), Head(4096, 1, 8192, None))])
    index.close()
    with lmdb.open(str(tmp_path), max_dbs=8) as env:
        shards = env.open_db(b"shards")
        with env.begin(write=True) as transaction:
            transaction.put(b"odd", bytes(48), db=shards)
            transaction.put(bytes(16), b"short", db=shards)

    index = Index(str(tmp_path))
    found = index.load()
    assert (found.digests, found.damaged_count) == ([KEY.hex()], 1)
    index.close()
