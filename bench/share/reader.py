"""A reader of ``cachebench share``: one process, one job, one JSON line when ready, one at the end.

Whatever the bytes come by, they are looked at by the same line of numpy: one byte of every page of
an extent. All of the data is read twice, each time from the sign to begin on: over a new mapping,
whose page faults every reader has once in its life, and over one whose pages are mapped.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpufeed.bench.share.jobs import PAGE_BYTES, Job
from gpufeed.cachefs.client import DatasetRequest, Session
from gpufeed.cachefs.errors import GpufeedError, IntegrityError
from gpufeed.cachefs.units import round_up
from gpufeed.cachefs.wire import ExtentEvent, FailEvent

SILENCE_S = 60.0
# What the protocol sends for one extent: a header and a record; and back: a header and a number.
PUBLISHED_BYTES = 12 + 32
RELEASED_BYTES = 12 + 8

Memory = npt.NDArray[np.uint8]


def touch(memory: Memory, begin: int, length: int) -> int:
    """One byte of every page of ``memory[begin:begin + length]``, added up."""
    return int(np.add.reduce(memory[begin : begin + length : PAGE_BYTES], dtype=np.uint64))


def _tell(**values: Any) -> None:
    print(json.dumps({"type": "reader", **values}), flush=True)


def _wait_go(job: Job, what: str = "ready") -> None:
    _tell(what=what)
    os.read(job.go_fd, 1)


def _timed(job: Job, read: Callable[[], tuple[int, int]], what: str = "ready") -> dict[str, Any]:
    """One reading: bytes, when, and the sum of what was touched, which both sides must agree on."""
    _wait_go(job, what)
    began_s = time.monotonic()
    done_bytes, total = read()
    return {
        "bytes": done_bytes, "sum": total, "began_s": began_s, "ended_s": time.monotonic(),
    }  # fmt: skip


def _rotated(count: int, first: int) -> list[int]:
    return [(first + i) % count for i in range(count)]


# --- through a session ----------------------------------------------------------------------------


class _Reading:
    """Extent events of one session, in order."""

    def __init__(self, job: Job) -> None:
        self.session = Session.connect(job.socket, window_bytes=job.window_bytes)
        self.memory: Memory = np.frombuffer(self.session.arena(), np.uint8)
        self._base = self.memory.__array_interface__["data"][0]
        self._poll = select.poll()
        self._poll.register(self.session.fileno(), select.POLLIN)
        request = DatasetRequest(urls=(job.url,), kind="tar")
        self.dataset = self.session.open_dataset(request)
        self._order = _rotated(len(self.dataset.shards), job.first_shard)
        self.woken_ns = 0
        self._seen: dict[int, int] = {}

    def plan(self, passes: int) -> None:
        """Read everything so many times more."""
        self.session.extend_plan(self.dataset, self._order * passes)

    @property
    def bytes_a_pass(self) -> int:
        return sum(shard.size_bytes for shard in self.dataset.shards)

    def wait(self) -> list[ExtentEvent]:
        """The extents that came; waits for something, and notes when it came."""
        if not self._poll.poll(SILENCE_S * 1000):
            raise GpufeedError(f"the daemon sent nothing for {SILENCE_S:g} s")
        self.woken_ns = time.perf_counter_ns()
        found = []
        for event in self.session.receive():
            if isinstance(event, FailEvent):
                raise event.error
            if isinstance(event, ExtentEvent):
                found.append(event)
        return found

    def read(self, wanted_bytes: int) -> tuple[int, int]:
        """Touch and release so many bytes; returns them and the sum."""
        done, total, extent = 0, 0, self.session.extent_bytes
        while done < wanted_bytes:
            seqs = []
            for event in self.wait():
                begin = event.slot * extent
                self._seen[event.slot] = event.length_bytes
                total += touch(self.memory, begin, event.length_bytes)
                done += event.length_bytes
                seqs.append(event.seq)
            self.session.release(seqs)
        return done, total

    def check_places(self) -> None:
        """Every extent that was touched lies inside the mapping of the arena.

        Not in the measured time: the plain mapping is not checked either.

        Raises:
            IntegrityError: one does not.
        """
        for slot, length_bytes in self._seen.items():
            self._check_place(slot * self.session.extent_bytes, length_bytes)

    def _check_place(self, begin: int, length: int) -> None:
        part = self.memory[begin : begin + length]
        address = part.__array_interface__["data"][0]
        end = self._base + self.session.arena_bytes
        if not self._base <= address <= address + len(part) <= end or len(part) != length:
            raise IntegrityError(f"an extent at {address:#x} lies outside of the arena")


def _session(job: Job) -> dict[str, Any]:
    reading = _Reading(job)
    wanted_bytes = job.passes * reading.bytes_a_pass
    reading.plan(job.passes)
    first = _timed(job, lambda: reading.read(wanted_bytes))
    reading.plan(job.passes)
    again = _timed(job, lambda: reading.read(wanted_bytes), "again")
    reading.check_places()
    return {"first": first, "again": again}


def _wake(job: Job) -> dict[str, Any]:
    """From a release that makes room to the extent that it lets out."""
    if job.cpus:
        os.sched_setaffinity(0, {job.cpus[0]})
    reading = _Reading(job)
    passes = job.turns * reading.session.extent_bytes // reading.bytes_a_pass + 2
    reading.plan(passes)
    held: list[int] = []
    while len(held) < reading.session.window_extents:
        held.extend(event.seq for event in reading.wait())
    _wait_go(job)
    took_us = []
    for _ in range(job.turns):
        begun_ns = time.perf_counter_ns()
        reading.session.release([held.pop(0)])
        # Woken by what came before an extent, it waits on.
        while not (found := reading.wait()):
            pass
        took_us.append((reading.woken_ns - begun_ns) / 1e3)
        held.extend(event.seq for event in found)
    return {"took_us": took_us}


# --- what it is compared with ---------------------------------------------------------------------


def _plain(job: Job) -> dict[str, Any]:
    """One shared mapping, no protocol: the extents of the shards in the same order."""
    begins = [0]
    for size in job.sizes_bytes:
        begins.append(begins[-1] + round_up(size, job.extent_bytes))
    memory: Memory = np.frombuffer(
        mmap.mmap(job.map_fd, begins[-1], mmap.MAP_SHARED, mmap.PROT_READ), np.uint8
    )
    order = _rotated(len(job.sizes_bytes), job.first_shard)

    def read(passes: int) -> tuple[int, int]:
        done = total = 0
        for _ in range(passes):
            for shard in order:
                end = begins[shard] + job.sizes_bytes[shard]
                for begin in range(begins[shard], end, job.extent_bytes):
                    length = min(job.extent_bytes, end - begin)
                    total += touch(memory, begin, length)
                    done += length
        return done, total

    first = _timed(job, lambda: read(job.passes))
    return {"first": first, "again": _timed(job, lambda: read(job.passes), "again")}


class _Threads:
    """Reads of blocks past the page cache, as many at a time as there are threads."""

    def __init__(self, count: int, block_bytes: int) -> None:
        self._work: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, int] | OSError] = queue.SimpleQueue()
        self._block_bytes = block_bytes
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        block = mmap.mmap(-1, self._block_bytes)
        memory: Memory = np.frombuffer(block, np.uint8)
        view = memoryview(block)
        while (item := self._work.get()) is not None:
            descriptor, begin, length = item
            try:
                count = os.preadv(descriptor, [view[: round_up(length, PAGE_BYTES)]], begin)
            except OSError as error:
                self._done.put(error)
                return
            self._done.put((count, touch(memory, 0, count)))

    def read(self, items: list[tuple[int, int, int]]) -> tuple[int, int]:
        """Descriptor, begin and length of each; returns bytes and their sum."""
        for item in items:
            self._work.put(item)
        total_bytes = total = 0
        for _ in items:
            found = self._done.get(timeout=SILENCE_S)
            if isinstance(found, OSError):
                raise GpufeedError(f"a bare read failed: {found}")
            total_bytes += found[0]
            total += found[1]
        return total_bytes, total

    def close(self) -> None:
        for _ in self._threads:
            self._work.put(None)


def _bare(job: Job) -> dict[str, Any]:
    """Files read past the page cache, `depth` reads under way at a time."""
    items: list[tuple[int, int, int]] = []
    for path in job.files:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        size = os.fstat(descriptor).st_size
        items.extend(
            (descriptor, begin, min(job.extent_bytes, size - begin))
            for begin in range(0, size, job.extent_bytes)
        )
    threads = _Threads(job.depth, job.extent_bytes)
    result = {"first": _timed(job, lambda: threads.read(items))}
    threads.close()
    return result


def _ping(job: Job) -> dict[str, Any]:
    """Two Python processes and a bare socket of the same kind, with messages of the same length."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        if job.cpus:
            os.sched_setaffinity(0, {job.cpus[1]})
        answer = bytes(PUBLISHED_BYTES)
        while theirs.recv(4096):
            theirs.send(answer)
        os._exit(0)
    theirs.close()
    if job.cpus:
        os.sched_setaffinity(0, {job.cpus[0]})
    _wait_go(job)
    message = bytes(RELEASED_BYTES)
    took_us = []
    for _ in range(job.turns):
        begun_ns = time.perf_counter_ns()
        ours.send(message)
        ours.recv(4096)
        took_us.append((time.perf_counter_ns() - begun_ns) / 1e3)
    ours.close()
    os.wait()
    return {"took_us": took_us}


_MODES: dict[str, Callable[[Job], dict[str, Any]]] = {
    "session": _session, "plain": _plain, "bare": _bare, "wake": _wake, "ping": _ping,
}  # fmt: skip


def main(text: str) -> int:
    """Run one job; errors become one JSON line, as the bench's children tell them."""
    job = Job.load(text)
    try:
        _tell(what="done", **_MODES[job.mode](job))
    except GpufeedError as error:
        message = {"type": "error", "class": type(error).__name__, "message": str(error)}
        print(json.dumps(message), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
