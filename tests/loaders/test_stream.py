"""The stream against a straightforward reading of the shards, for any window and any ranges."""

import fake_session
from fake_session import FakeDaemon, make_shards, tar_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufeed.cachefs.wire import ExtentEvent, SamplesEvent
from gpufeed.loaders.order import ShardPart
from gpufeed.loaders.samples import SampleMaker
from gpufeed.loaders.stream import ArenaStream


def pump(session, stream):
    for event in session.receive():
        if isinstance(event, ExtentEvent):
            stream.on_extent(event)
        elif isinstance(event, SamplesEvent):
            stream.on_samples(event)
        else:
            stream.on_end(event)


def read_all(session, stream, dataset, parts, draw_unit, draw_finish):
    """Cut and finish units in any order; returns the samples in the order of cutting."""
    numbers = session.extend_plan(dataset, [part.shard for part in parts])
    for number, part in zip(numbers, parts, strict=True):
        stream.expect(number, part, dataset.shards[part.shard].name, lambda shard, index: index)
    stream.mark_epoch_end()
    maker = SampleMaker(session.arena(), None)
    samples, working = [], []
    while not (stream.at_epoch_end and not working):
        pump(session, stream)
        tasks, lease = stream.cut(draw_unit())
        if tasks:
            working.append((tasks, len(samples), lease))
            samples += [None] * len(tasks)
        if working and (not tasks or draw_finish()):
            done, at, lease = working.pop(draw_unit() % len(working))
            samples[at : at + len(done)] = [maker.make(task) for task in done]
            stream.give_back(lease)
        session.release(stream.take_releasable())
    session.release(stream.take_releasable())
    return samples


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_wanted_sample_comes_once_and_every_extent_goes_back(data):
    counts = data.draw(st.lists(st.integers(0, 25), min_size=1, max_size=4))
    extent = data.draw(st.sampled_from([4096, 8192, 65536]))
    window = data.draw(st.integers(max(2, 16384 // extent), 12))
    shards = make_shards(counts, seed=data.draw(st.integers(0, 99)), size=3000)
    daemon = FakeDaemon(
        shards, window_extents=window, slots=32, extent_bytes=extent,
        scatter=data.draw(st.booleans()),
    )  # fmt: skip
    parts, want = [], []
    for shard, count in enumerate(counts):
        if data.draw(st.booleans()):
            parts.append(ShardPart(shard))
            want += shards[shard].samples
            continue
        cuts = sorted(data.draw(st.sets(st.integers(0, count), max_size=6)))
        ranges = tuple(zip(cuts[::2], cuts[1::2], strict=False))
        if ranges:
            parts.append(ShardPart(shard, ranges))
            want += [shards[shard].samples[i] for low, high in ranges for i in range(low, high)]
    session = daemon.open_session(window_bytes=0)
    try:
        got = read_all(
            session, ArenaStream(extent), session.open_dataset(_Request), parts,
            lambda: data.draw(st.integers(1, 7)), lambda: data.draw(st.booleans()),
        )  # fmt: skip
        assert got == want
        # What comes after the last wanted sample may still be on its way; nothing else may be.
        stream_left = session.leased_count
        assert stream_left == 0
    finally:
        session.close()
        daemon.close()


class _Request:
    urls = ("fake://",)


def test_a_field_over_scattered_slots_is_joined_and_counted():
    body = bytes(range(256)) * 600
    shard = tar_shard("fake://a.tar", [("k", {"bin": body, "txt": b"hello"})])
    daemon = FakeDaemon([shard], scatter=True)
    session = daemon.open_session(window_bytes=0)
    stream = ArenaStream(fake_session.EXTENT_BYTES)
    got = read_all(
        session, stream, session.open_dataset(_Request), [ShardPart(0)], lambda: 1, lambda: True
    )
    assert got == shard.samples
    assert stream.straddled_count == 1
    session.close()
    daemon.close()


def test_a_field_over_neighbouring_slots_is_read_in_place():
    shard = tar_shard("fake://a.tar", [("k", {"bin": b"x" * 150_000})])
    daemon = FakeDaemon([shard])
    session = daemon.open_session(window_bytes=0)
    stream = ArenaStream(fake_session.EXTENT_BYTES)
    got = read_all(
        session, stream, session.open_dataset(_Request), [ShardPart(0)], lambda: 1, lambda: True
    )
    assert got == shard.samples
    assert stream.straddled_count == 0
    session.close()
    daemon.close()


def test_empty_fields_and_upper_case_names_come_as_webdataset_makes_them():
    shard = tar_shard("fake://a.tar", [("a", {"TXT": b"", "cls": b""}), ("b", {"Txt": b"1"})])
    daemon = FakeDaemon([shard])
    session = daemon.open_session(window_bytes=0)
    got = read_all(
        session, ArenaStream(fake_session.EXTENT_BYTES), session.open_dataset(_Request),
        [ShardPart(0)], lambda: 2, lambda: True,
    )  # fmt: skip
    assert got == [
        {"__key__": "a", "__url__": "fake://a.tar", "txt": b"", "cls": b""},
        {"__key__": "b", "__url__": "fake://a.tar", "txt": b"1"},
    ]
    session.close()
    daemon.close()
