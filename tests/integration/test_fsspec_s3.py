"""The fsspec door before S3: the daemon gets s3fs's options, and writing goes through s3fs."""

from __future__ import annotations

import gc
import random

import fsspec
import pytest

from gpufeed.cachefs import calls
from gpufeed.cachefs.errors import AccessDeniedError
from gpufeed.cachefs.fs import GpufeedFileSystem
from gpufeed.cachefs.testing import seaweed as s3_server

BUCKET = "fsspec-door"


def test_s3_is_read_and_written_with_s3fs_options(node, seaweed, monkeypatch) -> None:
    client = {"endpoint_url": seaweed.endpoint, "region_name": "us-east-1"}
    s3 = {"key": s3_server.KEY, "secret": s3_server.SECRET, "client_kwargs": client}
    process = node.start(GPUFEED_DAEMON_ENDPOINTS=seaweed.endpoint)
    monkeypatch.setenv("GPUFEED_DAEMON", node.socket)
    door = GpufeedFileSystem("s3", s3, skip_instance_cache=True)
    door.mkdir(BUCKET)
    data = random.Random(4).randbytes(700_000)
    with door.open(f"{BUCKET}/a/one.bin", "wb") as file:
        file.write(data)
    door.pipe_file(f"{BUCKET}/a/two", b"2")

    with fsspec.open(f"gpufeed::s3://{BUCKET}/a/one.bin", s3=s3) as file:
        assert file.read() == data
    assert door.cat_file(f"s3://{BUCKET}/a/one.bin", -10, None) == data[-10:]
    assert door.find(BUCKET) == [f"{BUCKET}/a/one.bin", f"{BUCKET}/a/two"]
    assert door.ls(BUCKET, detail=False) == [f"{BUCKET}/a"]
    assert door.isdir(f"{BUCKET}/a")
    door.rm(f"{BUCKET}/a", recursive=True)
    assert not door.exists(f"{BUCKET}/a/two")
    wrong = GpufeedFileSystem("s3", {**s3, "secret": "wrong"}, skip_instance_cache=True)
    with pytest.raises(AccessDeniedError) as caught:
        wrong.cat_file(f"{BUCKET}/a/one.bin")
    assert isinstance(caught.value, PermissionError)

    calls.close_shared()
    GpufeedFileSystem.clear_instance_cache()
    del door, wrong
    gc.collect()  # its connections end here, not on the loop of a later test
    assert node.stop(process) == 0
