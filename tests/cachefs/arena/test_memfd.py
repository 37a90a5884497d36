"""The arena's memory: locked where the limit allows, and a note with the numbers where not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
