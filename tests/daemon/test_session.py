"""The daemon's side of the socket: whoever connects, nothing escapes, and everything is taken back.

In one process, over a real socket; real daemons are in `tests/integration`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from pathlib import Path

import pytest
from session_house import HELLO, SESSIONS_MAX, House, answer

from gpufeed.cachefs import wire
from gpufeed.cachefs.wire import Kind
from gpufeed.daemon import session as daemon_session


async def test_one_too_many_that_has_gone_already_is_nobodys_trouble(house: House) -> None:
    clients = [house.connect() for _ in range(SESSIONS_MAX)]
    await house.until(SESSIONS_MAX)
    house.connect().close()
    late = house.connect()
    late.send(HELLO)  # it has come before the daemon looks: why it is refused must come through
    refusal = await answer(late)
    assert refusal.kind is Kind.ERROR
    assert "sessions_max" in refusal.json()["message"]
    for client in (*clients, late):
        client.close()
    await house.until(0)


async def test_without_a_descriptor_for_it_a_session_is_refused_and_holds_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with house.connect() as client, monkeypatch.context() as patch:
        patch.setattr(os, "dup", no_more)
        client.send(HELLO)
        refusal = await answer(client)
    assert refusal.kind is Kind.ERROR
    assert refusal.json()["error"] == "CapacityError"
    await house.until(0)
    with house.connect() as client:
        client.send(HELLO)
        assert (await answer(client)).kind is Kind.WELCOME
    await house.until(0)


async def test_a_body_that_is_no_memory_is_not_read(house: House, tmp_path: Path) -> None:
    path = tmp_path / "body"
    path.write_bytes(b'{"id": 1}')
    with house.connect() as client, path.open("rb") as file:
        socket.send_fds(client, [wire.pack(Kind.HELLO, in_memfd=True)], [file.fileno()])
        refusal = await answer(client)
    assert "cannot be read" in refusal.json()["message"]
    await house.until(0)


async def test_progress_is_not_queued_for_a_client_that_does_not_read(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = daemon_session.Requests
    monkeypatch.setattr(
        daemon_session, "Requests", lambda *args: made.append(args[-1]) or real(*args)
    )
    report = wire.pack(Kind.PROGRESS, bytes(1000))
    with house.connect() as client:
        client.send(HELLO)
        await answer(client)
        for _ in range(10_000):
            made[0](report)
        got = 0
        while True:
            try:
                client.recv(wire.MESSAGE_BYTES_MAX)
            except BlockingIOError:
                break
            got += 1
            await asyncio.sleep(0)  # the daemon's turn to send what it queued
        assert daemon_session.OUTBOX_MESSAGES_MAX <= got < 5000
    await house.until(0)


async def lend(house: House) -> int:
    """Let the only session's client hold a slot."""
    publisher = next(iter(house.server._sessions.values()))._publisher
    assert publisher is not None
    pool = house.pool
    slot = await pool.allocate("d", 0)
    pool.table.mark_ready(slot)
    await publisher.take_credit()
    return publisher.lend(slot, "d")


@pytest.mark.parametrize("wrong", [b"rubbish", b""])
async def test_what_a_refused_client_holds_stays_until_it_has_closed_its_side(
    house: House, wrong: bytes
) -> None:
    table = house.pool.table
    with house.connect() as client:
        client.send(HELLO)
        await answer(client)
        await lend(house)
        client.send(wrong)
        refusal = await answer(client)
        assert refusal.kind is Kind.ERROR
        assert await asyncio.get_running_loop().sock_recv(client, 10) == b""
        client.send(wire.pack(Kind.RELEASE, wire.pack_release([1])))
        await asyncio.sleep(0)
        assert table.held_count == 1, "a slot that its reader may look at was given away"
        assert house.server.session_count == 1
    await house.until(0)
    assert table.held_count == 0


async def test_a_refused_client_that_reads_late_sees_the_end_too(
    house: House,
) -> None:
    with house.connect() as client:
        client.send(HELLO)
        await answer(client)
        await lend(house)
        session = next(iter(house.server._sessions.values()))
        while not session._outbox:
            session.send(wire.pack(Kind.PROGRESS, bytes(10_000)))
        client.send(b"rubbish")
        kinds = []
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(client, wire.MESSAGE_BYTES_MAX):
            kinds.append(wire.unpack(data).kind)
        assert kinds[-1] is Kind.ERROR
        assert set(kinds[:-1]) == {Kind.PROGRESS}
    await house.until(0)


