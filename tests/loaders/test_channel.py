import os
import select
import socket
import threading

import pytest

from gpufeed.loaders.channel import Channel, WorkerChannel


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    yield Channel(ours), WorkerChannel(theirs), theirs
    ours.close()
    theirs.close()


def test_frames_of_any_size_arrive_whole_and_in_order(ends):
    ours, theirs, _ = ends
    frames = [b"a", b"b" * 3_000_000, b"c" * 17]
    sender = threading.Thread(target=lambda: [theirs.send(frame) for frame in frames])
    sender.start()
    got = []
    while len(got) < 3:
        select.select([ours], [], [])
        got += ours.receive()
    sender.join()
    assert got == frames


def test_a_reader_that_does_not_read_never_blocks_the_sender(ends):
    ours, theirs, _ = ends
    data = os.urandom(5_000_000)
    ours.send(data)
    assert ours.blocked
    got = []
    reader = threading.Thread(target=lambda: got.append(theirs.receive()))
    reader.start()
    while ours.blocked:
        select.select([], [ours], [])
        ours.flush()
    reader.join()
    assert got == [data]


def test_the_end_of_the_worker_is_told_after_its_last_frame(ends):
    ours, theirs, sock = ends
    theirs.send(b"last")
    sock.close()
    assert ours.receive() == [b"last"]
    with pytest.raises(EOFError):
        ours.receive()


def test_a_frame_cut_short_is_the_end(ends):
    ours, _, sock = ends
    sock.send(b"\x08\0\0\0\0\0\0\0abc")
    assert ours.receive() == []
    sock.close()
    with pytest.raises(EOFError):
        ours.receive()


def test_the_worker_sees_the_feeders_end(ends):
    ours, theirs, _ = ends
    ours.close()
    assert theirs.receive() is None
