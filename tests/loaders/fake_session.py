"""A session that serves shards from memory, through a real memfd and a readable descriptor.

It does in the caller's thread what a daemon does in its own process: publishes extents in plan
order as long as there is credit, then the samples that they complete, and takes extents back. It
refuses what a daemon would refuse, and `close` fails the test when an epoch that ended by itself
left an extent unreleased.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import random
import socket
import tarfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpufeed.cachefs.client import Dataset, DatasetRequest, ShardInfo
from gpufeed.cachefs.errors import CapacityError, DaemonUnavailableError
from gpufeed.cachefs.sampleindex import Member, SampleIndex, SampleIndexBuilder
from gpufeed.cachefs.wire import ExtentEvent, FailEvent, SamplesEvent, ShardEndEvent

EXTENT_BYTES = 64 * 1024

open_sessions: set[FakeSession] = set()


@dataclass
class FakeShard:
    """A shard: its bytes, its samples, and for each sample where its bytes end."""

    name: str
    data: bytes
    index: SampleIndex
    samples: list[dict[str, bytes | str]]

    @property
    def ends(self) -> list[int]:
        return [int(end) for end in self.index.ends()]


def tar_shard(name: str, samples: Sequence[tuple[str, dict[str, bytes]]]) -> FakeShard:
    """A tar in WebDataset layout."""
    buffer = io.BytesIO()
    builder = SampleIndexBuilder()
    dicts = []
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for key, fields in samples:
            members = []
            for ext, data in fields.items():
                info = tarfile.TarInfo(f"{key}.{ext}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
                padded = -(-len(data) // 512) * 512
                members.append(Member(ext, buffer.tell() - padded, len(data)))
            builder.add(key, members)
            lower = {ext.lower(): data for ext, data in fields.items()}
            dicts.append({"__key__": key, "__url__": name, **lower})
    return FakeShard(name, buffer.getvalue(), builder.build(), dicts)


def loose_shard(name: str, objects: Sequence[tuple[str, str, bytes]]) -> FakeShard:
    """A virtual shard: objects side by side, without headers."""
    builder = SampleIndexBuilder()
    data = bytearray()
    dicts = []
    for key, ext, body in objects:
        builder.add(key, [Member(ext, len(data), len(body))])
        data += body
        dicts.append({"__key__": key, "__url__": name, ext: body})
    return FakeShard(name, bytes(data), builder.build(), dicts)


def make_shards(counts: Sequence[int], *, seed: int = 0, size: int = 3000) -> list[FakeShard]:
    """Tar shards with `counts` samples of random bytes and a number in text."""
    rng = random.Random(seed)
    number = itertools.count()
    shards = []
    for shard, count in enumerate(counts):
        samples = []
        for _ in range(count):
            body = rng.randbytes(rng.randrange(1, 2 * size))
            samples.append((f"dir/{next(number):06d}", {"bin": body, "cls": b"%d" % shard}))
        shards.append(tar_shard(f"fake://bucket/shard-{shard:04d}.tar", samples))
    return shards


@dataclass
class FakeDaemon:
    """What sessions are opened on. One arena for all of them, as a daemon's tenant has."""

    shards: list[FakeShard]
    window_extents: int = 16
    slots: int = 64
    extent_bytes: int = EXTENT_BYTES
    indexed: bool = False
    scatter: bool = False
    fail_at: tuple[int, Exception] | None = None
    # Extents after which each next session is lost; sessions that are refused before that.
    lives: list[int] = field(default_factory=list)
    absences: int = 0
    sessions: int = 0
    plans: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fd = os.memfd_create("fake-arena", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.slots * self.extent_bytes)
        # Of all sessions.
        self.free = list(range(self.slots))
        if self.scatter:  # no two neighbours follow each other
            self.free = self.free[::2] + self.free[1::2]

    def open_session(
        self,
        *,
        daemon: str | None = None,
        window_bytes: int,
        whole: bool = False,
        former: str = "",
    ) -> FakeSession:
        self.sessions += 1
        if self.absences:
            self.absences -= 1
            raise DaemonUnavailableError("no fake daemon answers")
        if whole and window_bytes > self.slots * self.extent_bytes:
            raise CapacityError(f"a window of {window_bytes} is needed whole")
        return FakeSession(self, window_bytes, whole=whole)

    def samples(self, order: Sequence[int] | None = None) -> list[dict]:
        order = range(len(self.shards)) if order is None else order
        return [sample for shard in order for sample in self.shards[shard].samples]

    def close(self) -> None:
        os.close(self.fd)


