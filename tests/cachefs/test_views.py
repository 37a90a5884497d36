"""Views and leases against a scripted daemon: what goes back when, what is copied, what is kept."""

from __future__ import annotations

import gc
import os
import select
import socket
import threading
import time

import numpy as np
import pytest
from lockfile import lock_fd

from gpufeed.cachefs import wire
from gpufeed.cachefs.connection import Connection
from gpufeed.cachefs.errors import DaemonUnavailableError, NotFoundError, ProtocolError
from gpufeed.cachefs.leases import Leases
from gpufeed.cachefs.rangeviews import RangeView
from gpufeed.cachefs.sampleindex import Member, SampleIndexBuilder
from gpufeed.cachefs.samples import ReadStats, Sample, SampleCutter, Taken
from gpufeed.cachefs.session import Session
from gpufeed.cachefs.wire import ExtentEvent, FailEvent, Kind, SamplesEvent, ShardEndEvent

EXTENT = 4096
SLOTS = 16
WINDOW = 8


class Daemon:
    """The other end of one session; slot `s` holds bytes that tell their place in the arena."""

    def __init__(self, window: int = WINDOW) -> None:
        ours, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(20)
        draw = np.random.default_rng(1)
        self.arena = draw.integers(0, 256, SLOTS * EXTENT, np.uint8).tobytes()
        fd = os.memfd_create("gpufeed-arena")
        os.write(fd, self.arena)
        welcome = {"arena_bytes": SLOTS * EXTENT, "extent_bytes": EXTENT, "window_extents": window}
        self.session = Session(Connection(ours), welcome, fd, lock_fd())
        self.leases = Leases(self.session)
        self.stats = ReadStats()

    def cutter(self, names: list[str], *, base: int = 0, skip: int = 0) -> SampleCutter:
        return SampleCutter(
            self.leases, names, first_position=10, base=base, skip=skip, stats=self.stats
        )

    def slot(self, slot: int, begin: int = 0, end: int = EXTENT) -> bytes:
        return self.arena[slot * EXTENT + begin : slot * EXTENT + end]

    def released(self) -> list[int]:
        """What was given back by now."""
        seqs: list[int] = []
        while select.select([self.sock], [], [], 0)[0]:
            data = self.sock.recv(wire.MESSAGE_BYTES_MAX)
            if not data:
                break
            message = wire.unpack(data)
            assert message.kind is Kind.RELEASE
            seqs += wire.unpack_release(message.body)
        return sorted(seqs)

    @property
    def is_closed(self) -> bool:
        return bool(select.select([self.sock], [], [], 0)[0]) and not self.sock.recv(
            1, socket.MSG_PEEK
        )


@pytest.fixture
def start():
    started: list[Daemon] = []

    def one(window: int = WINDOW) -> Daemon:
        started.append(Daemon(window))
        return started[-1]

    yield one
    for daemon in started:
        daemon.leases.retire()
        daemon.sock.close()


@pytest.fixture
def daemon(start):
    daemon = start()
    daemon.leases.begin_wait()
    return daemon


def samples_of(*members: tuple[int, int]) -> SamplesEvent:
    """Samples of one field each: offset and size."""
    builder = SampleIndexBuilder()
    for i, (offset, size) in enumerate(members):
        builder.add(f"s{i}", [Member("bin", offset, size)])
    return SamplesEvent(10, 0, builder.build())


def feed(cutter: SampleCutter, *slots: int, position: int = 10, first: int = 0) -> None:
    for i, slot in enumerate(slots, first):
        cutter.on_event(ExtentEvent(i + 1, position, i, slot, EXTENT))


def take_all(cutter: SampleCutter) -> list[Sample]:
    found = []
    while (sample := cutter.next()) is not None:
        found.append(sample)
    return found


def test_a_view_lies_in_the_arena_and_its_last_slice_gives_the_extent_back(daemon) -> None:
    cutter = daemon.cutter(["shard"])
    feed(cutter, 5)
    cutter.on_event(samples_of((100, 50), (150, 60)))
    cutter.on_event(ShardEndEvent(10, 2, {}))
    first, second = take_all(cutter)
    assert cutter.is_over
    assert first["bin"] == daemon.slot(5, 100, 150)
    assert second["bin"] == daemon.slot(5, 150, 210)
    mapped = np.frombuffer(daemon.session.arena(), np.uint8).__array_interface__["data"][0]
    address = np.frombuffer(first["bin"], np.uint8).__array_interface__["data"][0]
    assert address == mapped + 5 * EXTENT + 100
    kept = np.frombuffer(first["bin"][10:20], np.uint8)[2:4]
    del first
    assert daemon.released() == []
    del second
    assert daemon.released() == []
    assert kept.tobytes() == daemon.slot(5, 112, 114)
    del kept
    assert daemon.released() == [1]
    assert daemon.leases.held_count == 0
    assert daemon.leases.free_count == WINDOW


