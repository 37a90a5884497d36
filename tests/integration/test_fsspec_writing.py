"""What changes the origin through the fsspec door, and what readers then see."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufeed.cachefs import calls, fswriting
from gpufeed.cachefs.client import Session
from gpufeed.cachefs.errors import (
    AccessDeniedError,
    GpufeedError,
    NotFoundError,
    OriginUnavailableError,
    UsageError,
)
from gpufeed.cachefs.fs import GpufeedFileSystem
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, SECRET


@pytest.fixture
def door(node, monkeypatch):
    process = node.start()
    monkeypatch.setenv("GPUFEED_DAEMON", node.socket)
    target = {"endpoint": node.standin.endpoint, "key": KEY, "secret": SECRET}
    yield GpufeedFileSystem("oss", target, skip_instance_cache=True)
    calls.close_shared()
    assert node.stop(process) == 0


def test_what_is_written_is_read_back_by_every_session(node, door) -> None:
    path = f"{BUCKET}/w/one"
    other = GpufeedFileSystem(skip_instance_cache=True, use_listings_cache=False)
    script = (
        "import sys; from gpufeed.cachefs.fs import GpufeedFileSystem as F\n"
        "for line in sys.stdin: print(F().cat_file(line.strip()).decode(), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for text in ("first", "second, longer", "3rd"):
            with door.open(path, "w") as file:
                file.write(text)
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
            assert process.stdout.readline().strip() == text
            assert other.cat_file(path) == door.cat_file(path) == text.encode()
            assert door.info(path)["size"] == len(text)
            assert (node.bucket / "w" / "one").read_text() == text
        process.stdin.close()


def test_append_exclusive_copy_move_and_delete(node, door) -> None:
    root = f"{BUCKET}/w"
    door.pipe({f"{root}/a": b"aaa", f"{root}/b": b"b"})
    assert door.ls(root, detail=False) == [f"{root}/a", f"{root}/b"]
    with door.open(f"{root}/a", "ab") as file:
        file.write(b"+")
        assert file.tell() == 4
    assert door.cat_file(f"{root}/a") == b"aaa+"
    with door.open(f"{root}/new", "ab") as file:
        file.write(b"begun")
    assert door.cat_file(f"{root}/new") == b"begun"
    with pytest.raises(FileExistsError, match="w/a exists"):
        door.open(f"{root}/a", "xb")
    with door.open(f"{root}/x", "xb") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="rb, wb, xb or ab"):
        door.open(f"{root}/a", "r+b")
    door.cp(f"{root}/a", f"{root}/copy")
    door.mv(f"{root}/b", f"{root}/moved")
    assert door.cat_file(f"{root}/copy") == b"aaa+"
    assert door.ls(root, detail=False) == [
        f"{root}/{name}" for name in ("a", "copy", "moved", "new", "x")
    ]
    door.rm([f"{root}/x", f"{root}/new"])
    door.touch(f"{root}/empty")
    assert door.cat_file(f"{root}/empty") == b""
    door.rm(root, recursive=True)
    assert not door.exists(root)


def test_what_fails_half_way_leaves_the_old_object(node, door) -> None:
    path = f"{BUCKET}/w/one"
    door.pipe_file(path, b"old")

    def write(*, in_transaction: bool) -> None:
        with door.open(path, "wb") as file:
            file.write(b"new, but")
            if not in_transaction:
                raise RuntimeError("half way")
        raise RuntimeError("in the end")

    with pytest.raises(RuntimeError, match="half way"):
        write(in_transaction=False)
    assert door.cat_file(path) == b"old"
    with pytest.raises(RuntimeError, match="in the end"), door.transaction:
        write(in_transaction=True)
    assert door.cat_file(path) == b"old"
    with door.transaction:
        with door.open(path, "wb") as file:
            file.write(b"new")
        assert door.cat_file(path) == b"old"
    assert door.cat_file(path) == b"new"


def test_a_long_file_waits_on_disk_and_arrives_whole(node, door, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(fswriting, "SPOOL_BYTES_MAX", 100_000)
    monkeypatch.setenv("HOME", str(tmp_path))  # where oss2 notes uploads in parts
    data = os.urandom(350_001)
    with door.open(f"{BUCKET}/long", "wb") as file:
        for begin in range(0, len(data), 70_000):
            file.write(data[begin : begin + 70_000])
        spool = Path(file._spool.name)
        assert spool.stat().st_size
    assert not spool.exists()
    assert door.cat_file(f"{BUCKET}/long") == data
    door.put(__file__, f"{BUCKET}/put")
    assert door.cat_file(f"{BUCKET}/put") == Path(__file__).read_bytes()


def test_errors_of_writing_are_those_of_reading(node, door) -> None:
    import pandas as pd

    good = {"endpoint": node.standin.endpoint, "key": KEY, "secret": SECRET}
    path = f"{BUCKET}/w/one"
    door.pipe_file(path, b"old")

    def through(options: dict[str, str], bucket: str = BUCKET) -> Iterator[GpufeedError]:
        other = GpufeedFileSystem("oss", {**good, **options}, skip_instance_cache=True)
        frame = pd.DataFrame({"x": [1]})
        url = f"gpufeed::oss://{bucket}/w/one"
        for call in (
            lambda: other.pipe_file(f"{bucket}/w/one", b"new"),
            lambda: other.rm_file(f"{bucket}/w/one"),
            lambda: other.rm(f"{bucket}/w/one"),
            lambda: other.put_file(__file__, f"{bucket}/w/one"),
            lambda: frame.to_csv(url, storage_options={"oss": {**good, **options}}),
        ):
            with pytest.raises(GpufeedError) as caught:
                call()
            assert "\n" not in str(caught.value)
            assert "{" not in str(caught.value)
            yield caught.value

    for error in through({"secret": "wrong"}):
        assert isinstance(error, AccessDeniedError)
        assert isinstance(error, PermissionError)
        assert "target_options" in str(error)
    for error in through({"endpoint": "http://127.0.0.1:1"}):
        assert isinstance(error, OriginUnavailableError)
        assert isinstance(error, OSError)
        assert f"oss://{BUCKET}/w" in str(error)
    for error in through({}, "no-such-bucket"):
        assert isinstance(error, NotFoundError)
        assert isinstance(error, FileNotFoundError)
    assert door.cat_file(path) == b"old"
    with pytest.raises(UsageError, match="the daemon's credentials are for reading"):
        pd.DataFrame({"x": [1]}).to_csv(f"gpufeed://{path}")
    # As the documentation says: object stores do not tell.
    door.rm_file(f"{BUCKET}/w/none")


def test_a_target_of_local_files_needs_the_daemons_leave(node, tmp_path, monkeypatch) -> None:
    process = node.start("--allow", f"file://{tmp_path}/")
    monkeypatch.setenv("GPUFEED_DAEMON", node.socket)
    door = GpufeedFileSystem("file", skip_instance_cache=True)
    door.pipe_file(f"{tmp_path}/x", b"local")
    assert door.cat_file(f"gpufeed://{tmp_path}/x") == b"local"
    (tmp_path / "empty").mkdir()
    assert door.isdir(f"{tmp_path}/empty")
    assert door.ls(f"{tmp_path}/empty") == []
    with pytest.raises(PermissionError, match="may not read"):
        door.cat_file("/etc/hostname")
    calls.close_shared()
    assert node.stop(process) == 0


def test_many_threads_in_a_small_window_do_not_wait_for_each_other(node, monkeypatch) -> None:
    """The window is four extents, and each of twelve readers wants ten, four at a time."""
    data = os.urandom(10 * 64 * 1024)
    (node.bucket / "big").write_bytes(data)
    monkeypatch.setattr(calls, "WINDOW_BYTES", 1)
    monkeypatch.setenv("GPUFEED_DAEMON", node.socket)
    process = node.start(GPUFEED_ARENA_EXTENT_BYTES="64KiB", GPUFEED_ARENA_SIZE_BYTES="2MiB")
    with Session.connect(node.socket, window_bytes=1) as session:
        assert session.window_extents == 4
    door = GpufeedFileSystem(skip_instance_cache=True)
    wrong: list[str] = []

    def work() -> None:
        try:
            for _ in range(5):
                assert door.cat_file(f"{BUCKET}/big") == data, "wrong bytes"
        except BaseException as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    calls.close_shared()
    assert node.stop(process) == 0
