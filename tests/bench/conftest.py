"""Makes `bench_rows` importable; checks that no process of a test outlives it."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def processes_naming(text):
    """Command lines of live processes that contain `text`, our own excepted."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if text in words:
                found.append(f"{name} {words}")
    return found


@pytest.fixture
def no_process_left(tmp_path):
    """No process whose command line names this test's directory is left after it."""
    yield
    assert processes_naming(str(tmp_path)) == []


@pytest.fixture
def processes():
    """`processes_naming`, for tests that look themselves."""
    return processes_naming