class FakeSession:
    def __init__(self, daemon: FakeDaemon, window_bytes: int, *, whole: bool) -> None:
        self._daemon = daemon
        self.extent_bytes = daemon.extent_bytes
        self.arena_bytes = daemon.slots * daemon.extent_bytes
        self.arena_fd = os.dup(daemon.fd)
        self.lock_fd = os.dup(daemon.fd)
        self._pid = os.getpid()
        self._ours, self._theirs = socket.socketpair()
        self._free = daemon.free
        self._life = daemon.lives.pop(0) if daemon.lives else -1
        self._window = min(daemon.window_extents, daemon.slots)
        if whole:
            self._window = window_bytes // daemon.extent_bytes
        self.window_extents = self._window
        self.socket_path = "fake"
        self._leased: dict[int, int] = {}
        self._seq = 0
        self.forecasts: list[int] = []
        self.jobs: set[str] = set()
        self._plan: list[int] = []
        self._position = 0
        self._extent = 0
        self._sample = 0
        self._events: deque = deque()
        self._signalled = False
        self.closed = False
        import mmap

        self._map = mmap.mmap(self.arena_fd, self.arena_bytes, prot=mmap.PROT_READ)
        daemon.plans.append(self._plan)
        open_sessions.add(self)

    def open_dataset(self, request: DatasetRequest, timeout_s: float = 60.0) -> Dataset:
        assert request.urls
        return self._dataset(counted=self._daemon.indexed)

    def index_dataset(self, dataset: Dataset, progress=None) -> Dataset:
        return self._dataset(counted=True)

    def _dataset(self, *, counted: bool) -> Dataset:
        shards = tuple(
            ShardInfo(s.name, len(s.data), len(s.index) if counted else None)
            for s in self._daemon.shards
        )
        names = hashlib.sha256("\n".join(s.name for s in shards).encode()).hexdigest()
        return Dataset(1, "tar", names, shards)

    def extend_plan(self, dataset: Dataset, shard_ids: Sequence[int]) -> range:
        assert not self.closed
        first = len(self._plan)
        self._plan.extend(shard_ids)
        self._publish()
        return range(first, len(self._plan))

    def forecast(self, dataset: Dataset, shard_ids: Sequence[int], *, job: str, anew: bool) -> None:
        assert not self.closed
        self.jobs.add(job)
        if anew:
            self.forecasts.clear()
        self.forecasts.extend(shard_ids)

    def fileno(self) -> int:
        return self._ours.fileno()

    def receive(self) -> list:
        assert not self.closed
        if self._signalled:
            self._ours.recv(16)
            self._signalled = False
        events, self._events = list(self._events), deque()
        for event in events:
            if isinstance(event, FailEvent) and event.position < 0:
                raise DaemonUnavailableError("the fake daemon went away")
        return events

    def release(self, seqs: Sequence[int]) -> None:
        assert not self.closed
        for seq in seqs:
            slot = self._leased.pop(seq)  # KeyError: released twice, or never published
            self._scrub(slot)
            self._free.append(slot)
        self._publish()

    def arena(self) -> memoryview:
        return memoryview(self._map)

    def close(self) -> None:
        if os.getpid() != self._pid or self.closed:
            return
        self.closed = True
        open_sessions.discard(self)
        self._ours.close()
        self._theirs.close()
        os.close(self.arena_fd)
        os.close(self.lock_fd)
        if self._position == len(self._plan) and not self._events:
            self.left = dict(self._leased)
        self._free.extend(self._leased.values())

    @property
    def leased_count(self) -> int:
        return len(self._leased)

    def _scrub(self, slot: int) -> None:
        """A released slot is reused for something else: whoever still reads it must see that."""
        os.pwrite(self._daemon.fd, b"\xee" * self.extent_bytes, slot * self.extent_bytes)

    def _publish(self) -> None:
        while self._position < len(self._plan):
            if self._daemon.fail_at is not None and self._position == self._daemon.fail_at[0]:
                self._emit(FailEvent(self._position, self._daemon.fail_at[1]))
                self._position = len(self._plan) + 1_000_000
                return
            shard = self._daemon.shards[self._plan[self._position]]
            extents = -(-len(shard.data) // self.extent_bytes)
            if self._extent < extents:
                if len(self._leased) >= self._window or not self._free:
                    return
                self._publish_extent(shard)
                continue
            end = ShardEndEvent(self._position, len(shard.index), {"nvme": len(shard.data)})
            self._emit(end)
            self._position += 1
            self._extent = self._sample = 0

    def _publish_extent(self, shard: FakeShard) -> None:
        if self._life == 0:
            self._emit(FailEvent(-1, DaemonUnavailableError("")))
        self._life -= 1
        begin = self._extent * self.extent_bytes
        piece = shard.data[begin : begin + self.extent_bytes]
        slot = self._free.pop(0)
        os.pwrite(self._daemon.fd, piece, slot * self.extent_bytes)
        self._leased[self._seq] = slot
        self._emit(ExtentEvent(self._seq, self._position, self._extent, slot, len(piece)))
        self._seq += 1
        self._extent += 1
        complete = sum(1 for end in shard.ends if end <= begin + len(piece))
        if complete > self._sample:
            index = shard.index.slice(self._sample, complete)
            self._emit(SamplesEvent(self._position, self._sample, index))
            self._sample = complete

    def _emit(self, event) -> None:
        self._events.append(event)
        if not self._signalled:
            self._signalled = True
            self._theirs.send(b"!")
