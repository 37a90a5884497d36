"""Placement: every byte of every source goes to its place once, gaps are cleared."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs.errors import UsageError
from gpufeed.cachefs.listing import guess_kind, tar_shards, virtual_shards
from gpufeed.cachefs.model import ObjectInfo, ShardSpec, Source
from gpufeed.cachefs.placement import works, works_of_extents, zero_ranges

EXTENT = 4096 * 16


def spec_of(sizes, gaps) -> ShardSpec:
    sources, at = [], 0
    for i, (size, gap) in enumerate(zip(sizes, gaps, strict=False)):
        sources.append(Source(ObjectInfo(f"mem://b/{i}", size, "e"), at))
        at += size + gap
    last = sources[-1]
    return ShardSpec("s", last.offset_bytes + last.info.size_bytes, tuple(sources))


@given(
    st.lists(st.integers(1, 3 * EXTENT), min_size=1, max_size=6),
    st.lists(st.integers(0, EXTENT), min_size=6, max_size=6),
    st.sampled_from([EXTENT, 2 * EXTENT, 2 * EXTENT + 1000]),
)
def test_work_and_zeroes_cover_every_byte_exactly_once(sizes, gaps, part) -> None:
    spec = spec_of(sizes, gaps)
    padded = -(-spec.size_bytes // 4096) * 4096
    covered = bytearray(spec.extent_count(EXTENT) * EXTENT)
    expected = bytearray(len(covered))
    for source in spec.sources:
        end = source.offset_bytes + source.info.size_bytes
        expected[source.offset_bytes : end] = bytes([1]) * source.info.size_bytes
    for at in range(padded):
        expected[at] = expected[at] or 2

    for work in works(spec, EXTENT, part):
        for target in work.targets:
            base = target.extent * EXTENT
            place = slice(base + target.begin_bytes, base + target.end_bytes)
            assert not any(covered[place])
            covered[place] = bytes([1]) * (target.end_bytes - target.begin_bytes)
    for extent, ranges in zero_ranges(spec, EXTENT).items():
        for begin, end in ranges:
            place = slice(extent * EXTENT + begin, extent * EXTENT + end)
            assert not any(covered[place])
            covered[place] = bytes([2]) * (end - begin)

    assert covered == expected


@given(st.lists(st.integers(1, 3 * EXTENT), min_size=1, max_size=6))
def test_the_works_of_single_extents_add_up_to_the_shard(sizes) -> None:
    spec = spec_of(sizes, [0] * 6)

    total = sum(
        work.size_bytes
        for extent in range(spec.extent_count(EXTENT))
        for work in works_of_extents(spec, extent, 1, EXTENT)
    )

    assert total == spec.size_bytes


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=60))
def test_virtual_shards_hold_every_object_once_with_little_padding(sizes) -> None:
    infos = [ObjectInfo(f"oss://b/p/c{i % 3}/{i:03d}.JPG", s, f"e{i}") for i, s in enumerate(sizes)]

    shards = virtual_shards(infos, prefix="oss://b/p/", shard_bytes=4 * EXTENT, extent_bytes=EXTENT)

    names = [ref.key for shard in shards for ref in shard.index]
    assert sorted(names) == sorted(f"c{i % 3}/{i:03d}" for i in range(len(sizes)))
    for shard in shards:
        assert {m.ext for ref in shard.index for m in ref.members} == {"jpg"}
        ends = [(s.offset_bytes, s.offset_bytes + s.info.size_bytes) for s in shard.spec.sources]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
        payload = sum(s.info.size_bytes for s in shard.spec.sources)
        slack = 64 * len(ends) + 0.05 * 2 * EXTENT * shard.spec.extent_count(EXTENT)
        assert shard.spec.size_bytes <= payload + slack


def test_the_grouping_depends_on_the_listing_alone() -> None:
    infos = [ObjectInfo(f"oss://b/p/{i:03d}.jpg", 1000, "e") for i in range(100)]

    def make():
        return virtual_shards(infos, prefix="oss://b/p/", shard_bytes=20000, extent_bytes=EXTENT)

    assert [s.spec.digest for s in make()] == [s.spec.digest for s in make()]
    assert [s.info.url for s in make()[0].spec.sources] != [info.url for info in infos[:20]]


def test_one_object_read_in_another_way_is_another_shard() -> None:
    """The samples kept with one are not those of the other: their number and their keys differ."""
    infos = [ObjectInfo("oss://b/p/a.tar", 5000, "e")]

    def alone(prefix: str) -> str:
        (shard,) = virtual_shards(infos, prefix=prefix, shard_bytes=9000, extent_bytes=EXTENT)
        return shard.spec.digest

    (tar,) = tar_shards(infos)
    assert len({tar.digest, alone("oss://b/p/"), alone("oss://b/")}) == 3


@pytest.mark.parametrize("name", ["a.tar.xz", "b.TBZ2", "c.tar.lz4"])
def test_a_foreign_compression_is_refused_and_not_read_as_one_loose_sample(name: str) -> None:
    with pytest.raises(UsageError, match="compressed"):
        guess_kind([ObjectInfo(f"oss://b/{name}", 5, "e")])


@pytest.mark.parametrize(
    ("name", "codec"),
    [("a.tar", ""), ("a.tar.gz", "gzip"), ("b.TGZ", "gzip"), ("c.tar.zst", "zstd")],
)
def test_a_compressed_tar_is_a_tar_whose_length_is_not_known(name: str, codec: str) -> None:
    infos = [ObjectInfo(f"oss://b/{name}", 5, "e")]

    (spec,) = tar_shards(infos)

    assert guess_kind(infos) == "tar"
    assert (spec.codec, spec.is_sized) == (codec, not codec)
    # Known or not, it is the same shard; decompressed it is not the object itself.
    assert spec.sized(9).digest == spec.digest
    assert (tar_shards(infos, decompress=False)[0].digest == spec.digest) == (not codec)


def test_compressed_tars_are_refused_where_decompressing_is_off() -> None:
    with pytest.raises(UsageError, match=r"store\.decompress"):
        guess_kind([ObjectInfo("oss://b/a.tar.gz", 5, "e")], decompress=False)