def test_neighbours_are_joined_and_others_copied(daemon) -> None:
    cutter = daemon.cutter(["shard"])
    feed(cutter, 3, 4, 9)
    cutter.on_event(samples_of((EXTENT - 10, 20), (2 * EXTENT - 10, 20)))
    cutter.on_event(ShardEndEvent(10, 2, {}))
    joined, copied = take_all(cutter)
    assert joined["bin"] == daemon.slot(3, EXTENT - 10) + daemon.slot(4, 0, 10)
    assert isinstance(joined["bin"].obj, np.ndarray)
    assert copied["bin"] == daemon.slot(4, EXTENT - 10) + daemon.slot(9, 0, 10)
    assert (daemon.stats.straddled_count, daemon.stats.straddled_bytes) == (1, 20)
    # The copy needs nothing; the joined view needs both of its extents.
    assert daemon.released() == [3]
    view = joined["bin"][15:]
    del joined
    assert daemon.released() == []
    assert view == daemon.slot(4, 5, 10)
    del view
    assert daemon.released() == [1, 2]


def test_beyond_the_cap_samples_are_copies_and_extents_go_back_at_once(daemon) -> None:
    cutter = daemon.cutter(["shard"])
    feed(cutter, *range(6))
    cutter.on_event(samples_of(*((i * EXTENT + 7, 100) for i in range(6))))
    cutter.on_event(ShardEndEvent(10, 6, {}))
    held = take_all(cutter)
    assert [s["bin"] for s in held] == [daemon.slot(i, 7, 107) for i in range(6)]
    assert daemon.leases.held_count == daemon.leases.held_max == WINDOW // 2
    assert daemon.stats.copied_count == 2
    assert daemon.released() == [5, 6]
    del held
    assert daemon.released() == [1, 2, 3, 4]


def test_a_sample_nearly_as_long_as_the_window_gets_its_rest(daemon) -> None:
    cutter = daemon.cutter(["shard"])
    feed(cutter, 1, 3, 5, 7, 9, 11, 13, 15)
    cutter.on_event(samples_of((0, 100), (EXTENT, 100), (2 * EXTENT, 100)))
    held = take_all(cutter)
    assert len(held) == 3
    assert daemon.leases.free_count == 0
    # The fourth sample goes on behind the window, and views hold extents.
    cutter.spill()
    assert daemon.released() == [4, 5, 6, 7, 8]
    feed(cutter, 2, first=8)
    cutter.on_event(SamplesEvent(10, 3, samples_of((3 * EXTENT, 6 * EXTENT - 5)).index))
    cutter.on_event(ShardEndEvent(10, 4, {}))
    (last,) = take_all(cutter)
    wanted = b"".join(daemon.slot(slot) for slot in (7, 9, 11, 13, 15, 2))
    assert last["bin"] == wanted[:-5]
    del held, last
    assert daemon.released() == [1, 2, 3, 9]
    assert daemon.leases.free_count == WINDOW


def test_what_was_taken_before_is_passed_over(daemon) -> None:
    cutter = daemon.cutter(["b", "c"], base=4, skip=2)
    feed(cutter, 0, 1)
    cutter.on_event(samples_of((0, 10), (EXTENT, 10), (EXTENT + 10, 10)))
    sample = cutter.next()
    assert (sample.shard, sample.position, sample.number) == ("b", 4, 2)
    assert cutter.taken == Taken(4, 3)
    assert daemon.released() == [1]
    cutter.on_event(ShardEndEvent(10, 3, {}))
    assert cutter.next() is None
    assert cutter.taken == Taken(5, 0)
    cutter.on_event(ExtentEvent(3, 11, 0, 6, EXTENT))
    cutter.on_event(SamplesEvent(11, 0, samples_of((5, 10)).index))
    sample = cutter.next()
    assert (sample.shard, sample.position, sample.number) == ("c", 5, 0)
    assert not cutter.is_over


def test_a_failure_comes_behind_the_samples_before_it(daemon) -> None:
    cutter = daemon.cutter(["shard"])
    feed(cutter, 0)
    cutter.on_event(samples_of((0, 10)))
    cutter.on_event(FailEvent(10, NotFoundError("gone")))
    assert cutter.next() is not None
    with pytest.raises(NotFoundError, match="gone"):
        cutter.next()
    with pytest.raises(ProtocolError, match="position 77"):
        cutter.on_event(ExtentEvent(2, 77, 0, 0, EXTENT))


