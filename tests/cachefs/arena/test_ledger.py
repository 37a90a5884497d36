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


def test_the_file_is_pinned() -> None:
    data = pack_entry(A, 64 * MIB, "red")
    assert len(data) == ENTRY_BYTES == 136
    assert data[:8] == b"GFAL\x01\x00\x00\x00"
    assert data[12:44] == A.encode()
    assert data[44:52] == (64 * MIB).to_bytes(8, "little")
    assert data[52:116] == b"red".ljust(64, b"\0")
    assert data[116:] == bytes(20)
    assert data[8:12].hex() == "de634b44"
    assert unpack_entry(data) == Elsewhere(A, "red", 0)


@pytest.mark.parametrize("at", [0, 4, 9, 20, 50, 60, 120])
def test_a_damaged_file_is_none(at: int) -> None:
    data = bytearray(pack_entry(A, MIB, "red"))
    data[at] ^= 1
    assert unpack_entry(bytes(data)) is None
    assert unpack_entry(bytes(data[:-1])) is None


def test_no_more_than_the_arena_is_believed() -> None:
    data = pack_entry(A, MIB, "")[:-8] + (5 * MIB).to_bytes(8, "little")
    assert unpack_entry(data) == Elsewhere(A, "", MIB)


def test_an_arena_that_nobody_maps_leaves_nothing(ledger, folder) -> None:
    entry = ledger.enter(A, MIB, "")
    assert os.listdir(folder) == [A]
    entry.close()
    assert not folder.exists()
    assert ledger.bytes_elsewhere(frozenset(), "") == 0


def test_a_killed_daemon_whose_arena_a_client_has(ledger, folder) -> None:
    entry = ledger.enter(A, 8 * MIB, "")
    entry.touched(3 * MIB)
    client = os.dup(entry.fd)
    kill(entry)
    mine = ledger.enter(B, MIB, "")
    mine.touched(MIB)
    assert ledger.bytes_elsewhere(frozenset({B}), "") == 3 * MIB
    # A mapping keeps it without the descriptor.
    mapped = mmap.mmap(client, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    os.close(client)
    assert ledger.bytes_elsewhere(frozenset({B}), "") == 3 * MIB
    mapped.close()
    assert ledger.bytes_elsewhere(frozenset({B}), "") == 0
    assert os.listdir(folder) == [B]
    mine.close()


def test_a_daemon_that_ends_leaves_the_file_to_the_client(ledger, folder) -> None:
    entry = ledger.enter(A, 8 * MIB, "")
    entry.touched(2 * MIB)
    client = os.dup(entry.fd)
    entry.close()
    assert ledger.bytes_elsewhere(frozenset(), "") == 2 * MIB
    os.close(client)
    assert ledger.bytes_elsewhere(frozenset(), "") == 0
    assert os.listdir(folder) == []


def test_tenants_have_their_own_and_what_is_nobodys_counts_for_each(tmp_path: Path) -> None:
    ledger = ArenaLedger(str(tmp_path / "s"), ("red", "blue"))
    for number, (tenant, size) in enumerate((("red", 1), ("blue", 2), ("gone", 4))):
        ledger.enter(str(number) * 32, MIB, tenant).touched(size)
    assert ledger.bytes_elsewhere(frozenset(), "red") == 1 + 4
    assert ledger.bytes_elsewhere(frozenset(), "blue") == 2 + 4


def test_what_is_not_ours_is_left_alone_or_removed(ledger, folder) -> None:
    entry = ledger.enter(A, MIB, "")
    (folder / "sub").mkdir()
    (folder / "link").symlink_to(folder / A)
    os.mkfifo(folder / "pipe")
    (folder / "new-unfinished").write_bytes(b"")
    assert ledger.bytes_elsewhere(frozenset({A}), "") == 0
    assert not (folder / "new-unfinished").exists()
    assert (folder / A).exists()
    entry.close()


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
    assert ledger.bytes_elsewhere(frozenset(), "") == 7
    session.close()
    assert ledger.bytes_elsewhere(frozenset(), "") == 0


def test_a_session_with_views_keeps_it_until_the_last_is_gone(ledger) -> None:
    entry = ledger.enter(A, MIB, "")
    entry.touched(7)
    session = a_session(entry)
    kill(entry)
    view = session.arena()[10:20]
    session.close()
    assert bytes(view) == bytes(10)
    assert ledger.bytes_elsewhere(frozenset(), "") == 7
    del view, session
    assert ledger.bytes_elsewhere(frozenset(), "") == 0


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
        assert ledger.bytes_elsewhere(frozenset(), "") == 7
        client.send_signal(signal.SIGKILL)
    assert ledger.bytes_elsewhere(frozenset(), "") == 0
