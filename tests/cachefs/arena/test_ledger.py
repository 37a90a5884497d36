"""Which arenas are in use, by files that their users keep locked."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpufeed.cachefs.arena.ledger import (
    ENTRY_BYTES,
    ArenaEntry,
    ArenaLedger,
    Elsewhere,
    pack_entry,
    unpack_entry,
)
from gpufeed.cachefs.connection import Connection
from gpufeed.cachefs.errors import OperatorError
from gpufeed.cachefs.session import Session

A, B = "a" * 32, "b" * 32
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "s.arenas"


@pytest.fixture
def ledger(tmp_path: Path) -> ArenaLedger:
    return ArenaLedger(str(tmp_path / "s"))


def kill(entry: ArenaEntry) -> None:
    """The daemon dies: its descriptors go, its file stays."""
    entry._close_all()


def after(ledger: ArenaLedger) -> ArenaLedger:
    """The next daemon's, which knows nothing of its own."""
    return ArenaLedger(ledger._folder.removesuffix(".arenas"), ledger._tenants)


def test_the_file_is_pinned() -> None:
    data = pack_entry(A, 64 * MIB)
    assert len(data) == ENTRY_BYTES == 72
    assert data[:8] == b"GFAL\x01\x00\x00\x00"
    assert data[12:44] == A.encode()
    assert data[44:52] == (64 * MIB).to_bytes(8, "little")
    assert data[52:] == bytes(20)
    assert data[8:12].hex() == "bc47616a"
    assert unpack_entry(data) == Elsewhere(A, 0)


@pytest.mark.parametrize("at", [0, 4, 9, 20, 50, 60])
def test_a_damaged_file_is_none(at: int) -> None:
    data = bytearray(pack_entry(A, MIB))
    data[at] ^= 1
    assert unpack_entry(bytes(data)) is None
    assert unpack_entry(bytes(data[:-1])) is None


def test_no_more_than_the_arena_is_believed() -> None:
    data = pack_entry(A, MIB)[:-8] + (5 * MIB).to_bytes(8, "little")
    assert unpack_entry(data) == Elsewhere(A, MIB)


def test_an_arena_that_nobody_maps_leaves_nothing(ledger, folder) -> None:
    entry = ledger.enter(A, MIB, "")
    assert os.listdir(folder) == [f"{A}."]
    entry.close()
    assert not folder.exists()
    assert after(ledger).bytes_elsewhere("") == 0


