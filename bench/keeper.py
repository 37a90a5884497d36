"""Keeps one command, and everything it starts, from outliving the bench.

Run by path (``python -I -S keeper.py COMMAND...``), standard library only, so that it starts in
milliseconds. Its standard input is the **lifeline**: a pipe whose other end the bench holds. When
the bench ends, however it ends, the kernel closes that end and the keeper reads end-of-file.

Invariants:

- The keeper leads a session of its own, so a Ctrl-C of the terminal reaches the bench alone.
- It is a subreaper: processes orphaned below it become its children, whatever process group or
  session they moved to.
- It ends only after every process below it is gone: SIGTERM to the command's group,
  `GRACE_S` later SIGKILL to all of it. Helpers that left the group (torch's keeper of shared
  memory, which removes files when its clients are gone) have `ORPHAN_GRACE_S` to finish.
- It ends with the command's own status (128 + signal where a signal ended it).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 5.0
ORPHAN_GRACE_S = 1.0
_REAP_ROUNDS_MAX = 1000
_PR_SET_CHILD_SUBREAPER = 36
_LIFELINE_FD = 0


def _become_subreaper() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> list[int]:
    """Live and dead children of this process; orphans below it are among them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _await_orphans() -> None:
    """Reap what ends by itself within `ORPHAN_GRACE_S`."""
    deadline = time.monotonic() + ORPHAN_GRACE_S
    for _ in range(_REAP_ROUNDS_MAX):
        pids = _children()
        left_s = deadline - time.monotonic()
        if not pids or left_s <= 0:
            return
        # Only we reap our children: until then their numbers are theirs.
        fds = {os.pidfd_open(pid): pid for pid in pids}
        ready = select.select(list(fds), [], [], left_s)[0]
        for fd, pid in fds.items():
            os.close(fd)
            if fd in ready:
                os.waitpid(pid, 0)


def _kill_the_rest() -> None:
    """Kill and reap children until none is left; each round may bring new orphans."""
    for _ in range(_REAP_ROUNDS_MAX):
        pids = _children()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _wait(child_fd: int, wake_fd: int) -> bool:
    """Wait for the command's end (True) or for the order to end it (False)."""
    poller = select.poll()
    for fd in (child_fd, wake_fd, _LIFELINE_FD):
        poller.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll()}
        if child_fd in ready:
            return True
        if wake_fd in ready:
            return False
        if not os.read(_LIFELINE_FD, 4096):
            return False


def main(argv: list[str]) -> int:
    """Run `argv` and keep it; see the top of the file."""
    _become_subreaper()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        child = subprocess.Popen(  # noqa: S603 the bench's own command line
            argv, stdin=subprocess.DEVNULL, close_fds=False, process_group=0
        )
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        return 127
    child_fd = os.pidfd_open(child.pid)
    if not _wait(child_fd, wake_read):
        _signal_group(child.pid, signal.SIGTERM)
        select.select([child_fd], [], [], GRACE_S)
    if child.poll() is None:
        _signal_group(child.pid, signal.SIGKILL)
    status = child.wait()
    _signal_group(child.pid, signal.SIGKILL)
    _await_orphans()
    _kill_the_rest()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
