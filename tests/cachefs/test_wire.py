"""The session protocol: pinned bytes, round trips, and refusals that say what to do."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs import wire
from gpufeed.cachefs.errors import CapacityError, GpufeedError, ProtocolError
from gpufeed.cachefs.sampleindex import Member, SampleIndexBuilder
from gpufeed.cachefs.wire import ExtentEvent, Kind, SamplesEvent


def index_of(count: int):
    builder = SampleIndexBuilder()
    for i in range(count):
        builder.add(f"sample-{i:06d}", [Member("jpg", i * 100, 90), Member("cls", i * 100 + 90, 1)])
    return builder.build()


def test_the_header_and_the_hot_records_are_pinned() -> None:
    extents = wire.pack_extents([ExtentEvent(1, 2, 3, 4, 5)])

    assert wire.pack(Kind.EXTENTS, extents).hex() == (
        "47504644" "0100" "0900" "00000000"
        "0100000000000000" "0200000000000000" "03000000" "04000000" "05000000" "00000000"
    )  # fmt: skip
    assert wire.pack_release([7]).hex() == "0700000000000000"
    assert wire.pack_plan(1, [5, 6], 9).hex() == "010000000200000009000000000000000500000006000000"


@given(st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 5), max_size=5))
def test_extents_come_back_as_they_were(rows) -> None:
    events = [ExtentEvent(*row) for row in rows]

    assert wire.unpack_extents(wire.pack_extents(events)) == events


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(0, 2**63))
def test_a_plan_comes_back_as_it_was(ids, first) -> None:
    assert wire.unpack_plan(wire.pack_plan(3, ids, first)) == (3, tuple(ids), first)


def test_many_samples_are_split_into_messages_that_fit() -> None:
    event = SamplesEvent(4, 10, index_of(5000))

    pieces = list(wire.split_samples(event))

    assert len(pieces) > 1
    packed = [wire.pack(Kind.SAMPLES, wire.pack_samples(piece)) for piece in pieces]
    back = [wire.unpack_samples(wire.unpack(data).body) for data in packed]
    assert [ref for piece in back for ref in piece.index] == list(event.index)
    assert [piece.first for piece in back] == [
        10 + sum(len(p.index) for p in pieces[:i]) for i in range(len(pieces))
    ]


@given(st.binary(max_size=80))
def test_random_bytes_are_refused_and_never_crash(data: bytes) -> None:
    for take in (
        wire.unpack, wire.unpack_extents, wire.unpack_samples, wire.unpack_plan, wire.unpack_release
    ):  # fmt: skip
        with contextlib.suppress(ProtocolError):
            take(data)


@pytest.mark.parametrize(("version", "side"), [(0, "the other side"), (99, "this side")])
def test_another_version_says_which_side_to_upgrade(version: int, side: str) -> None:
    data = wire.HEADER.pack(wire.MAGIC, version, Kind.HELLO, 0)

    with pytest.raises(ProtocolError, match=side):
        wire.unpack(data)


def test_an_error_keeps_its_class_across_the_socket() -> None:
    error = wire.unpack_error(wire.pack_error(CapacityError("too small")))

    assert type(error) is CapacityError
    assert str(error) == "too small"
    assert type(wire.unpack_error({"error": "SystemExit", "message": "x"})) is GpufeedError