def test_a_killed_daemon_whose_arena_a_client_has(ledger, folder) -> None:
    entry = ledger.enter(A, 8 * MIB, "")
    entry.touched(3 * MIB)
    client = os.dup(entry.fd)
    kill(entry)
    now = after(ledger)
    mine = now.enter(B, MIB, "")
    mine.touched(MIB)
    assert now.bytes_elsewhere("") == 3 * MIB
    # A mapping keeps it without the descriptor.
    mapped = mmap.mmap(client, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    os.close(client)
    assert now.bytes_elsewhere("") == 3 * MIB
    mapped.close()
    assert now.bytes_elsewhere("") == 0
    assert os.listdir(folder) == [f"{B}."]
    mine.close()


def test_a_daemon_that_ends_leaves_the_file_to_the_client(ledger, folder) -> None:
    entry = ledger.enter(A, 8 * MIB, "")
    entry.touched(2 * MIB)
    client = os.dup(entry.fd)
    entry.close()
    assert after(ledger).bytes_elsewhere("") == 2 * MIB
    os.close(client)
    assert after(ledger).bytes_elsewhere("") == 0
    assert os.listdir(folder) == []


def test_tenants_have_their_own_and_what_is_nobodys_counts_for_each(tmp_path: Path) -> None:
    ledger = ArenaLedger(str(tmp_path / "s"), ("red", "blue"))
    for number, (tenant, size) in enumerate((("red", 1), ("blue", 2), ("gone", 4))):
        ledger.enter(str(number) * 32, MIB, tenant).touched(size)
    assert after(ledger).bytes_elsewhere("red") == 1 + 4
    assert after(ledger).bytes_elsewhere("blue") == 2 + 4


def test_what_is_not_ours_is_left_alone_or_removed(ledger, folder) -> None:
    entry = ledger.enter(A, MIB, "")
    (folder / "sub").mkdir()
    (folder / "link").symlink_to(folder / f"{A}.")
    os.mkfifo(folder / "pipe")
    (folder / "new-unfinished").write_bytes(b"")
    assert after(ledger).bytes_elsewhere("") == 0
    assert not (folder / "new-unfinished").exists()
    assert (folder / f"{A}.").exists()
    entry.close()


def test_what_a_client_forges_counts_for_its_own_tenant_alone(tmp_path: Path) -> None:
    ledger = ArenaLedger(str(tmp_path / "s"), ("red", "blue"))
    mine, theirs = ledger.enter(A, MIB, "red"), ledger.enter(B, MIB, "blue")
    forged = pack_entry(B, 1 << 50)[:-8] + (1 << 50).to_bytes(8, "little")
    for entry in (mine, theirs):
        writable = os.open(f"/proc/self/fd/{entry.fd}", os.O_RDWR)  # as root may
        os.pwrite(writable, forged, 0)
        os.close(writable)
    # Of arenas that are alive nothing is believed, whoever looks; nor of one under another's name.
    for whose in ("red", "blue"):
        assert ledger.bytes_elsewhere(whose) == 0
    client = os.dup(mine.fd)
    kill(mine)
    assert after(ledger).bytes_elsewhere("red") == 0
    wrong = bytearray(pack_entry(A, MIB))
    wrong[12] = 0xFF
    (tmp_path / "s.arenas" / f"{A}.red").write_bytes(bytes(wrong))
    assert after(ledger).bytes_elsewhere("red") == 0
    os.close(client)
    theirs.close()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="write access to the directory of its socket"):
        ArenaLedger(str(tmp_path / "none" / "s")).enter(A, MIB, "")


def a_session(entry: ArenaEntry) -> Session:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    arena = os.memfd_create("gpufeed-arena")
    os.ftruncate(arena, 4 * 4096)
    welcome = {"arena_bytes": 4 * 4096, "extent_bytes": 4096, "window_extents": 4}
    return Session(Connection(ours), welcome, arena, os.dup(entry.fd))


def test_a_session_keeps_it_as_long_as_it_maps_the_arena(ledger) -> None:
    entry = ledger.enter(A, MIB, "")
    entry.touched(7)
    session = a_session(entry)
    kill(entry)
    assert after(ledger).bytes_elsewhere("") == 7
    session.close()
    assert after(ledger).bytes_elsewhere("") == 0


def test_a_session_with_views_keeps_it_until_the_last_is_gone(ledger) -> None:
    entry = ledger.enter(A, MIB, "")
    entry.touched(7)
    session = a_session(entry)
    kill(entry)
    view = session.arena()[10:20]
    session.close()
    assert bytes(view) == bytes(10)
    assert after(ledger).bytes_elsewhere("") == 7
    del view, session
    assert after(ledger).bytes_elsewhere("") == 0


CHILD = """
import mmap, os, sys
lock = mmap.mmap(int(sys.argv[1]), 0, mmap.MAP_SHARED, mmap.PROT_READ)
os.close(int(sys.argv[1]))
sys.stdout.write("mapped\\n"); sys.stdout.flush()
sys.stdin.read()
"""


def test_a_client_that_is_killed_lets_go(ledger) -> None:
    entry = ledger.enter(A, MIB, "")
    entry.touched(7)
    client = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(entry.fd)], pass_fds=(entry.fd,),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with client:
        assert client.stdout.readline() == b"mapped\n"
        kill(entry)
        assert after(ledger).bytes_elsewhere("") == 7
        client.send_signal(signal.SIGKILL)
    assert after(ledger).bytes_elsewhere("") == 0
