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
    """No child process, feeder thread, session or descriptor of ours outlives its test.

    Only what is new is complained about, so that a test which leaves something is named, and the
    hundreds after it are not.
    """
    before = _ours()
    yield
    gc.collect()
    left = {kind: sorted(map(str, found - before[kind])) for kind, found in _ours().items()}
    assert not any(left.values()), f"the test left {left}"


def _ours() -> dict[str, set[object]]:
    import fake_session
    from open_files import open_fds

    children, threads = multiprocessing.active_children(), threading.enumerate()
    return {
        "children": {p for p in children if p.name.startswith("gpufeed")},
        "threads": {t for t in threads if t.name.startswith("gpufeed")},
        "sessions": set(fake_session.open_sessions),
        # Pools of helper processes (fork server, resource tracker) may keep a few of their own.
        "descriptors": {
            (fd, name)
            for fd, name in open_fds().items()
            if "memfd:gpufeed" in name or "event" in name
        },
    }