@pytest.mark.parametrize(
    ("message", "count"), [(HELLO + bytes(wire.MESSAGE_BYTES_MAX), 0), (HELLO, 5)]
)
async def test_a_message_that_is_cut_is_refused(house: House, message: bytes, count: int) -> None:
    with house.connect() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        socket.send_fds(client, [message], [client.fileno()] * count)
        refusal = await answer(client)
        assert "more than 65536 bytes, or with more descriptors" in refusal.json()["message"]
    await house.until(0)


@pytest.mark.parametrize(("code", "ends"), [(errno.EINVAL, True), (errno.ENOPROTOOPT, False)])
async def test_a_client_that_was_dead_before_it_was_accepted(
    house: House, monkeypatch: pytest.MonkeyPatch, code: int, ends: bool
) -> None:
    """Its socket may live on in a child that knows nothing of it."""
    real = daemon_session._peer_pidfd

    class Dead:
        def getsockopt(self, *_: int) -> int:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(daemon_session, "_peer_pidfd", lambda _: real(Dead()))
    with house.connect() as client:
        await house.until(1)
        if ends:
            await house.until(0)
        else:
            client.send(HELLO)
            assert (await answer(client)).kind is Kind.WELCOME
    if not ends:
        await house.until(0)


async def test_a_refused_client_that_holds_nothing_is_gone_at_once(house: House) -> None:
    with house.connect() as client:
        client.send(HELLO)
        await answer(client)
        client.send(b"rubbish")
        assert (await answer(client)).kind is Kind.ERROR
        await house.until(0)


async def test_a_server_that_stops_leaves_what_clients_hold_until_it_closes(house: House) -> None:
    table = house.pool.table
    with house.connect() as client:
        client.send(HELLO)
        await answer(client)
        await lend(house)
        await house.server.stop()
        assert await asyncio.get_running_loop().sock_recv(client, 10) == b""
        assert table.held_count == 1
        await house.server.close()
        assert table.held_count == 0


async def test_a_connection_that_says_nothing_is_closed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_session, "HELLO_TIMEOUT_S", 0.01)
    with house.connect() as client:
        refusal = await answer(client)
        assert "no HELLO" in refusal.json()["message"]
        await house.until(0)


FORKS = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
sock.send(bytes.fromhex(sys.argv[2]))
sock.recv(65536)
if os.fork():
    os._exit(0)
print("child", flush=True)
sys.stdin.read()
"""


async def test_a_session_ends_with_the_process_that_opened_it_though_a_child_has_its_socket(
    house: House,
) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        assert daemon_session._peer_pidfd(probe) == -1, "not connected"
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FORKS, house.path, HELLO.hex(),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stdin is not None
    assert await client.stdout.readline() == b"child\n"
    await house.until(0)
    assert client.stdin.is_closing() is False, "the child lived all the time"
    await client.communicate(b"")


class Refusing:
    """A socket whose kernel does not take the first `times` messages."""

    def __init__(self, sock: socket.socket, code: int, times: int) -> None:
        self._sock = sock
        self._code = code
        self.left = times

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def send(self, data: bytes) -> int:
        if self.left:
            self.left -= 1
            raise OSError(self._code, os.strerror(self._code))
        return self._sock.send(data)


async def refusing(house: House, client: socket.socket, code: int, times: int) -> Refusing:
    """The client's session tells something over such a socket."""
    client.send(HELLO)
    await answer(client)
    session = next(iter(house.server._sessions.values()))
    sock = Refusing(session._sock, code, times)
    session._sock = sock  # type: ignore[assignment]
    session.send(wire.pack(Kind.PROGRESS, b"{}"))
    return sock


async def test_a_shortage_of_the_kernel_loses_no_message(house: House) -> None:
    with house.connect() as client:
        sock = await refusing(house, client, errno.ENOBUFS, 3)
        assert (await answer(client)).kind is Kind.PROGRESS
    assert sock.left == 0
    await house.until(0)


async def test_without_a_limit_of_memory_no_heap_is_too_large(house: House) -> None:
    assert house.server.tenants.heap_bytes_max > 1 << 50


async def test_a_message_that_cannot_be_sent_ends_the_session_instead_of_getting_lost(
    house: House,
) -> None:
    with house.connect() as client:
        await refusing(house, client, errno.EMSGSIZE, 1)
        assert await asyncio.get_running_loop().sock_recv(client, 10) == b""
    await house.until(0)