def test_empty_fields_and_samples_without_extents(daemon) -> None:
    cutter = daemon.cutter(["shard"])
    cutter.on_event(samples_of((0, 0), (EXTENT, 0)))
    cutter.on_event(ShardEndEvent(10, 2, {}))
    assert [bytes(s["bin"]) for s in take_all(cutter)] == [b"", b""]


def test_a_session_closes_with_its_last_view(start) -> None:
    daemon = start()
    cutter = daemon.cutter(["shard"])
    feed(cutter, 2, 3)
    cutter.on_event(samples_of((0, 10), (EXTENT, 10)))
    held = take_all(cutter)
    daemon.leases.retire()
    del cutter
    assert not daemon.is_closed
    held.pop()
    assert not daemon.is_closed
    assert held[0]["bin"] == daemon.slot(2, 0, 10)
    held.clear()
    assert daemon.is_closed


def test_a_session_that_is_read_stays_open_until_the_read_is_over(start) -> None:
    daemon = start()
    with daemon.leases.pinned():
        daemon.leases.retire()
        assert not daemon.is_closed
        found = RangeView(daemon.leases, 10, 20, daemon.stats)
        found.take(1, 4, EXTENT)
        view = found.view()
    assert not daemon.is_closed
    with pytest.raises(DaemonUnavailableError), daemon.leases.pinned():
        pass
    assert view == daemon.slot(4, 10, 20)
    del view, found
    assert daemon.is_closed


def test_ranges(daemon) -> None:
    def read(begin: int, end: int, *slots: int) -> memoryview:
        found = RangeView(daemon.leases, begin, end, daemon.stats)
        for i, slot in enumerate(slots):
            found.take(100 * (len(daemon.seen) + 1) + i, slot, EXTENT)
        daemon.seen.append(slots)
        return found.view()

    daemon.seen = []
    place = 5 * EXTENT
    beside = read(place + 10, place + 2 * EXTENT + 5, 3, 4, 5)
    assert beside == (daemon.slot(3) + daemon.slot(4) + daemon.slot(5))[10 : 2 * EXTENT + 5]
    assert isinstance(beside.obj, np.ndarray)
    apart = read(place + 10, place + 2 * EXTENT + 5, 6, 8, 9)
    assert apart == (daemon.slot(6) + daemon.slot(8) + daemon.slot(9))[10 : 2 * EXTENT + 5]
    assert daemon.stats.copied_count + daemon.stats.straddled_count == 1
    assert daemon.released() == [200, 201, 202]
    one = read(7, 9, 0)
    full = read(7, 9, 1)
    assert one == daemon.slot(0, 7, 9)
    assert full == daemon.slot(1, 7, 9)
    assert not isinstance(full.obj, np.ndarray)
    assert daemon.released() == [400]
    del beside
    assert daemon.released() == [100, 101, 102]
    del one
    assert daemon.released() == [300]


def test_what_comes_free_is_told_in_batches_but_at_once_to_who_waits(start) -> None:
    daemon = start(window=WINDOW * 4)
    for seq in range(1, 4):
        daemon.leases.take(seq)
        daemon.leases.give_back(seq)
    assert daemon.released() == []
    daemon.leases.take(4)
    daemon.leases.give_back(4)
    assert daemon.released() == [1, 2, 3, 4]
    daemon.leases.take(5)
    owner = daemon.leases.own(5, 0, EXTENT)
    daemon.leases.begin_wait()
    thread = threading.Thread(target=lambda held=[owner]: held.clear())
    del owner
    thread.start()
    thread.join()
    thread = None
    gc.collect()
    assert daemon.released() == [5]
    daemon.leases.retire()


def test_a_full_socket_wakes_who_waits_and_loses_nothing(start) -> None:
    daemon = start()
    session = daemon.session
    count = 0
    while session.flush():
        session.post(wire.pack(Kind.RELEASE, wire.pack_release([count] * 400)))
        count += 1
    assert select.select([session.wake_fd], [], [], 0)[0]
    waiting = threading.Thread(target=session.wait_readable, args=(time.monotonic() + 60,))
    waiting.start()
    messages = [wire.unpack(daemon.sock.recv(wire.MESSAGE_BYTES_MAX)) for _ in range(count)]
    found = [wire.unpack_release(message.body)[0] for message in messages]
    assert found == list(range(count))
    daemon.sock.send(wire.pack(Kind.REPLY, b"{}"))
    waiting.join(20)
    assert not waiting.is_alive()
    daemon.leases.retire()
