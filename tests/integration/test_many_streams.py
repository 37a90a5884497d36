"""Many sessions: one fetch of a shard that all want; bounded memory for shards of their own."""

from __future__ import annotations

import os
import resource
import select
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from node import Node, make_samples, read_all, tar_of, wait_until_gone

from gpufeed.cachefs import checksum
from gpufeed.cachefs.client import DatasetRequest, ExtentEvent, FailEvent, Session, ShardEndEvent
from gpufeed.cachefs.testing.pytest_plugin import BUCKET
from gpufeed.cachefs.units import KIB, MIB

READERS = 80
STREAMS = 500
EXTENT = 64 * KIB
# What a daemon may take beside its arena: itself and its libraries, and each session's own state.
HEAP_BYTES = 64 * MIB
SESSION_HEAP_BYTES = 128 * KIB


def test_eighty_staggered_sessions_cost_the_origin_one_fetch(node: Node) -> None:
    samples = make_samples(60, 0)
    data = tar_of(samples)
    (node.bucket / "a.tar").write_bytes(data)
    part = 2 * EXTENT
    process = node.start(
        GPUFEED_ARENA_EXTENT_BYTES="64KiB", GPUFEED_ARENA_SIZE_BYTES="64MiB",
        GPUFEED_ORIGIN_PART_BYTES="128KiB",
    )  # fmt: skip
    begun = [threading.Event() for _ in range(READERS + 1)]
    begun[0].set()

    def read(number: int) -> dict[str, dict[str, bytes]]:
        with Session.connect(node.socket, window_bytes=8 * EXTENT) as session:
            dataset = session.open_dataset(DatasetRequest(urls=(f"oss://{BUCKET}/a.tar",)))
            # One after the other: each comes when the one before has its plan under way.
            assert begun[number].wait(60)
            begun[number + 1].set()
            return read_all(session, dataset, [0])

    with ThreadPoolExecutor(READERS) as readers:
        results = list(readers.map(read, range(READERS)))

    assert all(result == samples for result in results)
    counters = node.standin.counters()
    assert counters["by_key"][f"{BUCKET}/a.tar"]["bytes"] == len(data)
    assert counters["requests_by_kind"]["get"] == -(-len(data) // part)
    wait_until_gone(node)
    assert node.status()["misses_total"] == 1
    assert node.stop(process) == 0


def memory_of(pid: int) -> dict[str, int]:
    """Resident bytes of a process: all, shared memory, and the rest."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    names = {"peak": "VmHWM", "all": "VmRSS", "arena": "RssShmem", "heap": "RssAnon"}
    return {name: int(lines[field].split()[0]) * KIB for name, field in names.items()}


class Stream:
    """One session on a shard of its own: gives every extent back as it comes."""

    def __init__(self, node: Node, number: int) -> None:
        self.session = Session.connect(node.socket, window_bytes=4 * EXTENT)
        url = f"oss://{BUCKET}/s-{number:03d}.tar"
        dataset = self.session.open_dataset(DatasetRequest(urls=(url,)))
        self.session.extend_plan(dataset, [0])
        self.crc = checksum.CRC64_EMPTY
        self.has_ended = False

    def receive(self) -> None:
        for event in self.session.receive():
            assert not isinstance(event, FailEvent), event
            if isinstance(event, ExtentEvent):
                begin = event.slot * EXTENT
                view = self.session.arena()[begin : begin + event.length_bytes]
                self.crc = checksum.crc64(view, self.crc)
                self.session.release([event.seq])
            self.has_ended = self.has_ended or isinstance(event, ShardEndEvent)


@pytest.fixture
def many_descriptors():
    """Two for each session."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * STREAMS)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.usefixtures("many_descriptors")
def test_five_hundred_streams_stay_within_the_memory_configured(node: Node) -> None:
    data = tar_of(make_samples(60, 0))
    first = node.bucket / "s-000.tar"
    first.write_bytes(data)
    for number in range(1, STREAMS):
        os.link(first, node.bucket / f"s-{number:03d}.tar")
    arena_bytes = 192 * MIB
    process = node.start(
        GPUFEED_ARENA_EXTENT_BYTES="64KiB", GPUFEED_ARENA_SIZE_BYTES=str(arena_bytes),
        GPUFEED_ORIGIN_PART_BYTES="128KiB", GPUFEED_STORE_PATH="",
    )  # fmt: skip
    idle = memory_of(process.pid)

    streams = [Stream(node, number) for number in range(STREAMS)]
    by_descriptor = {stream.session.fileno(): stream for stream in streams}
    poll = select.poll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    while by_descriptor:
        ready = poll.poll(60_000)
        assert ready, "the daemon fell silent"
        for descriptor, _ in ready:
            stream = by_descriptor[descriptor]
            stream.receive()
            if stream.has_ended:
                poll.unregister(descriptor)
                del by_descriptor[descriptor]
    busy = memory_of(process.pid)
    for stream in streams:
        stream.session.close()

    assert {stream.crc for stream in streams} == {checksum.crc64(data)}
    for name, found in (("idle", idle), ("after 500 streams", busy)):
        print(name, {key: f"{value / MIB:.0f} MiB" for key, value in found.items()})
    budget = arena_bytes + HEAP_BYTES + STREAMS * SESSION_HEAP_BYTES
    print(f"budget {budget / MIB:.0f} MiB, peak {busy['peak'] / budget:.2f} of it")
    assert busy["peak"] <= 1.1 * budget
    wait_until_gone(node)
    assert node.stop(process) == 0
