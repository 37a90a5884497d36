"""File systems of a test's own, and what lies in a cache directory as the disk sees it."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

SECTOR_BYTES = 512
SAMPLE_S = 0.005


def run_or_skip(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs to mount a disk: {' '.join(command)}: {done.stderr.strip()}")


def mount(kind: str, size_bytes: int, place: Path) -> None:
    """Mount an empty file system, or skip the test."""
    if os.geteuid() != 0:
        pytest.skip("mounting a disk needs root")
    place.mkdir()
    if kind == "tmpfs":
        run_or_skip("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place))
        return
    image = place.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    run_or_skip("mkfs.ext4", "-q", "-m", "0", str(image))
    run_or_skip("mount", "-o", "loop", str(image), str(place))


def shard_files(cache: Path) -> dict[str, int]:
    """Every file below ``shards``: its name and the bytes that it takes on the disk."""
    found = {}
    for folder in os.scandir(cache / "shards"):
        for entry in os.scandir(folder):
            try:
                found[entry.name] = entry.stat().st_blocks * SECTOR_BYTES
            except FileNotFoundError:  # removed meanwhile
                continue
    return found


def index_bytes(cache: Path) -> int:
    """What the index takes on the disk."""
    return sum(e.stat().st_blocks * SECTOR_BYTES for e in os.scandir(cache / "index"))


def used_bytes(place: Path) -> int:
    """What the file system says is taken, deleted files that are open included."""
    found = os.statvfs(place)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


class DiskWatch:
    """Samples `used_bytes` of a mounted disk in a thread; `peak_bytes` is the most ever seen."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._stop = threading.Event()
        self.peak_bytes = 0
        self.samples = 0
        self._thread = threading.Thread(target=self._watch, name="disk-watch")

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, used_bytes(self._place))
            self.samples += 1

    def __enter__(self) -> DiskWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
