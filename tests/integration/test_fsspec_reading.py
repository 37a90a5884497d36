"""The fsspec door against a real daemon and a real stand-in: looking and reading."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading

import fsspec
import pytest

from gpufeed.cachefs import calls
from gpufeed.cachefs.client import DatasetRequest, Session
from gpufeed.cachefs.errors import (
    AccessDeniedError,
    DaemonUnavailableError,
    GpufeedError,
    NotFoundError,
    ShardChangedError,
)
from gpufeed.cachefs.fs import GpufeedFileSystem
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, REGION, SECRET
from gpufeed.cachefs.wire import Kind

SIZE = 3_000_001
EXTENT = 256 * 1024


@pytest.fixture
def target(node) -> dict[str, str]:
    return {"endpoint": node.standin.endpoint, "key": KEY, "secret": SECRET}


@pytest.fixture
def door(node, monkeypatch):
    """A daemon, and a filesystem that is its client."""
    process = node.start()
    monkeypatch.setenv("GPUFEED_DAEMON", node.socket)
    GpufeedFileSystem.clear_instance_cache()
    yield GpufeedFileSystem()
    calls.close_shared()
    GpufeedFileSystem.clear_instance_cache()
    if process.poll() is None:
        assert node.stop(process) == 0


def put(node, key: str, size: int = SIZE, seed: int = 0) -> bytes:
    data = random.Random(f"{key}{seed}").randbytes(size)
    path = node.bucket / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return data


def settle(node) -> None:
    """Until no fill is under way."""
    while node.status()["fills_in_flight"]:
        pass


def all_given_back(node) -> bool:
    """What was lent comes back by messages: look until it has, for as long as the test may run."""
    while node.status()["arena_leased_slots"]:
        pass
    return True


# --- reading --------------------------------------------------------------------------------------


def test_a_chained_address_is_read_with_ossfs_options_and_later_without_the_origin(
    node, door, target
) -> None:
    data = put(node, "a/one.bin")
    for _ in range(2):
        with fsspec.open(f"gpufeed::oss://{BUCKET}/a/one.bin", oss=target) as file:
            assert file.read() == data
    settle(node)
    node.standin.reset()
    with fsspec.open(f"gpufeed::oss://{BUCKET}/a/one.bin", oss=target) as file:
        assert file.read() == data
    assert node.standin.counters()["requests_by_kind"] == {"head": 1}
    assert all_given_back(node)


def test_a_tar_read_as_a_file_and_as_a_dataset_has_all_its_samples(node, door) -> None:
    samples = node.put_tars(2, 30)
    tar = f"{BUCKET}/train-000.tar"
    assert door.cat_file(tar) == (node.bucket / "train-000.tar").read_bytes()
    settle(node)
    with Session.connect(node.socket) as session:
        found = session.open_dataset(DatasetRequest(urls=(f"oss://{BUCKET}/train-000.tar",)))
        indexed = session.index_dataset(found)
    assert indexed.shards[0].sample_count == len(samples) // 2
    # And the other way round: what the dataset stored is what the file is read from.
    settle(node)
    node.standin.reset()
    assert door.cat_file(tar) == (node.bucket / "train-000.tar").read_bytes()
    assert "get" not in node.standin.counters()["requests_by_kind"]


def test_a_plain_address_uses_the_daemons_own_credentials(node, door) -> None:
    data = put(node, "one.bin")
    with fsspec.open(f"gpufeed://{BUCKET}/one.bin") as file:
        assert file.read() == data
    filesystem, path = fsspec.url_to_fs(f"gpufeed://{BUCKET}/one.bin")
    assert path == f"{BUCKET}/one.bin"
    assert filesystem.cat_file(path) == data
    assert filesystem.unstrip_protocol(path) == f"gpufeed://{BUCKET}/one.bin"


def test_ranges_are_half_open_and_clipped(node, door) -> None:
    data = put(node, "one.bin")
    path = f"{BUCKET}/one.bin"
    for start, end in [
        (None, None), (0, 1), (5, 5), (0, 0), (7, 3), (EXTENT - 1, EXTENT + 1),
        (EXTENT, 2 * EXTENT),
        (SIZE - 1, SIZE), (SIZE - 3, SIZE + 100), (SIZE, SIZE + 1), (SIZE + 5, None), (-10, None),
        (-10, -3), (None, -1), (100, -100), (-SIZE - 7, 3), (1, 2_900_000),
    ]:  # fmt: skip
        assert door.cat_file(path, start, end) == data[start:end], (start, end)
    assert door.cat_ranges([path] * 3, [0, 10, -5], [3, 20, None]) == [
        data[:3], data[10:20], data[-5:],
    ]  # fmt: skip
    assert door.head(path, 5) == data[:5]
    assert door.tail(path, 5) == data[-5:]
    assert all_given_back(node)


def test_an_empty_file_is_read_without_asking_for_bytes(node, door) -> None:
    put(node, "empty", 0)
    path = f"{BUCKET}/empty"
    assert door.cat_file(path) == b""
    with door.open(path) as file:
        assert file.size == 0
        assert file.read(10) == b""
        assert file.readinto(bytearray(4)) == 0
    assert door.info(path)["size"] == 0
    assert "get" not in node.standin.counters()["requests_by_kind"]


def test_seek_tell_lines_and_readinto_as_any_file(node, door, tmp_path) -> None:
    rng = random.Random(1)
    lines = [rng.randbytes(rng.randrange(2000)).hex().encode() + b"\n" for _ in range(1500)]
    (node.bucket / "lines").write_bytes(b"".join(lines))
    local = tmp_path / "lines"
    local.write_bytes(b"".join(lines))

    with door.open(f"{BUCKET}/lines", block_size=4096) as file:
        assert list(file) == lines
    with door.open(f"{BUCKET}/lines", "rt") as text:
        assert text.readline().encode() == lines[0]
    with door.open(f"{BUCKET}/lines", block_size=10_000) as ours, open(local, "rb") as theirs:
        size = os.path.getsize(local)
        for _ in range(300):
            whence = rng.randrange(3)
            offset = (
                rng.randrange(-100, size + 100) if whence == 0 else rng.randrange(-50_000, 50_000)
            )
            try:
                expected = theirs.seek(offset, whence)
            except (OSError, ValueError):
                with pytest.raises((OSError, ValueError)):
                    ours.seek(offset, whence)
                continue
            assert ours.seek(offset, whence) == expected
            count = rng.choice((0, 1, 5000, 20_000, 600_000))
            into, other = bytearray(count), bytearray(count)
            assert ours.readinto(into) == theirs.readinto(other)
            assert into == other
            assert ours.read(count) == theirs.read(count)
            assert ours.tell() == theirs.tell()


def test_an_overwrite_while_open_is_an_error_and_never_a_mixture(node, door) -> None:
    data = put(node, "one.bin")
    path = f"{BUCKET}/one.bin"
    # Nothing of it may be cached or under way when it is overwritten.
    file = door.open(path, block_size=1000)
    new = put(node, "one.bin", seed=1)

    with pytest.raises(ShardChangedError, match=r"one\.bin") as caught:
        file.read()

    assert isinstance(caught.value, OSError)
    file.close()
    assert door.cat_file(path) == new != data
    with door.open(path) as file:
        assert file.read() == new
    assert all_given_back(node)


def test_many_threads_read_one_file_and_many(node, door) -> None:
    contents = {f"{BUCKET}/f{i}": put(node, f"f{i}", 700_000 + i) for i in range(6)}
    file = door.open(f"{BUCKET}/f0")
    shared = file.raw.remote
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(20):
                path = rng.choice(list(contents))
                begin = rng.randrange(800_000)
                end = begin + rng.randrange(400_000)
                assert door.cat_file(path, begin, end) == contents[path][begin:end]
                into = bytearray(300_000)
                count = shared.read_into(begin, memoryview(into))
                assert into[:count] == contents[f"{BUCKET}/f0"][begin : begin + 300_000]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert node.status()["sessions"] == 1
    assert all_given_back(node)


# Importable by name in a fresh interpreter, as a user's own module is; test modules are not.
CHILD = """
def work(file, door, expected, answers):
    try:
        file.seek(1000)
        right = file.read(5000) == expected and door.cat_file(file.path, 1000, 6000) == expected
        answers.put("right" if right else "wrong bytes")
    except BaseException as error:
        answers.put(f"{type(error).__name__}: {error}")
        raise
