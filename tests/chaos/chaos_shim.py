"""The test's side of ``diskshim.c``: compile it, preload it, break the disk in use."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

CONTROL_BYTES = 4096
CALLS = {"write": 0, "read": 1, "sync": 2, "open": 3, "rename": 4, "unlink": 5}
FAULTS = {"none": 0, "EIO": 1, "ENOSPC": 2, "EROFS": 3, "hang": 4}
SOURCE = Path(__file__).with_name("diskshim.c")


def compiled(folder: Path) -> Path:
    """The library, or the test is skipped where nobody can compile it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("breaking a disk under a daemon needs a C compiler (cc)")
    library = folder / "diskshim.so"
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True
    )
    return library


class DiskShim:
    """The disk below `root`, as processes see it that run with `environment`."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._library = compiled(folder)
        self._control_path = folder / "diskshim.control"
        self._control_path.write_bytes(bytes(CONTROL_BYTES))
        with self._control_path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), CONTROL_BYTES)
        self._control = (ctypes.c_uint8 * CONTROL_BYTES).from_buffer(self._map)
        self._set = ctypes.CDLL(str(self._library)).diskshim_set
        self.environment = {
            "LD_PRELOAD": str(self._library),
            "DISKSHIM_ROOT": str(root),
            "DISKSHIM_CONTROL": str(self._control_path),
        }

    def set(self, call: str, fault: str) -> None:
        """From now on, calls of this kind suffer this; those that hang feel it at once."""
        self._set(self._control, CALLS[call], FAULTS[fault])

    @property
    def hits(self) -> int:
        """Calls that a fault has met so far."""
        return int.from_bytes(self._map[8:16], "little")

    @contextlib.contextmanager
    def broken(self, fault: str, *calls: str) -> Iterator[None]:
        """For the length of a block."""
        for call in calls:
            self.set(call, fault)
        try:
            yield
        finally:
            for call in calls:
                self.set(call, "none")

    def close(self) -> None:
        """Whoever still hangs goes on."""
        for call in CALLS:
            self.set(call, "none")
        del self._control
        self._map.close()
