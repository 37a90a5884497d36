"""Makes `fake_session` importable here and in spawned workers; checks that nothing is left."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def nothing_left():
    """No child process, feeder thread or session outlives a test."""
    import fake_session
    from open_files import open_fds

    before = open_fds()
    yield
    gc.collect()
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("gpufeed")]
    assert not [t for t in threading.enumerate() if t.name.startswith("gpufeed")]
    assert not fake_session.open_sessions
    # Pools of helper processes (fork server, resource tracker) may keep a few of their own.
    leaked = {fd: name for fd, name in open_fds().items() if fd not in before}
    assert not [n for n in leaked.values() if "memfd:gpufeed" in n or "event" in n], leaked
