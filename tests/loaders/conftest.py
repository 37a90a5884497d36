"""Makes `fake_session` importable here and in spawned workers; checks that nothing is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def nothing_left():
    """No child process, feeder thread or session outlives a test."""
    import fake_session

    before = open_fds()
    yield
    gc.collect()
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("gpufeed")]
    assert not [t for t in threading.enumerate() if t.name.startswith("gpufeed")]
    assert not fake_session.open_sessions
    # Pools of helper processes (fork server, resource tracker) may keep a few of their own.
    leaked = {fd: name for fd, name in open_fds().items() if fd not in before}
    assert not [n for n in leaked.values() if "memfd:gpufeed" in n or "event" in n], leaked


def open_fds() -> dict[int, str]:
    """Descriptors of this process and what they are."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
    return found
