"""What this process has open."""

from __future__ import annotations

import os


def open_fds() -> dict[int, str]:
    """Descriptors of this process and what they are."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
    return found
