"""What runs inside a "pod" of `test_pods.py`: `python pod.py daemon|trainer SPEC` in namespaces.

Both get a 64 MB /dev/shm of their own, watched for every file that is ever made in it, and a locked
memory limit of 64 KiB. What they find is printed as one JSON line.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHM_BYTES = 64 * 1000 * 1000
MEMLOCK_BYTES = 64 * 1024
# sys/inotify.h: create, moved in, opened for writing and closed.
WATCHED = 0x100 | 0x80 | 0x8
# Root of a namespace of its own, nobody's elsewhere: no capability of it reaches out.
IN_USER_NAMESPACE = ["unshare", "--user", "--map-root-user"]


def settle() -> int:
    """Become what a container is: small shared memory, low limits; returns the watch on it."""
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SHM_BYTES}", "shm", "/dev/shm"], check=True
    )
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MEMLOCK_BYTES, MEMLOCK_BYTES))
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert watch >= 0, ctypes.get_errno()
    assert libc.inotify_add_watch(watch, b"/dev/shm", WATCHED) >= 0, ctypes.get_errno()
    return int(watch)


def shm_use(watch: int) -> dict[str, Any]:
    """Whether anything was ever made there, and what is there."""
    try:
        events = len(os.read(watch, 65536))
    except BlockingIOError:
        events = 0
    found = os.statvfs("/dev/shm")
    return {
        "events_bytes": events,
        "used_bytes": (found.f_blocks - found.f_bfree) * found.f_frsize,
        "names": os.listdir("/dev/shm"),
    }


def without(*capabilities: str) -> list[str]:
    """A command prefix that takes these from whatever follows, for good."""
    return ["setpriv", "--bounding-set=" + ",".join(f"-{name}" for name in capabilities)]


def started(command: list[str], **options: Any) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start a service; it, and the line by which it says that it serves."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*command, "--ready-fd", str(writing)], pass_fds=(writing,), **options
    )
    os.close(writing)
    with open(reading, "rb") as ready:
        return process, json.loads(ready.readline())


def run_daemon(spec: dict[str, Any]) -> dict[str, Any]:
    """A stand-in for OSS and a daemon that reads from it, until standard input ends."""
    watch = settle()
    standin, origin = started(
        [sys.executable, "-c",
         "import sys; from gpufeed.cachefs.testing.standin.command import command; "
         "sys.exit(command(sys.argv[1:]))", "--root", spec["root"], "--port", "0"],
        stdout=sys.stderr,
    )  # fmt: skip
    environment = {
        **os.environ,
        "GPUFEED_ORIGIN_ENDPOINT": origin["endpoint"], "GPUFEED_ORIGIN_REGION": origin["region"],
        "GPUFEED_ORIGIN_KEY": origin["key"], "GPUFEED_ORIGIN_SECRET": origin["secret"],
        "GPUFEED_ARENA_SIZE_BYTES": "32MiB", "GPUFEED_ARENA_EXTENT_BYTES": "256KiB",
        "GPUFEED_STORE_PATH": spec["cache"], "GPUFEED_STORE_CAPACITY_BYTES": "64MiB",
        "GPUFEED_STORE_FREE_FLOOR_RATIO": "0",
    }  # fmt: skip
    daemon, line = started(
        [*without("ipc_lock"), sys.executable, "-m", "gpufeed.daemon", "daemon",
         "--socket", spec["socket"], "--http-port", "-1"],
        env=environment, stderr=subprocess.PIPE,
    )  # fmt: skip
    print(json.dumps({"ready": line, "inode": os.stat(spec["socket"]).st_ino}), flush=True)
    sys.stdin.read()
    inode = os.stat(spec["socket"]).st_ino
    daemon.terminate()
    _, log = daemon.communicate(timeout=60)
    standin.terminate()
    standin.wait()
    return {"shm": shm_use(watch), "rc": daemon.returncode, "log": log.decode(), "inode": inode}


def refusal(action: Callable[[], object]) -> str:
    """The errno by which it was refused; empty if it was not."""
    try:
        action()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return ""


def attack_socket(path: str) -> dict[str, str]:
    """A root that wants to put itself in the daemon's place."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    Path("/tmp/mine").write_bytes(b"")
    found = {
        "unlink": refusal(lambda: os.unlink(path)),
        "rename": refusal(lambda: os.rename(path, path + ".old")),
        "replace": refusal(lambda: os.replace("/tmp/mine", path)),
        "chmod": refusal(lambda: os.chmod(path, 0o777)),
        "bind": refusal(lambda: listener.bind(os.path.join(os.path.dirname(path), "other"))),
        "lock": refusal(lambda: os.open(path + ".lock", os.O_RDWR)),
    }
    listener.close()
    remount = subprocess.run(
        ["mount", "-o", "remount,rw,bind", os.path.dirname(path)], capture_output=True, check=False
    )
    return {**found, "remount": "refused" if remount.returncode else ""}


