"""The tar scanner against Python's tarfile and against webdataset itself."""

from __future__ import annotations

import gc
import gzip
import io
import itertools
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufeed.cachefs import tarscan
from gpufeed.cachefs.errors import CorruptSampleError
from gpufeed.cachefs.sampleindex import SampleIndexBuilder
from gpufeed.cachefs.tarscan import (
    EXTENDED_HEADER_BYTES_MAX,
    SampleGrouper,
    TarIndexer,
    TarScanner,
)

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
ARCHIVE_END_BYTES = 1024


def make_tar(
    files: Iterable[tuple[str, bytes]],
    tar_format: int = tarfile.PAX_FORMAT,
    pax_headers: dict[str, str] | None = None,
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format, pax_headers=pax_headers) as tar:
        for name, body in files:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def scan(data: bytes, cuts: Sequence[int] = ()) -> list[tuple[str, int, int]]:
    scanner = TarScanner("t.tar")
    found = []
    for piece in pieces(data, cuts):
        found += [tuple(m) for m in scanner.feed(piece, scanner.position_bytes)]
    scanner.finish(len(data))
    return found


def pieces(data: bytes, cuts: Sequence[int]) -> list[memoryview]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [memoryview(data)[a:b] for a, b in itertools.pairwise(edges)]


def by_tarfile(data: bytes) -> list[tuple[str, int, int]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(m.name, m.offset_data, m.size) for m in tar if m.isreg()]


def samples(data: bytes, cuts: Sequence[int] = ()) -> list[dict[str, bytes | str]]:
    indexer = TarIndexer("t.tar")
    found: list[dict[str, bytes | str]] = []

    def take() -> None:
        index = indexer.take()
        for ref in index or ():
            sample: dict[str, bytes | str] = {"__key__": ref.key}
            for m in ref.members:
                assert m.offset_bytes + m.size_bytes <= indexer.position_bytes
                sample[m.ext] = data[m.offset_bytes : m.offset_bytes + m.size_bytes]
            found.append(sample)

    for piece in pieces(data, cuts):
        indexer.feed(piece)
        take()
    indexer.finish()
    take()
    assert indexer.sample_count == len(found)
    assert indexer.position_bytes == len(data)
    return found


def by_webdataset(data: bytes) -> list[dict[str, bytes | str]]:
    from webdataset.tariterators import group_by_keys, tar_file_expander

    files = tar_file_expander([{"url": "t.tar", "stream": io.BytesIO(data)}])
    return [{k: v for k, v in s.items() if k != "__url__"} for s in group_by_keys(files)]


name_part = st.text(
    st.sampled_from("abAB01._- é中"), min_size=1, max_size=12
).filter(lambda s: s not in (".", ".."))  # fmt: skip
short_name = st.lists(name_part, min_size=1, max_size=3).map("/".join)
long_name = st.tuples(short_name, st.integers(90, 300)).map(lambda t: f"{'d' * t[1]}/{t[0]}")
any_name = st.one_of(short_name, short_name, long_name, st.just("__meta__/x.json"))
body = st.integers(0, 1600).map(lambda n: bytes(i % 251 for i in range(n)))
files_strategy = st.lists(st.tuples(any_name, body), max_size=8)
cuts_strategy = st.lists(st.integers(0, 1 << 20), max_size=12)