"""


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_open_files_work_in_children(node, door, how, tmp_path, monkeypatch) -> None:
    (tmp_path / "fsspec_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    import fsspec_child

    data = put(node, "one.bin")
    file = door.open(f"{BUCKET}/one.bin")
    assert file.read(10) == data[:10]
    context = multiprocessing.get_context(how)
    answers = context.Queue()
    child = context.Process(target=fsspec_child.work, args=(file, door, data[1000:6000], answers))
    child.start()
    assert answers.get(timeout=60) == "right"
    child.join()
    answers.close()
    answers.join_thread()
    assert file.read(10) == data[10:20]
    file.close()
    sys.modules.pop("fsspec_child")
    assert all_given_back(node)


def test_a_file_pickled_and_overwritten_is_refused(node, door) -> None:
    data = put(node, "one.bin")
    with door.open(f"{BUCKET}/one.bin") as file:
        file.seek(77)
        packed = pickle.dumps(file)
    with pickle.loads(packed) as again:
        assert again.read(5) == data[77:82]
    put(node, "one.bin", seed=1)
    with pytest.raises(ShardChangedError, match="had version"):
        pickle.loads(packed)


def test_a_restarted_daemon_is_found_again_and_one_that_stays_away_is_named(node, door) -> None:
    data = put(node, "one.bin")
    with door.open(f"{BUCKET}/one.bin", block_size=1000) as file:
        assert file.read(1000) == data[:1000]
        node.stop(node.processes[-1], signal.SIGKILL)
        node.start()
        assert file.read() == data[1000:]
        file.seek(0)
        node.stop(node.processes[-1], signal.SIGKILL)
        with pytest.raises(DaemonUnavailableError, match="gpufeed daemon") as caught:
            file.read()
        assert isinstance(caught.value, OSError)
        with pytest.raises(DaemonUnavailableError):
            door.exists(f"{BUCKET}/one.bin")


def test_a_restarted_daemon_does_not_hide_an_overwrite(node, door) -> None:
    put(node, "one.bin")
    with door.open(f"{BUCKET}/one.bin", block_size=1000) as file:
        file.read(1000)
        node.stop(node.processes[-1], signal.SIGKILL)
        put(node, "one.bin", seed=1)
        node.start()
        with pytest.raises(ShardChangedError, match="had version"):
            file.read()


def test_more_files_than_readers_are_kept_open(node, door) -> None:
    contents = [put(node, f"s{i}", 3000 + i) for i in range(50)]
    files = [door.open(f"{BUCKET}/s{i}", block_size=100) for i in range(50)]
    for _ in range(2):
        for file, data in zip(files, contents, strict=True):
            file.seek(1000)
            assert file.read(500) == data[1000:1500]
    for file in files:
        file.close()
    assert all_given_back(node)


# --- looking --------------------------------------------------------------------------------------


@pytest.fixture
def tree(node) -> dict[str, int]:
    sizes = {"t/a.csv": 10, "t/b.csv": 20, "t/sub/c.csv": 30, "t/sub/deep/d.txt": 40, "t/sub.e": 50}
    for key, size in sizes.items():
        put(node, key, size)
    return sizes


def test_listing_info_find_glob_walk_and_du(node, door, tree) -> None:
    root = f"{BUCKET}/t"
    assert sorted(door.ls(root, detail=False)) == [
        f"{root}/a.csv", f"{root}/b.csv", f"{root}/sub", f"{root}/sub.e",
    ]  # fmt: skip
    assert {e["name"]: e["type"] for e in door.ls(f"gpufeed://{root}/")}[
        f"{root}/sub"
    ] == "directory"
    assert door.ls(f"{root}/a.csv", detail=False) == [f"{root}/a.csv"]
    found = door.find(root, detail=True)
    assert {name: entry["size"] for name, entry in found.items()} == {
        f"{BUCKET}/{key}": size for key, size in tree.items()
    }
    assert door.find(root, maxdepth=1) == [f"{root}/a.csv", f"{root}/b.csv", f"{root}/sub.e"]
    assert f"{root}/sub/deep" in door.find(root, withdirs=True)
    assert door.glob(f"{root}/*.csv") == [f"{root}/a.csv", f"{root}/b.csv"]
    assert door.glob(f"{root}/**/*.csv") == [
        f"{root}/a.csv", f"{root}/b.csv", f"{root}/sub/c.csv",
    ]  # fmt: skip
    assert [(p, sorted(d), sorted(f)) for p, d, f in door.walk(root)][1:] == [
        (f"{root}/sub", ["deep"], ["c.csv"]), (f"{root}/sub/deep", [], ["d.txt"]),
    ]  # fmt: skip
    assert door.du(root) == 150
    info = door.info(f"oss://{root}/a.csv")
    assert (info["size"], info["type"]) == (10, "file")
    assert info["etag"] == info["ETag"]
    assert len(info["etag"]) == 32
    assert door.isfile(f"{root}/a.csv")
    assert not door.isfile(root)
    assert door.isdir(root)
    assert door.isdir(f"{root}/sub/")
    assert door.isdir(BUCKET)
    assert not door.isdir(f"{root}/su")
    assert not door.exists(f"{root}/none")
    assert door.cat([f"{root}/a.csv", f"{root}/b.csv"]).keys() == {f"{root}/a.csv", f"{root}/b.csv"}
    assert door.checksum(f"{root}/a.csv") == door.checksum(f"{root}/a.csv")


def test_get_copies_files_and_trees(node, door, tree, tmp_path) -> None:
    door.get(f"{BUCKET}/t", str(tmp_path / "copy"), recursive=True)
    for key in tree:
        local = tmp_path / "copy" / key.removeprefix("t/")
        assert local.read_bytes() == (node.bucket / key).read_bytes()


def test_listings_are_kept_until_told_or_expired(node, door, tree) -> None:
    root = f"{BUCKET}/t"
    before = door.ls(root, detail=False)
    put(node, "t/new", 1)
    assert door.ls(root, detail=False) == before
    assert f"{root}/new" in door.ls(root, detail=False, refresh=True)
    put(node, "t/newer", 1)
    door.invalidate_cache(f"{root}/a.csv")
    assert f"{root}/newer" in door.ls(root, detail=False)
    put(node, "t/newest", 1)
    uncached = GpufeedFileSystem(use_listings_cache=False)
    assert f"{root}/newest" in uncached.ls(root, detail=False)
    # Opening looks at the origin, whatever a listing says.
    new = put(node, "t/a.csv", 11)
    assert door.cat_file(f"{root}/a.csv") == new


def test_a_listing_of_many_pages_comes_whole(node, door) -> None:
    names = {f"many/{i:05d}" for i in range(5003)}
    (node.bucket / "many").mkdir()
    for name in names:
        (node.bucket / name).touch()
    assert set(door.ls(f"{BUCKET}/many", detail=False)) == {f"{BUCKET}/{name}" for name in names}


# --- errors ---------------------------------------------------------------------------------------


def test_each_error_is_pythons_and_ours_and_one_line(node, door, target, tmp_path) -> None:
    put(node, "one.bin", 10)
    cases = [
        (lambda: door.open(f"{BUCKET}/none"), NotFoundError, FileNotFoundError, "does not exist"),
        (lambda: door.info("no-bucket-here/x"), NotFoundError, FileNotFoundError, "bucket"),
        (lambda: door.ls(f"{BUCKET}/none"), NotFoundError, FileNotFoundError, "does not exist"),
        (
            lambda: GpufeedFileSystem("file").open("/etc/hostname"),
            AccessDeniedError, PermissionError, "daemon.allow",
        ),
        (
            lambda: GpufeedFileSystem(
                target_options={**target, "secret": "wrong"}
            ).open(f"{BUCKET}/one.bin"),
            AccessDeniedError, PermissionError, "secret",
        ),
        (
            lambda: GpufeedFileSystem(daemon=str(tmp_path / "x.sock")).info(f"{BUCKET}/one.bin"),
            DaemonUnavailableError, ConnectionError, "no gpufeed daemon answers",
        ),
        (lambda: GpufeedFileSystem("gopher").open("host/x"), GpufeedError, Exception, "gopher"),
    ]  # fmt: skip
    for call, ours, pythons, words in cases:
        with pytest.raises(ours, match=words) as caught:
            call()
        assert isinstance(caught.value, pythons), words
        assert "\n" not in str(caught.value)
    assert door.cat_file(f"{BUCKET}/one.bin")


def test_requests_that_make_no_sense_are_answered_and_the_session_goes_on(node, door) -> None:
    put(node, "one", 10)
    url = f"oss://{BUCKET}/one"
    requests = calls.Calls(Session.connect(node.socket))
    for kind, body, words in [
        (Kind.FILE_READ, {}, "file None is not open"),
        (Kind.FILE_READ, {"file": [1], "extent": 0}, "is not open"),
        (Kind.FILE_OPEN, {}, "without its address"),
        (Kind.FILE_OPEN, {"url": "file:///etc/passwd"}, "may not read"),
        (Kind.FILE_OPEN, {"url": url, "storage_options": []}, "must be a mapping"),
        (Kind.FILE_OPEN, {"url": url, "storage_options": {"keys": "x"}}, "known are"),
        (Kind.STAT, {"url": 7}, "without its address"),
        (Kind.LIST, {"cursor": 12345}, "list again"),
        (Kind.LIST, {"cursor": [], "url": ""}, "not an address"),
    ]:
        with pytest.raises(GpufeedError, match=words):
            requests.ask(kind, body)
    opened = requests.ask(Kind.FILE_OPEN, {"url": url})
    for extent in (-1, 1, 1 << 70, "0", None, 0.0):
        with pytest.raises(GpufeedError, match="of a file that has 1"):
            requests.ask(Kind.FILE_READ, {"file": opened["file"], "extent": extent})
    for file in ([], "x", -1, 1 << 70, None):
        requests._session.tell(Kind.FILE_CLOSE, {"file": file})
    lent = requests.ask(Kind.FILE_READ, {"file": opened["file"], "extent": 0})
    assert lent["length"] == 10
    requests.close_file(opened["file"])
    with pytest.raises(GpufeedError, match="is not open"):
        requests.ask(Kind.FILE_READ, {"file": opened["file"], "extent": 0})
    # What it still holds goes back with the session.
    requests.close()
    assert all_given_back(node)


def test_region_and_s3_names_reach_the_daemon() -> None:
    from gpufeed.cachefs.fsoptions import daemon_options

    plain = {"endpoint": "e", "key": "k", "secret": "s", "region": REGION}
    assert daemon_options({**plain, "default_block_size": 1}) == plain
    named = {"key": "k", "client_kwargs": {"endpoint_url": "u", "region_name": "r"}, "anon": False}
    assert daemon_options(named) == {"endpoint": "u", "region": "r", "key": "k"}