def attack_arena(path: str) -> dict[str, str]:
    """A client that wants to write what others read."""
    from gpufeed.cachefs.client import Session

    with Session.connect(path) as session:
        fd, size = session.arena_fd, session.arena_bytes
        again = f"/proc/self/fd/{fd}"
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(libc_map(libc, fd, size))

        def protect() -> None:
            if libc.mprotect(address, ctypes.c_size_t(4096), 3):
                raise OSError(ctypes.get_errno(), "mprotect")

        def punch() -> None:
            # linux/falloc.h: punch a hole, keep the size.
            if libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(4096)):
                raise OSError(ctypes.get_errno(), "fallocate")

        return {
            "map writable": refusal(lambda: mmap.mmap(fd, size, mmap.MAP_SHARED, 3)),
            "pwrite": refusal(lambda: os.pwrite(fd, b"x", 0)),
            "grow": refusal(lambda: os.ftruncate(fd, 2 * size)),
            "shrink": refusal(lambda: os.ftruncate(fd, 0)),
            "seal": refusal(lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)),
            "reopened pwrite": refusal(lambda: os.pwrite(os.open(again, os.O_RDWR), b"x", 0)),
            "mprotect": refusal(protect),
            "punch": refusal(punch),
        }


def libc_map(libc: ctypes.CDLL, fd: int, size: int) -> int:
    """A read-only shared mapping's address."""
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(size), 1, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    assert address not in (None, ctypes.c_void_p(-1).value)
    return int(address)


def train(spec: dict[str, Any], method: str) -> dict[str, str]:
    """An epoch of the loader with two decode workers: a checksum of each sample, by key."""
    from pods_data import checksum

    from gpufeed.loaders import DataLoader, ShardDataset

    dataset = ShardDataset(spec["url"], decode=checksum)
    loader = DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context=method)
    found: dict[str, str] = {}
    for batch in loader:
        found.update(zip(batch["key"], batch["sum"], strict=True))
    return found


def run_trainer(spec: dict[str, Any]) -> dict[str, Any]:
    """Train, then try what a hostile root would."""
    sys.path.insert(0, os.path.dirname(__file__))
    watch = spec["watch"]
    os.environ["GPUFEED_DAEMON"] = spec["socket"]
    return {
        "samples": {method: train(spec, method) for method in ("fork", "spawn")},
        "socket": attack_socket(spec["socket"]),
        "arena": attack_arena(spec["socket"]),
        "shm": shm_use(watch),
        "user_namespace": os.readlink("/proc/self/ns/user"),
        "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    }


def enter_trainer(spec: dict[str, Any]) -> None:
    """Only the socket's directory is shared, and read-only; then be a container's root."""
    watch = settle()
    folder = os.path.dirname(spec["socket"])
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
    # It sees nothing else of the daemon.
    for hidden in (spec["root"], spec["cache"]):
        subprocess.run(["mount", "-t", "tmpfs", "none", hidden], check=True)
    os.set_inheritable(watch, True)
    text = json.dumps({**spec, "watch": watch})
    command = [*without("sys_admin", "ipc_lock", "sys_ptrace", "dac_read_search")]
    command += [sys.executable, __file__, "inside", text]
    if spec["user"]:
        command[:0] = IN_USER_NAMESPACE
    os.execvp(command[0], command)


def main(role: str, text: str) -> None:
    """See the top of the file."""
    spec = json.loads(text)
    if role == "trainer":
        enter_trainer(spec)
    result = run_daemon(spec) if role == "daemon" else run_trainer(spec)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
