"""Requests of many threads on one session, against a scripted daemon at the other end."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from lockfile import lock_fd

from gpufeed.cachefs import wire
from gpufeed.cachefs.calls import REQUESTS_MAX, Calls
from gpufeed.cachefs.client import Session
from gpufeed.cachefs.connection import Connection
from gpufeed.cachefs.errors import DaemonUnavailableError, NotFoundError
from gpufeed.cachefs.wire import Kind

EXTENT = 4096
TIMEOUT_S = 20.0


class Daemon:
    """The other end: answers when the test says so."""

    def __init__(self) -> None:
        ours, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(TIMEOUT_S)
        arena = os.memfd_create("arena")
        os.write(arena, bytes(range(256)) * 64)
        welcome = {"arena_bytes": 4 * EXTENT, "extent_bytes": EXTENT, "window_extents": 4}
        self.calls = Calls(Session(Connection(ours), welcome, arena, lock_fd()))

    def take(self) -> tuple[Kind, dict]:
        message = wire.unpack(self.sock.recv(wire.MESSAGE_BYTES_MAX))
        if message.kind is Kind.RELEASE:
            return message.kind, {"seqs": wire.unpack_release(message.body)}
        return message.kind, message.json()

    def reply(self, number: int, **value: object) -> None:
        self.sock.send(wire.pack(Kind.REPLY, wire.pack_json({"id": number, **value})))

    def close(self) -> None:
        self.calls.close()
        self.sock.close()


@pytest.fixture
def daemon():
    daemon = Daemon()
    yield daemon
    daemon.close()


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_answers_in_any_order_reach_those_who_asked(daemon) -> None:
    got: dict[int, dict] = {}
    threads = [
        in_thread(lambda i=i: got.update({i: daemon.calls.ask(Kind.STAT, {"which": i})}))
        for i in range(REQUESTS_MAX)
    ]
    asked = [daemon.take()[1] for _ in threads]
    for request in reversed(asked):
        daemon.reply(request["id"], echo=request["which"])
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert {i: value["echo"] for i, value in got.items()} == {i: i for i in range(REQUESTS_MAX)}


def test_no_more_than_the_limit_is_under_way(daemon) -> None:
    numbers = [daemon.calls.begin(Kind.STAT, {}) for _ in range(REQUESTS_MAX)]
    assert daemon.calls.begin(Kind.STAT, {}, wait=False) is None
    waiting = in_thread(lambda: daemon.calls.ask(Kind.STAT, {"last": True}))
    for _ in numbers:
        assert "last" not in daemon.take()[1]
    # An answer makes room, whether or not it was fetched.
    daemon.reply(numbers[3])
    _, last = daemon.take()
    assert last["last"]
    daemon.reply(last["id"])
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
    for number in numbers:
        if number != numbers[3]:
            daemon.reply(number)
        daemon.calls.finish(number)


def test_what_a_forgotten_answer_lends_goes_back(daemon) -> None:
    forgotten = daemon.calls.begin(Kind.FILE_READ, {})
    answered = daemon.calls.begin(Kind.FILE_READ, {})
    daemon.take(), daemon.take()
    daemon.calls.forget(forgotten)
    daemon.reply(forgotten, seq=7, slot=0, length=10)
    daemon.reply(answered, seq=8, slot=1, length=10)
    assert daemon.calls.finish(answered)["seq"] == 8
    assert daemon.take() == (Kind.RELEASE, {"seqs": (7,)})
    # An answer that has come already is given back at once.
    early = daemon.calls.begin(Kind.FILE_READ, {})
    other = daemon.calls.begin(Kind.FILE_READ, {})
    daemon.take(), daemon.take()
    daemon.reply(early, seq=9, slot=0, length=10)
    daemon.reply(other, seq=10, slot=0, length=10)
    daemon.calls.finish(other)
    daemon.calls.forget(early)
    assert daemon.take() == (Kind.RELEASE, {"seqs": (9,)})


def test_an_error_is_the_asker_s_alone_and_the_session_goes_on(daemon) -> None:
    number = daemon.calls.begin(Kind.STAT, {})
    error = wire.pack_error(NotFoundError("it is not there"))
    daemon.sock.send(wire.pack(Kind.ERROR, wire.pack_json({"id": number, **error})))
    with pytest.raises(NotFoundError, match="it is not there"):
        daemon.calls.finish(number)
    again = daemon.calls.begin(Kind.STAT, {})
    daemon.reply(again, found=True)
    assert daemon.calls.finish(again)["found"]


def test_a_lost_session_ends_every_request_and_closes_with_the_last(daemon) -> None:
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            daemon.calls.ask(Kind.STAT, {})
        except DaemonUnavailableError as error:
            errors.append(error)

    threads = [in_thread(ask) for _ in range(REQUESTS_MAX + 3)]
    for _ in range(REQUESTS_MAX):
        daemon.take()
    daemon.sock.close()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(errors) == REQUESTS_MAX + 3
    assert daemon.calls.has_failed
    assert daemon.calls._session.fileno() == -1
    daemon.calls.release(1)
    daemon.calls.close_file(1)


def test_an_interrupted_wait_lets_another_thread_go_on(daemon, monkeypatch) -> None:
    first = daemon.calls.begin(Kind.FILE_READ, {})
    second = daemon.calls.begin(Kind.FILE_READ, {})
    real = daemon.calls._session.wait_message
    monkeypatch.setattr(
        daemon.calls._session, "wait_message", lambda _: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        daemon.calls.finish(first)
    monkeypatch.setattr(daemon.calls._session, "wait_message", real)
    daemon.take(), daemon.take()
    daemon.reply(first, seq=1, slot=0, length=1)
    daemon.reply(second, seq=2, slot=0, length=1)
    assert daemon.calls.finish(second)["seq"] == 2
    assert daemon.take() == (Kind.RELEASE, {"seqs": (1,)})


def test_an_extent_is_copied_from_its_slot(daemon) -> None:
    into = bytearray(5)
    daemon.calls.copy({"slot": 2}, 7, memoryview(into))
    assert into == bytes(range(7, 12))


def test_a_copy_made_when_the_session_had_ended_is_not_trusted(daemon) -> None:
    number = daemon.calls.begin(Kind.FILE_READ, {})
    daemon.reply(number, seq=1, slot=0, length=5)
    lent = daemon.calls.finish(number)
    # Something from before waits to be received: the end must be seen past it.
    daemon.reply(99)
    daemon.sock.close()
    with pytest.raises(DaemonUnavailableError, match="while an extent was copied"):
        daemon.calls.copy(lent, 0, memoryview(bytearray(5)))
    daemon.calls.close()
    with pytest.raises(DaemonUnavailableError):
        daemon.calls.copy(lent, 0, memoryview(bytearray(5)))
