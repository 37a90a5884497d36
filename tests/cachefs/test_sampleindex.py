"""The sample index: slices, ends and the pinned encoded form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs.errors import ProtocolError
from gpufeed.cachefs.sampleindex import Member, SampleIndex, SampleIndexBuilder, SampleRef

names = st.text(alphabet="abcé/.0", min_size=1, max_size=6)
samples = st.lists(
    st.tuples(names, st.lists(st.tuples(names, st.integers(0, 2**40)), min_size=1, max_size=3)),
    max_size=8,
)


def build(rows: list[tuple[str, list[tuple[str, int]]]]) -> tuple[SampleIndex, list[SampleRef]]:
    builder = SampleIndexBuilder()
    refs = []
    for key, fields in rows:
        members = tuple(Member(ext, size * 2, size) for ext, size in fields)
        builder.add(key, members)
        refs.append(SampleRef(key, members))
    return builder.build(), refs


@given(samples)
def test_an_encoded_index_decodes_to_the_same_samples(rows) -> None:
    index, refs = build(rows)

    decoded = SampleIndex.decode(index.encode())

    assert list(decoded) == refs
    assert decoded.nbytes == len(index.encode())


@given(samples, st.data())
def test_a_slice_is_the_same_samples(rows, data) -> None:
    index, refs = build(rows)
    begin = data.draw(st.integers(0, len(refs)))
    end = data.draw(st.integers(begin, len(refs)))

    part = SampleIndex.decode(index.slice(begin, end).encode())

    assert list(part) == refs[begin:end]
    assert part.ends().tolist() == [
        max(m.offset_bytes + m.size_bytes for m in ref.members) for ref in refs[begin:end]
    ]


@given(samples, samples, st.integers(0, 8))
def test_an_index_that_is_appended_is_its_samples_one_by_one(before, rows, begin) -> None:
    builder = SampleIndexBuilder()
    index, refs = build(rows)
    refs = refs[begin:]
    _, first = build(before)
    for ref in first:
        builder.add(ref.key, ref.members)

    builder.extend(index.slice(len(index) - len(refs), len(index)))
    builder.add("last", (Member("jpg", 1, 2),))

    assert list(builder.build()) == [*first, *refs, SampleRef("last", (Member("jpg", 1, 2),))]


def test_the_encoded_form_is_pinned() -> None:
    index, _ = build([("k", [("jpg", 3)])])

    assert index.encode().hex() == (
        "47464958010000000100000001000000040000000100000001000000000000000600000000000000"
        "0300000000000000030000006b6a7067"
    )


@pytest.mark.parametrize("data", [b"", b"GFIX", b"XXXX" + bytes(20), b"GFIX\x02" + bytes(19)])
def test_bytes_that_are_no_index_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        SampleIndex.decode(data)
