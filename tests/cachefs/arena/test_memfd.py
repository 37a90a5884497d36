"""The arena's memory: locked where the limit allows, and a note with the numbers where not."""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpufeed.cachefs.arena.memfd import Arena
from gpufeed.cachefs.config import ArenaConfig
from gpufeed.cachefs.errors import CapacityError, ConfigError
from gpufeed.cachefs.units import MIB

SCRIPT = """
import json, resource, sys
soft, hard = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
from gpufeed.cachefs.arena.memfd import Arena
from gpufeed.cachefs.config import ArenaConfig
arena = Arena(ArenaConfig(size_bytes=8 << 16, extent_bytes=1 << 16))
arena.slot(7)[:1] = b"x"
locked = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmLck")][0]
print(json.dumps([arena.lock_note, arena.locked_bytes, int(locked) * 1024]))
"""


def locked_under(soft: int, hard: int) -> tuple[str, int, int]:
    """Note, locked bytes by its own account and by the kernel's, without CAP_IPC_LOCK."""
    command = [sys.executable, "-c", SCRIPT, json.dumps([soft, hard])]
    try:
        plain = subprocess.run(
            ["setpriv", "--bounding-set=-ipc_lock", *command], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("needs setpriv")
    if plain.returncode:
        pytest.skip(f"capabilities cannot be dropped here: {plain.stderr.decode()[-200:]}")
    note, told, seen = json.loads(plain.stdout)
    return note, told, seen


def test_a_limit_that_is_large_enough_locks_the_arena_also_if_only_the_hard_one_is() -> None:
    note, told, seen = locked_under(65536, 1 << 20)
    assert note == "locked as it is touched"
    assert told == 8 << 16
    assert seen == 8 << 16


def test_a_small_limit_leaves_it_unlocked_and_says_what_would_do() -> None:
    note, told, seen = locked_under(65536, 65536)
    assert note.startswith("not locked (")
    assert "the memlock limit allows 64 KiB): raise it to 512 KiB or give CAP_IPC_LOCK" in note
    assert told == seen == 0


POOL = Path("/proc/sys/vm/nr_hugepages")
HUGE = ArenaConfig(size_bytes=16 * MIB, extent_bytes=2 * MIB, huge_pages=True)


has_huge_pages = pytest.mark.skipif(not POOL.exists(), reason="a kernel without huge pages")


@pytest.fixture
def pool():
    """Eight huge pages that are free, beside those that there are; none are kept."""
    before = int(POOL.read_text())
    try:
        POOL.write_text(str(before + 8))
    except OSError as error:
        pytest.skip(f"the pool of huge pages cannot be changed here: {error}")
    if int(POOL.read_text()) < before + 8:
        POOL.write_text(str(before))
        pytest.skip("this machine has no eight huge pages in one piece")
    yield
    POOL.write_text(str(before))


@has_huge_pages
def test_huge_pages_are_set_aside_whole_and_readers_cannot_write_them(pool) -> None:
    free = huge_pages_free()
    arena = Arena(HUGE)
    assert huge_pages_free() - huge_pages_reserved() == free - 8, "all of them, touched or not"
    arena.slot(0)[:4] = b"here"
    arena.slot(7)[-5:] = b"there"
    reader = mmap.mmap(arena.fd, arena.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    assert (reader[:4], reader[-5:]) == (b"here", b"there")
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, arena.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 2 * MIB)
    again = Path("/proc/self/smaps").read_text()
    sizes = re.findall(r"gpufeed-arena(?:.*\n)+?KernelPageSize: +(\d+) kB", again)
    assert sizes == ["2048", "2048"]
    reader.close()
    arena.close()
    assert huge_pages_free() == free


@has_huge_pages
def test_a_pool_that_is_too_small_is_told_with_the_numbers() -> None:
    pages = huge_pages_free() + 1000
    config = ArenaConfig(size_bytes=pages * 2 * MIB, extent_bytes=2 * MIB, huge_pages=True)
    with pytest.raises(
        CapacityError, match=f"takes {pages} huge pages of 2 MiB, {pages - 1000} are"
    ):
        Arena(config)


def test_extents_are_whole_huge_pages() -> None:
    with pytest.raises(ConfigError, match="multiple of 2 MiB"):
        ArenaConfig(size_bytes=16 * MIB, extent_bytes=MIB, huge_pages=True)


def huge_pages_free() -> int:
    return _meminfo("HugePages_Free")


def huge_pages_reserved() -> int:
    return _meminfo("HugePages_Rsvd")


def _meminfo(name: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))
