"""The second descriptor of a WELCOME, for sessions without a daemon."""

from __future__ import annotations

import os


def lock_fd() -> int:
    fd = os.memfd_create("lock", os.MFD_CLOEXEC)
    os.write(fd, bytes(100))
    return fd
