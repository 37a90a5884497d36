"""A real daemon process, a real stand-in, the real client: the way of a byte, and its end."""

from __future__ import annotations

import os
import select
import signal
import socket
import urllib.error
from pathlib import Path

import pytest
from node import read_all, wait_until_gone

from gpufeed.cachefs import wire
from gpufeed.cachefs.client import (
    DatasetRequest,
    Session,
)
from gpufeed.cachefs.errors import (
    AccessDeniedError,
    CapacityError,
    CorruptSampleError,
    DaemonUnavailableError,
    GpufeedError,
    IntegrityError,
    NotFoundError,
    UsageError,
)
from gpufeed.cachefs.testing.pytest_plugin import BUCKET

TARS = DatasetRequest(urls=(f"oss://{BUCKET}/train-{{000..003}}.tar",))
LOOSE = DatasetRequest(urls=(f"oss://{BUCKET}/loose/",), virtual_shard_bytes=1 << 20)


def test_epoch_one_fills_epoch_two_makes_no_request_and_a_restart_neither(node) -> None:
    samples = node.put_tars(4, 40)
    process = node.start()
    with Session.connect(node.socket) as session:
        dataset = session.open_dataset(TARS)
        assert read_all(session, dataset, [2, 0, 3, 1]) == samples
        while node.status()["fills_in_flight"]:
            pass
        node.standin.reset()
        assert read_all(session, dataset, [1, 3, 0, 2]) == samples
        assert node.standin.counters()["requests"] == 0
        assert session.open_dataset(TARS).shards[0].sample_count == 40
    wait_until_gone(node)
    assert node.stop(process) == 0
    assert not Path(node.socket).exists()

    node.standin.reset()
    process = node.start()
    with Session.connect(node.socket) as session:
        dataset = session.open_dataset(TARS)
        assert read_all(session, dataset, range(4)) == samples
    assert node.standin.counters()["requests_by_kind"] == {"head": 4}
    assert node.stop(process) == 0


def test_loose_objects_are_read_once_each_and_then_never_again(node) -> None:
    objects = node.put_loose(300)
    process = node.start()
    with Session.connect(node.socket) as session:
        dataset = session.open_dataset(LOOSE)
        assert dataset.kind == "loose"
        assert sum(shard.sample_count for shard in dataset.shards) == 300
        for _ in range(2):
            found = read_all(session, dataset, range(len(dataset.shards)))
            assert {key: fields["jpg"] for key, fields in found.items()} == objects
            while node.status()["fills_in_flight"]:
                pass
    assert node.standin.counters()["requests_by_kind"]["get"] == 300
    assert node.stop(process) == 0


def test_a_killed_daemon_leaves_a_cache_that_the_next_one_serves(node) -> None:
    samples = node.put_tars(4, 40)
    process = node.start()
    with Session.connect(node.socket) as session:
        read_all(session, session.open_dataset(TARS), range(4))
        while node.status()["fills_in_flight"]:
            pass
        node.stop(process, signal.SIGKILL)
        select.select([session], [], [], 10)
        with pytest.raises(DaemonUnavailableError):
            session.receive()
    node.standin.reset()

    process = node.start()
    with Session.connect(node.socket) as session:
        assert read_all(session, session.open_dataset(TARS), range(4)) == samples
    assert "get" not in node.standin.counters()["requests_by_kind"]
    assert node.stop(process) == 0


def test_a_killed_client_frees_all_that_it_held(node) -> None:
    node.put_tars(4, 40)
    process = node.start()
    pid = os.fork()
    if pid == 0:
        try:
            session = Session.connect(node.socket)
            session.extend_plan(session.open_dataset(TARS), range(4))
            select.select([session], [], [], 30)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    wait_until_gone(node)
    assert node.stop(process) == 0


