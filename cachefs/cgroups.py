"""What our control groups say, in both of the kernel's versions.

Every file is read below `root`, so a test gives a fixture tree.
"""

from __future__ import annotations

import os
from collections.abc import Iterator


def read_text(root: str, path: str) -> str:
    """A small file of the kernel's; empty if there is none."""
    try:
        with open(os.path.join(root, path), encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def folders(root: str, controller: str) -> Iterator[tuple[int, str]]:
    """The version and the folder of our group and of those above it, for one v1 controller or v2.

    In a container the path may be the host's while the mount is our own group: then only the
    mount's root exists, which is the last one told.
    """
    for line in read_text(root, "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            version, base = 2, "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, base = 1, f"sys/fs/cgroup/{controller}"
        else:
            continue
        path = path.rstrip("/")
        while path.startswith("/"):
            yield version, base + path
            path = path.rpartition("/")[0]
        yield version, base