class TestMembers:
    @settings(deadline=None)
    @given(files=files_strategy, cuts=cuts_strategy, tar_format=st.sampled_from(FORMATS[1:]))
    def test_agree_with_tarfile_for_any_names_sizes_and_cuts(self, files, cuts, tar_format):
        data = make_tar(files, tar_format)
        assert scan(data, cuts) == by_tarfile(data)

    @settings(deadline=None)
    @given(
        files=st.lists(
            st.tuples(st.from_regex(r"\A[a-z]{1,60}/[a-z]{1,40}\.[a-z]{1,3}\Z"), body), max_size=6
        ),
        cuts=cuts_strategy,
    )
    def test_agree_with_tarfile_for_ustar_prefixes(self, files, cuts):
        files = [(f"{'p' * 60}/{name}", content) for name, content in files]
        data = make_tar(files, tarfile.USTAR_FORMAT)
        assert scan(data, cuts) == by_tarfile(data)

    def test_are_found_when_every_byte_comes_alone(self):
        data = make_tar([("d" * 200 + "/a.txt", b"x" * 700), ("b.txt", b"")])
        assert scan(data, range(len(data))) == by_tarfile(data)

    def test_of_other_kinds_are_stepped_over(self):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
                info = tarfile.TarInfo(f"k{kind.decode()}")
                info.type = kind
                info.linkname = "t" * 150  # a long link too
                tar.addfile(info)
            info = tarfile.TarInfo("real.txt")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
        data = out.getvalue()
        assert [m[0] for m in scan(data)] == ["real.txt"]
        assert scan(data) == by_tarfile(data)

    def test_of_an_unknown_kind_are_stepped_over_with_their_body(self):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, kind in (("odd", b"V"), ("real.txt", b"0")):
                info = tarfile.TarInfo(name)
                info.type, info.size = kind, 600
                tar.addfile(info, io.BytesIO(b"z" * 600))
        assert [m[0] for m in scan(out.getvalue())] == ["real.txt"]

    def test_take_their_size_from_a_pax_header(self):
        # A size beyond the octal field: the header holds what the pax record overrides.
        info = tarfile.TarInfo("big.bin")
        info.size = 1 << 34
        for tar_format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
            head = info.tobuf(tar_format)
            scanner = TarScanner("t.tar")
            assert list(scanner.feed(head, 0)) == [("big.bin", len(head), 1 << 34)]

    def test_take_their_name_from_a_global_pax_header(self):
        data = make_tar([("a.txt", b"1")], pax_headers={"path": "renamed.txt"})
        assert [m[0] for m in scan(data)] == ["renamed.txt"]
        assert scan(data) == by_tarfile(data)

    def test_keep_names_that_are_not_utf8(self):
        name = "图.jpg".encode("gbk").decode(errors="surrogateescape")
        data = make_tar([(name, b"1")], tarfile.GNU_FORMAT)
        assert scan(data) == by_tarfile(data)
        assert samples(data) == by_webdataset(data)

    def test_end_at_the_first_block_of_zeros(self):
        one = make_tar([("a.txt", b"1")])
        assert scan(one + make_tar([("b.txt", b"2")])) == by_tarfile(one)

    def test_may_end_without_an_end_mark(self):
        data = make_tar([("a.txt", b"1" * 512)])[: 512 + 512]
        assert scan(data) == by_tarfile(data)

    def test_bodies_are_not_looked_at(self):
        info = tarfile.TarInfo("a.bin")
        info.size = 1 << 30
        scanner = TarScanner("t.tar")
        head = info.tobuf()
        assert len(list(scanner.feed(head, 0))) == 1
        block = memoryview(bytes(1 << 20))  # zeros, which would end the archive were they read
        for _ in range(1 << 10):
            assert list(scanner.feed(block, scanner.position_bytes)) == []
        assert not scanner.ended
        assert list(scanner.feed(bytes(512), scanner.position_bytes)) == []
        assert scanner.ended


