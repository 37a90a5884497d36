"""The read API against a real daemon: views in place, and who keeps them alive."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import weakref
import zlib

import numpy as np
import pytest
from node import Node, wait_until_gone

from gpufeed.cachefs import wire
from gpufeed.cachefs.client import Client, Sample, open_client
from gpufeed.cachefs.errors import (
    DaemonUnavailableError,
    NotFoundError,
    ProtocolError,
    ShardChangedError,
    UsageError,
)
from gpufeed.cachefs.testing.pytest_plugin import BUCKET
from gpufeed.cachefs.units import KIB, MIB
from gpufeed.cachefs.wire import Kind

SHARDS = 6
SAMPLES = 40
URL = f"oss://{BUCKET}/train-{{000..{SHARDS - 1:03d}}}.tar"
EXTENT = 256 * KIB


@pytest.fixture
def data(node: Node) -> dict[str, dict[str, bytes]]:
    truth = node.put_tars(SHARDS, SAMPLES)
    node.start()
    return truth


@pytest.fixture
def client(node: Node, data):
    with open_client(node.socket, window_bytes=4 * MIB) as client:
        yield client


def mappings() -> list[tuple[int, int]]:
    """Where arenas are mapped in this process."""
    found = []
    with open("/proc/self/maps") as file:
        for line in file:
            if "gpufeed-arena" in line:
                begin, end = line.split()[0].split("-")
                found.append((int(begin, 16), int(end, 16)))
    return found


def is_in_place(view: memoryview) -> bool:
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return any(begin <= address and address + len(view) <= end for begin, end in mappings())


def check(sample: Sample, truth: dict[str, dict[str, bytes]]) -> None:
    assert {name: bytes(view) for name, view in sample.items()} == truth[sample.key]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_samples_come_in_the_order_asked_for_as_views_in_place(client: Client, data) -> None:
    dataset = client.open(URL)
    order = [3, 0, 5, 3]
    found = []
    for sample in client.samples(dataset, order):
        check(sample, data)
        found.append((sample.position, sample.number, sample.key))
        view = sample["jpg"]
        assert view.readonly
        assert view.format == "B"
        with pytest.raises(TypeError):
            view[0] = 1
        del sample, view
    assert [key for _, _, key in found] == [
        f"{shard:02d}{i:05d}" for shard in order for i in range(SAMPLES)
    ]
    assert [place[:2] for place in found] == [(p, i) for p in range(4) for i in range(SAMPLES)]
    assert client.stats.samples_count == 4 * SAMPLES
    assert client.stats.copied_count == 0


def test_all_but_straddling_fields_lie_in_the_mapping(client: Client, data) -> None:
    dataset = client.open(URL)
    outside = 0
    for sample in client.samples(dataset):
        outside += sum(not is_in_place(view) for view in sample.values())
    assert outside == client.stats.straddled_count
    assert outside < SHARDS * SAMPLES // 10


def test_an_extent_goes_back_with_the_last_of_its_views(node: Node, client: Client, data) -> None:
    dataset = client.open(URL)
    stream = client.samples(dataset, [0])
    first = next(stream)
    views = [first["jpg"][5:90], np.frombuffer(first["jpg"], np.uint8)[7:11]]
    wanted = [bytes(view) for view in views]
    del first
    rest = sum(1 for _ in stream)
    assert rest == SAMPLES - 1
    gc.collect()
    assert node.status()["arena_leased_slots"] == 1
    assert [bytes(view) for view in views] == wanted
    views.pop()
    assert node.status()["arena_leased_slots"] == 1
    views.pop()
    deadline = threading.Event()
    for _ in range(100):
        if node.status()["arena_leased_slots"] == 0:
            break
        deadline.wait(0.05)
    assert node.status()["arena_leased_slots"] == 0


def test_a_cycle_with_a_view_is_collected(node: Node, client: Client, data) -> None:
    dataset = client.open(URL)
    stream = client.samples(dataset, [0])
    knot: list[object] = [next(stream)["jpg"]]
    knot.append(knot)
    alive = weakref.ref(knot[0].obj)
    for _ in stream:
        pass
    del knot
    gc.collect()
    assert alive() is None


def test_holding_every_sample_never_stalls(node: Node, client: Client, data) -> None:
    # 5 MiB of samples through a window of 4 MiB, twice.
    dataset = client.open(URL)
    held = [*client.samples(dataset), *client.samples(dataset)]
    assert len(held) == 2 * SHARDS * SAMPLES
    assert client.stats.copied_count > 0
    assert node.status()["arena_leased_slots"] <= 2 * 8
    for sample in held:
        check(sample, data)


def test_views_outlive_the_stream_the_client_and_the_daemon(node: Node, data) -> None:
    # Daemons that other tests ran in this process may have left some of theirs.
    before = set(mappings())
    client = open_client(node.socket, window_bytes=4 * MIB)
    dataset = client.open(URL)
    stream = client.samples(dataset)
    held = [next(stream) for _ in range(30)]
    stream.close()
    client.close()
    node.stop(node.processes[0], 9)
    del stream, client
    gc.collect()
    for sample in held:
        check(sample, data)
    assert any(is_in_place(sample["jpg"]) for sample in held)
    del sample, held
    gc.collect()
    assert set(mappings()) <= before


def test_nothing_is_left_when_views_are_gone(node: Node, data) -> None:
    before, mapped_before = descriptors(), set(mappings())
    for _ in range(3):
        with open_client(node.socket, window_bytes=4 * MIB) as client:
            dataset = client.open(URL)
            kept = list(client.samples(dataset))[::5]
            client.read(f"oss://{BUCKET}/train-000.tar", 0, 100)
        for sample in kept:
            check(sample, data)
        del kept, sample, client
    gc.collect()
    assert set(mappings()) <= mapped_before
    assert descriptors() == before
    wait_until_gone(node)


def test_ranges_in_place_over_neighbours_and_copied_beyond_the_cap(node, client, data) -> None:
    url = f"oss://{BUCKET}/train-001.tar"
    whole = (node.bucket / "train-001.tar").read_bytes()
    view = client.read(url, 1000, 2000)
    assert view == whole[1000:2000]
    assert is_in_place(view)
    del view
    wide = client.read(url, EXTENT - 10, 2 * EXTENT + 10)
    assert wide == whole[EXTENT - 10 : 2 * EXTENT + 10]
    assert is_in_place(wide) or client.stats.straddled_count == 1
    assert client.read(url) == whole
    assert client.read(url, len(whole) - 5, len(whole) + 5) == whole[-5:]
    assert client.read(url, len(whole) + 5, len(whole) + 9) == b""
    many = [(url, i * 3000, i * 3000 + 2000) for i in range(200)]
    for (_, begin, end), found in zip(many, client.read_many(many), strict=True):
        assert found == whole[begin:end]
    held = [client.read(f"oss://{BUCKET}/train-{i:03d}.tar", j * EXTENT, j * EXTENT + 10)
            for i in range(SHARDS) for j in range(3)]  # fmt: skip
    assert client.stats.copied_count > 0
    assert len(held) == 3 * SHARDS
    with pytest.raises(UsageError, match=r"\[5, 2\)"):
        client.read(url, 5, 2)
    with pytest.raises(NotFoundError):
        client.read(f"oss://{BUCKET}/nothing", 0, 1)


def test_eight_threads_share_a_client(client: Client, data, node: Node) -> None:
    dataset = client.open(URL)
    whole = (node.bucket / "train-002.tar").read_bytes()
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            draw = random.Random(number)
            order = draw.sample(range(SHARDS), SHARDS)
            kept = []
            for i, sample in enumerate(client.samples(dataset, order)):
                check(sample, data)
                if i % 7 == 0:
                    kept.append(sample)
                    begin = draw.randrange(len(whole))
                    view = client.read(f"oss://{BUCKET}/train-002.tar", begin, begin + 30_000)
                    assert view == whole[begin : begin + 30_000]
                    kept.append(view)
                if len(kept) > 20:
                    del kept[: draw.randrange(20)]
            assert i == SHARDS * SAMPLES - 1
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert client.stats.samples_count == 8 * SHARDS * SAMPLES


def test_a_view_dropped_by_another_thread_wakes_a_reader_that_waits(node: Node, data) -> None:
    # A window of few extents, of which views hold all that they may.
    with open_client(node.socket, window_bytes=2 * EXTENT) as client:
        dataset = client.open(URL)
        held = []
        for sample in client.samples(dataset):
            check(sample, data)
            held.append(zlib.crc32(sample["jpg"]))
            thread = threading.Thread(target=sample._fields.clear)
            thread.start()
            thread.join()
        assert len(held) == SHARDS * SAMPLES


def test_one_stream_has_one_reader(client: Client, data) -> None:
    stream = client.samples(client.open(URL))
    next(stream)
    stream._using.acquire()
    with pytest.raises(UsageError, match="two threads"):
        next(stream)
    stream._using.release()
    with pytest.raises(UsageError, match=r"outside 0\.\.5"):
        client.samples(client.open(URL), [6])
    with pytest.raises(TypeError):
        pickle.dumps(stream)


def test_a_client_says_at_once_that_nobody_listens(node: Node) -> None:
    with open_client(node.socket) as client, pytest.raises(DaemonUnavailableError):
        client.open(URL)


def test_a_closed_client_says_so(client: Client, data) -> None:
    dataset = client.open(URL)
    client.close()
    with pytest.raises(UsageError, match="closed"):
        next(client.samples(dataset))


# As text: a child that is spawned cannot import this module.
READ_IN_CHILD = """
import zlib
with client:
    answer.send(sum(zlib.crc32(sample["jpg"]) for sample in client.samples(dataset)))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_read_with_the_parents_client(client: Client, data, method: str) -> None:
    dataset = client.open(URL)
    stream = client.samples(dataset)
    held = [next(stream) for _ in range(50)]
    wanted = sum(zlib.crc32(fields["jpg"]) for fields in data.values())
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    names = {"client": client, "dataset": dataset, "answer": theirs}
    child = context.Process(target=exec, args=(READ_IN_CHILD, names))
    child.start()
    assert ours.poll(60)
    assert ours.recv() == wanted
    child.join(30)
    assert child.exitcode == 0
    assert sum(1 for _ in stream) == SHARDS * SAMPLES - 50
    for sample in held:
        check(sample, data)