def test_a_forked_child_does_not_keep_the_session(node) -> None:
    node.put_tars(4, 40)
    process = node.start()
    session = Session.connect(node.socket)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)
        os._exit(0)
    session.close()
    wait_until_gone(node)
    os.write(writing, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    os.close(reading)
    os.close(writing)
    assert node.stop(process) == 0


def test_metrics_and_health_are_served(node) -> None:
    process = node.start()

    assert '"ok"' in node.get("/healthz")
    text = node.get("/metrics")
    assert "# TYPE gpufeed_origin_requests_total counter" in text
    assert "# TYPE gpufeed_sessions gauge" in text
    with pytest.raises(urllib.error.HTTPError):
        node.get("/nothing")
    assert node.stop(process) == 0


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (DatasetRequest(urls=(f"oss://{BUCKET}/none.tar",)), NotFoundError, "does not exist"),
        (DatasetRequest(urls=(f"oss://{BUCKET}/empty/",)), NotFoundError, "nothing under"),
        (DatasetRequest(urls=("oss://no-bucket-here/x/",)), NotFoundError, "bucket"),
        (DatasetRequest(urls=("file:///etc/passwd",)), AccessDeniedError, "may not read"),
        (DatasetRequest(urls=(f"oss://{BUCKET}/x{{5..}}.tar",)), UsageError, "pattern|brace|{5"),
        (
            DatasetRequest(urls=TARS.urls, storage_options={"key": "test-key", "secret": "bad"}),
            AccessDeniedError, "secret",
        ),
        (DatasetRequest(urls=TARS.urls, storage_options={"keys": "x"}), UsageError, "keys"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_request_that_cannot_be_served_is_one_clear_error(node, request_, error, words) -> None:
    node.put_tars(4, 2)
    process = node.start()
    with Session.connect(node.socket) as session:
        with pytest.raises(error, match=words):
            session.open_dataset(request_)
        assert session.open_dataset(TARS).shards
    assert node.stop(process) == 0


def test_a_capacity_below_one_shard_is_refused_with_both_numbers(node) -> None:
    node.put_tars(4, 40)
    process = node.start(GPUFEED_STORE_CAPACITY_BYTES="512KiB")
    with (
        Session.connect(node.socket) as session,
        pytest.raises(CapacityError, match=r"512 KiB.*KiB"),
    ):
        session.open_dataset(TARS)
    assert node.stop(process) == 0


def test_a_sample_longer_than_the_window_is_refused_with_both_numbers(node) -> None:
    from node import tar_of

    big = {"k": {"jpg": b"x" * 6_000_000}}
    (node.bucket / "train-000.tar").write_bytes(tar_of(big))
    process = node.start()
    with Session.connect(node.socket, window_bytes=1 << 20) as session:
        dataset = session.open_dataset(DatasetRequest(urls=(f"oss://{BUCKET}/train-000.tar",)))
        with pytest.raises(CapacityError, match="window of 1 MiB"):
            read_all(session, dataset, [0])
    wait_until_gone(node)
    assert node.stop(process) == 0


@pytest.mark.parametrize("cut_at", [100_000, 700])
def test_a_corrupt_tar_is_an_error_that_names_the_shard(node, cut_at: int) -> None:
    node.put_tars(4, 40)
    path = node.bucket / "train-001.tar"
    path.write_bytes(path.read_bytes()[:cut_at])
    process = node.start()
    with (
        Session.connect(node.socket) as session,
        pytest.raises(CorruptSampleError, match=r"train-001\.tar"),
    ):
        read_all(session, session.open_dataset(TARS), range(4))
    wait_until_gone(node)
    assert node.stop(process) == 0


def test_wrong_bytes_from_the_origin_raise_and_are_not_kept(node) -> None:
    samples = node.put_tars(4, 40)
    node.standin.set_scenario({"faults": [{"match": "*/train-001.tar", "flip_byte_at": 30_000}]})
    process = node.start()
    with (
        Session.connect(node.socket) as session,
        pytest.raises(IntegrityError, match=r"train-001\.tar"),
    ):
        read_all(session, session.open_dataset(TARS), range(4))
    node.standin.set_scenario({})
    with Session.connect(node.socket) as session:
        assert read_all(session, session.open_dataset(TARS), range(4)) == samples
    assert node.stop(process) == 0


def test_an_object_overwritten_under_a_plan_is_an_error_with_both_versions(node) -> None:
    node.put_tars(4, 40)
    process = node.start()
    with Session.connect(node.socket) as session:
        dataset = session.open_dataset(TARS)
        (node.bucket / "train-002.tar").write_bytes(b"\0" * 10240)
        with pytest.raises(GpufeedError, match="overwritten"):
            read_all(session, dataset, [2])
    assert node.stop(process) == 0


@pytest.mark.parametrize(
    ("flags", "extra", "words"),
    [
        (("--capacity", "much"), {}, "must be a size"),
        (("--config", "/nonexistent.toml"), {}, "/nonexistent.toml"),
        ((), {"GPUFEED_ORIGIN_ENDPIONT": "x"}, "did you mean"),
        (("--cache-path", "/proc/nowhere"), {}, "/proc/nowhere"),
        (("--arena", "1KiB"), {}, "arena"),
        (("--arena", "900TiB"), {}, "more than"),
        (("--endpoint", "ftp://x"), {}, "origin.endpoint is 'ftp://x'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_start_is_one_line_and_leaves_nothing(node, flags, extra, words) -> None:
    process, _ = node.popen(*flags, **extra)
    _, errors = process.communicate(timeout=30)

    assert process.returncode != 0
    assert words in errors.decode()
    assert errors.decode().count("\n") == 1, errors.decode()
    assert not Path(node.socket).exists()


def test_what_is_taken_is_said_to_be_taken(node) -> None:
    first = node.start()
    port = str(node.ready["http_port"])
    for flags, words in (
        ((), "another gpufeed daemon listens"),
        (("--socket", node.socket + "2"), "another gpufeed daemon uses the cache directory"),
        (
            ("--socket", node.socket + "2", "--memory-only", "--http-port", port),
            "cannot listen on http",
        ),
    ):
        extra = {}
        process, _ = node.popen(*flags, **extra)
        _, errors = process.communicate(timeout=30)
        lines = [line for line in errors.decode().splitlines() if line]
        assert process.returncode != 0
        assert words in lines[-1], errors.decode()
    assert not Path(node.socket + "2").exists()
    assert node.stop(first) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_under_load_leaves_nothing(node, number: int) -> None:
    node.put_tars(4, 40)
    node.standin.set_scenario({"mb_per_s_per_connection": 1})
    process = node.start()
    with Session.connect(node.socket) as session:
        session.extend_plan(session.open_dataset(TARS), range(4))
        while not node.status()["origin_in_flight"]:
            pass
        assert node.stop(process, number) == 0
    assert not Path(node.socket).exists()
    left = [p for p in (node.place / "cache" / "shards").rglob("*") if p.is_file()]
    assert left == []


def test_descriptors_sent_by_strangers_are_closed(node) -> None:
    process = node.start()
    fds = f"/proc/{process.pid}/fd"
    before = len(os.listdir(fds))
    for data in (b"", b"x", b"GPFD"):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(node.socket)
                socket.send_fds(sock, [data], [0, 1])
    wait_until_gone(node)
    assert len(os.listdir(fds)) <= before + 2
    assert node.stop(process) == 0


def test_hostile_bodies_end_their_session_and_no_other(node) -> None:
    samples = node.put_tars(4, 10)
    process = node.start()
    with Session.connect(node.socket) as good:
        for body in (b"[" * 100_000, b"{}", b"\xff" * 1000, b'{"id": 1, "urls": 3}'):
            with Session.connect(node.socket) as bad:
                bad._connection.send(wire.pack(wire.Kind.OPEN, body[: wire.INLINE_BODY_BYTES]))
                select.select([bad], [], [], 10)
                with pytest.raises((GpufeedError, ValueError)):
                    bad.receive()
        assert read_all(good, good.open_dataset(TARS), range(4)) == samples
    wait_until_gone(node)
    assert node.stop(process) == 0


def test_a_sample_of_too_many_fields_is_refused_by_name(node) -> None:
    from node import tar_of

    many = {"vid": {f"{'n' * 60}{i:05d}.jpg": b"x" for i in range(800)}}
    (node.bucket / "train-000.tar").write_bytes(tar_of(many))
    process = node.start()
    with Session.connect(node.socket) as session:
        dataset = session.open_dataset(DatasetRequest(urls=(f"oss://{BUCKET}/train-000.tar",)))
        with pytest.raises(CapacityError, match="vid has 800 fields"):
            read_all(session, dataset, [0])
    assert node.stop(process) == 0