class TestErrors:
    @pytest.mark.parametrize("cut_bytes", [1, 511, 513, 1000, 1535])
    def test_a_truncated_tar_is_named_with_the_place(self, cut_bytes):
        data = make_tar([("a.txt", b"x" * 600), ("b.txt", b"y")])[:cut_bytes]
        with pytest.raises(CorruptSampleError, match=r"^t\.tar: offset \d+: truncated"):
            scan(data)

    def test_a_truncated_long_name_is_named(self):
        data = make_tar([("d" * 200, b"")], tarfile.GNU_FORMAT)
        for cut_bytes in (512, 1024):
            with pytest.raises(CorruptSampleError, match="within a header"):
                scan(data[:cut_bytes])
        with pytest.raises(CorruptSampleError, match="between a long name and its member"):
            scan(data[:1024] + bytes(1024))

    @pytest.mark.parametrize("at_bytes", [0, 130, 150, 511])
    def test_a_flipped_bit_in_a_header_is_found(self, at_bytes):
        data = bytearray(make_tar([("a.txt", b"x"), ("b.txt", b"y")]))
        data[1024 + at_bytes] ^= 0x10
        with pytest.raises(CorruptSampleError, match=r"offset 1024: .*after member 'a\.txt'"):
            scan(bytes(data))

    def test_what_was_complete_before_an_error_can_be_taken(self):
        data = bytearray(make_tar([(f"{i}.txt", b"x") for i in range(4)]))
        data[3 * 1024] ^= 0xFF
        indexer = TarIndexer("t.tar")
        for _ in range(2):
            with pytest.raises(CorruptSampleError, match="offset 3072"):
                indexer.feed(memoryview(bytes(data)))
        with pytest.raises(CorruptSampleError, match="offset 3072"):
            indexer.finish()
        index = indexer.take()
        assert index is not None
        assert [ref.key for ref in index] == ["0", "1"]

    def test_an_empty_shard_is_named(self):
        with pytest.raises(CorruptSampleError, match="empty"):
            scan(b"")

    @pytest.mark.parametrize("size_bytes", [100, 99_999])
    def test_a_compressed_tar_is_named(self, size_bytes):
        data = gzip.compress(bytes(i * i * i // 7 % 256 for i in range(size_bytes)))
        with pytest.raises(CorruptSampleError, match=r"compressed \(gzip\)"):
            scan(data)

    def test_something_else_is_not_a_tar(self):
        with pytest.raises(CorruptSampleError, match="not a tar"):
            scan(b"<!DOCTYPE html>" * 100)

    @pytest.mark.parametrize("tar_format", FORMATS[1:])
    def test_a_sparse_member_is_refused(self, tar_format):
        info = tarfile.TarInfo("holes.bin")
        if tar_format == tarfile.GNU_FORMAT:
            info.type = tarfile.GNUTYPE_SPARSE
        else:
            info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        with pytest.raises(CorruptSampleError, match=r"'holes\.bin' is sparse"):
            scan(info.tobuf(tar_format) + bytes(ARCHIVE_END_BYTES))

    def test_an_extended_header_has_a_limit(self):
        info = tarfile.TarInfo("././@LongLink")
        info.type, info.size = tarfile.GNUTYPE_LONGNAME, EXTENDED_HEADER_BYTES_MAX + 1
        with pytest.raises(CorruptSampleError, match="the limit is"):
            scan(info.tobuf(tarfile.GNU_FORMAT))

    @pytest.mark.parametrize("record", [b"99 path=x\n", b"0 path=x\n", b"3 path=x\n"])
    def test_a_pax_record_cannot_claim_more_than_there_is(self, record):
        info = tarfile.TarInfo("pax")
        info.type, info.size = tarfile.XHDTYPE, len(record)
        data = info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0")
        with pytest.raises(CorruptSampleError, match="pax record claims"):
            scan(data + make_tar([("a.txt", b"")]))


class TestSamples:
    @settings(deadline=None)
    @given(files=files_strategy, cuts=cuts_strategy, tar_format=st.sampled_from(FORMATS[1:]))
    def test_agree_with_webdataset_on_every_key_and_field(self, files, cuts, tar_format):
        data = make_tar(files, tar_format)
        try:
            want = by_webdataset(data)
        except ValueError:
            with pytest.raises(CorruptSampleError, match="twice"):
                samples(data, cuts)
            return
        assert samples(data, cuts) == want

    @pytest.mark.parametrize(
        "names",
        [
            ["a.jpg", "a.cls", "b.jpg", "b.cls"],
            ["./a.jpg", "./a.cls", "./sub/b.JPG", "./sub/b.seg.PNG"],
            ["x.y/a.jpg", "x.y/a.cls", "x.y/.hidden", "x.y/.hidden.jpg"],
            ["a.jpg", "noext", "a.cls", "a."],
            ["__meta__", "__meta__/a.jpg", "__x__y/a.jpg", "d/__meta__/a.jpg", "__m.jpg"],
            ["a.jpg", "b.jpg", "a.cls"],
            ["a.__bad__", "a.jpg", "b.jpg"],
            ["a.b/", ".a.jpg", "..a.jpg", "a..jpg"],
            ["new\nline.jpg", "a.jp\ng", "a.jpg\n"],
        ],
    )
    def test_of_odd_names_are_those_of_webdataset(self, names):
        data = make_tar([(name, name.encode()) for name in names])
        assert samples(data) == by_webdataset(data)

    @pytest.mark.parametrize("names", [["a.jpg", "a.JPG"], ["a.x", "a.__key__"], ["a.__url__"]])
    def test_with_a_field_twice_are_refused_where_webdataset_refuses(self, names):
        data = make_tar([(name, b"1") for name in names])
        with pytest.raises(ValueError, match="duplicate"):
            by_webdataset(data)
        with pytest.raises(CorruptSampleError, match=r"t\.tar: offset \d+: sample 'a' has field"):
            samples(data)

    @pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves the file to the gc
    def test_of_a_shard_that_webdataset_wrote_are_those_it_reads(self, tmp_path: Path):
        import webdataset

        path = str(tmp_path / "w.tar")
        with webdataset.TarWriter(path) as sink:
            for i in range(50):
                sink.write(
                    {"__key__": f"k/{i:06d}", "jpg": bytes([i]) * (i * 97), "cls": b"%d" % i}
                )
        data = Path(path).read_bytes()
        want = [
            {k: v for k, v in s.items() if not k.startswith("__") or k == "__key__"}
            for s in webdataset.WebDataset(path, shardshuffle=False)
        ]
        gc.collect()
        assert len(want) == 50
        assert samples(data, range(0, len(data), 4096)) == want

    def test_are_taken_once_their_bytes_are_there_and_the_next_one_begins(self):
        data = make_tar([("a.jpg", b"x" * 512), ("a.cls", b"1"), ("b.cls", b"2")])
        indexer = TarIndexer("t.tar")
        indexer.feed(memoryview(data)[:2048])
        assert indexer.take() is None
        indexer.feed(memoryview(data)[2048:2560])
        index = indexer.take()
        assert index is not None
        assert [ref.key for ref in index] == ["a"]
        indexer.feed(memoryview(data)[2560:])
        index = indexer.take()  # the end mark completes the last one
        assert index is not None
        assert [ref.key for ref in index] == ["b"]
        indexer.finish()
        assert indexer.take() is None
        assert indexer.sample_count == 2

    def test_builder_keeps_any_name(self):
        builder = SampleIndexBuilder()
        builder.add("\udcff", [])
        assert builder.build()[0].key == "\udcff"


@given(st.text(alphabet="a./_b\n", max_size=12))
def test_the_quick_way_to_split_a_name_is_the_pattern(name: str) -> None:
    builder = SampleIndexBuilder()
    grouper = SampleGrouper("shard", builder)
    grouper.add(name, 0, 1)
    grouper.flush()
    match = tarscan._KEY_AND_FIELD.match(name)
    meta = name.startswith("__") and tarscan._SHARD_META.match(name)
    found = [(ref.key, ref.members[0].ext) for ref in builder.build()]
    assert found == ([] if match is None or meta else [match.groups()])