def test_a_forked_child_keeps_its_hands_off_the_parents_stream(client: Client, data) -> None:
    stream = client.samples(client.open(URL))
    held = [next(stream) for _ in range(50)]
    child = os.fork()
    if not child:
        status = 1
        try:
            for sample in held:
                check(sample, data)
            held.clear()
            del sample
            gc.collect()
            try:
                next(stream)
            except UsageError:
                status = 0
            stream.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for sample in held:
        check(sample, data)
    assert sum(1 for _ in stream) == SHARDS * SAMPLES - 50


def test_a_dataset_that_changed_over_a_restart_is_an_error(
    node: Node, client: Client, data
) -> None:
    dataset = client.open(URL)
    stream = client.samples(dataset)
    first = next(stream)
    node.stop(node.processes[0], 9)
    (node.bucket / "train-003.tar").write_bytes((node.bucket / "train-002.tar").read_bytes())
    node.start()
    with pytest.raises(ShardChangedError, match=f"{dataset.manifest_hash}, now "):
        for _ in stream:
            pass
    check(first, data)
    with pytest.raises(StopIteration):
        next(stream)


def test_reading_goes_on_over_restarts(node: Node, client: Client, data) -> None:
    dataset = client.open(URL)
    url = f"oss://{BUCKET}/train-001.tar"
    whole = (node.bucket / "train-001.tar").read_bytes()
    file = client.file(url)
    held, keys = [], []
    for sample in client.samples(dataset):
        keys.append(sample.key)
        held.append((sample, file.read(len(keys), 4000)))
        if len(keys) in (1, 39, 40, 41, 200):
            node.stop(node.processes[-1], 9)
            node.start()
    assert keys == list(data)
    assert client.stats.reconnects_count >= 5
    for i, (sample, view) in enumerate(held, 1):
        check(sample, data)
        assert view == whole[i:4000]


