"""What a result depends on besides the code: machine, kernel, libraries, what was preloaded.

Everything is read from the machine; what cannot be read is None, never a guess.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = (
    "gpufeed",
    "torch",
    "numpy",
    "pillow",
    "simplejpeg",
    "webdataset",
    "ossfs",
    "oss2",
    "fsspec",
    "uvloop",
    "httptools",
    "fastcrc",
    "aiohttp",
    "obstore",
    "opendal",
    "alibabacloud-oss-v2",
    "osstorchconnector",
)
_GIT_TIMEOUT_S = 5.0


def fingerprint(work_dir: Path) -> dict[str, Any]:
    """Describe this machine and this environment."""
    return {
        "cpu": _value(Path("/proc/cpuinfo"), "model name"),
        "cpus_online": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "cpu_quota": _line(Path("/sys/fs/cgroup/cpu.max")),
        "memory_bytes": _memory_bytes(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "shmem_huge_pages": _line(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in _DISTRIBUTIONS},
        "ld_preload": os.environ.get("LD_PRELOAD") or None,
        "git_commit": _git_commit(Path(__file__).resolve().parent),
        "load_average": list(os.getloadavg()),
        "work_dir_filesystem": _filesystem(work_dir),
        "page_cache": (
            "demo data is in it for every contender: the origin and the ceiling read from memory, "
            "gpufeed's own store is read past it where the file system allows"
        ),
    }


def _line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _value(path: Path, key: str) -> str | None:
    """The value of the first ``key : value`` line."""
    for line in (_line(path) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _memory_bytes() -> int | None:
    value = _value(Path("/proc/meminfo"), "MemTotal")
    return int(value.split()[0]) * 1024 if value else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit(directory: Path) -> str | None:
    """The commit that the sources came from, where they lie in a git checkout."""
    try:
        done = subprocess.run(  # noqa: S603 a fixed command
            ["git", "-C", str(directory), "rev-parse", "HEAD"],  # noqa: S607 git is where PATH says
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _filesystem(path: Path) -> str | None:
    """Type of the file system that holds `path`: the longest mount point above it."""
    best, found = "", None
    target = str(path.resolve())
    for line in (_line(Path("/proc/self/mounts")) or "").splitlines():
        _, mount, kind, *_ = line.split()
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, found = mount, kind
    return found
