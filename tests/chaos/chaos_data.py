"""Shards whose every byte is known, and a reader that trusts none of what it is given.

`read_checked` compares each extent with the CRC-64 of what the shard really holds when it is
published and once more when it is given back (so that a slot overwritten under a lease is seen),
and each sample's name, place and length with the tar's own.
"""

from __future__ import annotations

import collections
import io
import random
import select
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gpufeed.cachefs import checksum
from gpufeed.cachefs.client import (
    DatasetRequest,
    ExtentEvent,
    FailEvent,
    SamplesEvent,
    Session,
    ShardEndEvent,
)
from gpufeed.cachefs.testing.pytest_plugin import BUCKET

EXTENT_BYTES = 256 * 1024
SILENCE_S_MAX = 60.0
HELD_MAX = 3


class WrongBytesError(AssertionError):
    """A reader was given something else than the shard's bytes."""


@dataclass(frozen=True, slots=True)
class TrueShard:
    """What a shard holds: ``(key, ext, offset, size)`` of each member, CRC-64 of each extent."""

    url: str
    size_bytes: int
    extent_crcs: tuple[int, ...]
    members: tuple[tuple[str, str, int, int], ...]


Truth = dict[str, TrueShard]


def put_shards(bucket: Path, count: int, *, seed: int, low: int = 4, high: int = 12) -> Truth:
    """Write `count` tars of `low` to `high` quarter megabytes; returns what they hold, by url."""
    draw = random.Random(seed)
    truth: Truth = {}
    for number in range(count):
        name = f"train-{seed:02d}-{number:03d}"
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            samples = draw.randint(low, high) * 5
            for i in range(samples):
                for ext, size in (("jpg", draw.randint(30_000, 70_000)), ("cls", 1)):
                    info = tarfile.TarInfo(f"{name}-{i:04d}.{ext}")
                    info.size = size
                    tar.addfile(info, io.BytesIO(draw.randbytes(size)))
        data = file.getvalue()
        (bucket / f"{name}.tar").write_bytes(data)
        shard = _true_shard(f"oss://{BUCKET}/{name}.tar", data)
        truth[shard.url] = shard
    return truth


def _true_shard(url: str, data: bytes) -> TrueShard:
    crcs = tuple(
        checksum.crc64(data[begin : begin + EXTENT_BYTES])
        for begin in range(0, len(data), EXTENT_BYTES)
    )
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tuple((*m.name.split(".", 1), m.offset_data, m.size) for m in tar.getmembers())
    return TrueShard(url, len(data), crcs, members)


def request_of(urls: Iterable[str]) -> DatasetRequest:
    """These shards, as a dataset."""
    return DatasetRequest(urls=tuple(urls), kind="tar")


@dataclass(slots=True)
class Outcome:
    """What a whole reading saw: bytes by tier for each shard read to its end."""

    tiers: dict[str, dict[str, int]]

    def bytes_from(self, tier: str) -> int:
        """Bytes that came from `tier`."""
        return sum(tiers.get(tier, 0) for tiers in self.tiers.values())


def read_checked(
    session: Session, truth: Truth, urls: Iterable[str], *,
    hold: Callable[[], int] = lambda: 0,
    watch: Callable[[ExtentEvent], None] = lambda _: None,
    may_be_refused: bool = False,
) -> Outcome:  # fmt: skip
    """Read these shards in this order and check every byte.

    Args:
        session: a session with nothing under way.
        truth: what they hold.
        urls: the plan.
        hold: how many extents to keep at the moment, at most `HELD_MAX`.
        watch: called with each extent as it is seen.
        may_be_refused: what comes from the origin for the first time is shown before the whole
            shard was verified; so wrong bytes are wrong only if their shard ends well.

    Raises:
        WrongBytesError: a byte, a sample or an order was wrong.
        GpufeedError: as the daemon said.
    """
    urls = list(urls)
    # One dataset, whatever the order: a session that reads on and on opens no more.
    names = sorted(set(urls))
    dataset = session.open_dataset(request_of(names))
    assert [shard.name for shard in dataset.shards] == names
    positions = session.extend_plan(dataset, [names.index(url) for url in urls])
    reading = _Reading(session, [truth[url] for url in urls], positions)
    reading.may_be_refused = may_be_refused
    while not reading.is_over:
        events = session.receive()
        if not events and not select.select([session], [], [], SILENCE_S_MAX)[0]:
            raise AssertionError(f"the daemon fell silent: {reading.describe()}")
        for event in events:
            if isinstance(event, ExtentEvent):
                watch(event)
            reading.take(event)
            reading.release_down_to(hold())
    reading.release_down_to(0)
    return Outcome(
        {shard.url: tiers for shard, tiers in zip(reading.plan, reading.tiers, strict=True)}
    )


class _Reading:
    """The state of one plan."""

    def __init__(self, session: Session, plan: list[TrueShard], positions: range) -> None:
        self._session = session
        self.plan = plan
        self._positions = positions
        self.tiers: list[dict[str, int]] = []
        self._next_extent = 0
        self._held: collections.deque[ExtentEvent] = collections.deque()
        self._seq = 0
        self.may_be_refused = False
        self._wrong: list[str] = []
        self._members: list[tuple[str, str, int, int]] = []

    @property
    def is_over(self) -> bool:
        return len(self.tiers) == len(self.plan)

    def describe(self) -> str:
        return f"shard {len(self.tiers)} of {len(self.plan)}, extent {self._next_extent}"

    def take(self, event: object) -> None:
        if isinstance(event, FailEvent):
            raise event.error
        if isinstance(event, ExtentEvent):
            self._extent(event)
        elif isinstance(event, SamplesEvent):
            self._samples(event)
        elif isinstance(event, ShardEndEvent):
            self._end(event)

    def _extent(self, event: ExtentEvent) -> None:
        expected = (self._positions[len(self.tiers)], self._next_extent)
        if (event.position, event.extent) != expected or event.seq <= self._seq:
            raise WrongBytesError(f"{event} came where {expected} was due")
        self._seq = event.seq
        self._next_extent += 1
        self._check(event, "when it was published")
        self._held.append(event)

    def _check(self, event: ExtentEvent, when: str) -> None:
        shard = self.plan[event.position - self._positions.start]
        begin = event.slot * self._session.extent_bytes
        view = self._session.arena()[begin : begin + event.length_bytes]
        if checksum.crc64(view) != shard.extent_crcs[event.extent]:
            wrong = f"extent {event.extent} of {shard.url} was wrong {when}"
            if not self.may_be_refused:
                raise WrongBytesError(wrong)
            self._wrong.append(wrong)

    def _samples(self, event: SamplesEvent) -> None:
        for ref in event.index:
            self._members += [(ref.key, m.ext, m.offset_bytes, m.size_bytes) for m in ref.members]

    def _end(self, event: ShardEndEvent) -> None:
        shard = self.plan[len(self.tiers)]
        if self._wrong:
            raise WrongBytesError(f"{shard.url} ended well, but {self._wrong[0]}")
        if self._next_extent != len(shard.extent_crcs):
            raise WrongBytesError(f"{shard.url} ended after {self._next_extent} extents")
        if sorted(self._members) != sorted(shard.members):
            raise WrongBytesError(f"{shard.url} has other samples than were announced")
        self._members.clear()
        self._next_extent = 0
        self.tiers.append(dict(event.bytes_by_tier))

    def release_down_to(self, count: int) -> None:
        done = []
        while len(self._held) > min(count, HELD_MAX):
            event = self._held.popleft()
            self._check(event, "when it was given back")
            done.append(event.seq)
        if done:
            self._session.release(done)