def test_an_interpreter_that_ends_in_the_middle_says_nothing(node: Node, data) -> None:
    code = f"""
from gpufeed.cachefs.client import open_client
client = open_client({node.socket!r}, window_bytes=4 << 20)
stream = client.samples(client.open({URL!r}))
held = [next(stream) for _ in range(100)]
held.append(held)
ranged = client.read("oss://{BUCKET}/train-000.tar", 0, 300000)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    wait_until_gone(node)


def test_views_of_a_session_that_the_daemon_cut_stay_while_others_churn(node, client, data) -> None:
    dataset = client.open(URL)
    stream = client.samples(dataset)
    held = [next(stream) for _ in range(30)]
    # What no client sends: the daemon ends this session, and lives on.
    stream._state.opened.leases.session.post(wire.pack(Kind.SHARD_END))
    with pytest.raises(ProtocolError, match="SHARD_END"):
        held.extend(stream)
    assert any(is_in_place(sample["jpg"]) for sample in held)
    with open_client(node.socket, window_bytes=4 * MIB) as other:
        for _ in range(4):
            for sample in other.samples(dataset):
                check(sample, data)
    for sample in held:
        check(sample, data)
    assert sum(1 for _ in client.samples(dataset)) == SHARDS * SAMPLES


def test_the_next_daemon_knows_of_the_memory_that_views_keep(node, client, data) -> None:
    dataset = client.open(URL)
    stream = client.samples(dataset)
    held = [next(stream) for _ in range(30)]
    node.stop(node.processes[0], 9)
    node.start()
    # What had come before is read first.
    keys = [sample.key for sample in held]
    while client.stats.reconnects_count == 0:
        keys.append(next(stream).key)
    assert keys == list(data)[: len(keys)]
    assert node.status()["arena_elsewhere_bytes"] >= EXTENT
    del held
    gc.collect()
    stream.close()
    # The message is behind nothing that was asked; the next answer comes after it.
    client.open(URL)
    deadline_s = time.monotonic() + 10
    while node.status()["arena_elsewhere_bytes"] and time.monotonic() < deadline_s:
        pass
    assert node.status()["arena_elsewhere_bytes"] == 0
