"""Objects as files: any key, fresh checksums, and nothing left behind."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import fastcrc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufeed.cachefs.testing.standin.objects import KEY_BYTES_MAX, Buckets, is_bucket_name
from gpufeed.cachefs.testing.standin.replies import OssError

BUCKET = "bucket"


@pytest.fixture
def buckets(tmp_path: Path) -> Buckets:
    (tmp_path / "root" / BUCKET).mkdir(parents=True)
    return Buckets(str(tmp_path / "root"))


@pytest.mark.parametrize(
    "key",
    [
        "a", "a/b/c", "a b+c%20&=?.bin", "数据/é", "dir/", "a//b", "/a", "..", "../../x", "a/./b",
        "n" * 300, "n" * KEY_BYTES_MAX, "\x01odd/x", "\x01tmp/x", "-", "\\", "a\nb",
    ],
)  # fmt: skip
def test_any_key_is_stored_found_listed_and_deleted(buckets: Buckets, key: str) -> None:
    stored = buckets.put(BUCKET, key, b"data")

    inside = os.path.join(buckets.root, BUCKET) + os.sep
    assert os.path.realpath(stored.path).startswith(inside)
    assert buckets.find(BUCKET, key) == stored
    assert buckets.keys(BUCKET) == [key]
    buckets.delete(BUCKET, key)
    assert buckets.keys(BUCKET) == []
    with pytest.raises(OssError, match="NoSuchKey"):
        buckets.find(BUCKET, key)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_no_key_escapes_its_bucket(buckets: Buckets, key: str) -> None:
    try:
        path = buckets.path(BUCKET, key)
    except OssError:
        assert "\0" in key or len(key.encode()) > KEY_BYTES_MAX
        return
    inside = os.path.join(buckets.root, BUCKET)
    assert os.path.normpath(path) == path
    assert path.startswith(inside + os.sep)


@pytest.mark.parametrize("key", ["", "a\0b", "n" * (KEY_BYTES_MAX + 1)])
def test_a_key_that_oss_refuses_is_refused(buckets: Buckets, key: str) -> None:
    with pytest.raises(OssError, match="InvalidObjectName"):
        buckets.put(BUCKET, key, b"")


def test_keys_come_in_the_order_of_their_bytes(buckets: Buckets) -> None:
    keys = ["a/b", "a.b", "a-b", "é", "z", "a/", "\U0001d51e", "\uffff"]
    for key in keys:
        buckets.put(BUCKET, key, b"")
    assert buckets.keys(BUCKET) == sorted(keys, key=str.encode)


def test_a_file_changed_from_outside_has_new_checksums(buckets: Buckets) -> None:
    path = Path(buckets.root, BUCKET, "k")
    for data in (b"one", b"another one", b""):
        path.write_bytes(data)
        found = buckets.find(BUCKET, "k")
        assert found.etag == hashlib.md5(data).hexdigest().upper()
        assert found.crc64 == fastcrc.crc64.xz(data)
        assert found.size_bytes == len(data)


def test_another_file_of_the_same_size_and_time_has_new_checksums(buckets: Buckets) -> None:
    """As `cp -p` or a fast test leaves it: only the inode tells."""
    path = Path(buckets.root, BUCKET, "k")
    path.write_bytes(b"one")
    os.utime(path, ns=(10**18, 10**18))
    before = buckets.find(BUCKET, "k")
    other = path.with_name("k2")
    other.write_bytes(b"two")
    os.utime(other, ns=(10**18, 10**18))
    other.rename(path)

    assert buckets.find(BUCKET, "k").etag != before.etag


def test_a_key_and_a_folder_cannot_share_a_name(buckets: Buckets) -> None:
    buckets.put(BUCKET, "a/b", b"")
    with pytest.raises(OssError, match="FileAlreadyExists"):
        buckets.put(BUCKET, "a", b"")
    with pytest.raises(OssError, match="FileAlreadyExists"):
        buckets.put(BUCKET, "a/b/c", b"")
    temporary = [p for p in Path(buckets.root, BUCKET).rglob("*") if "tmp" in p.name]
    assert [p for folder in temporary for p in folder.iterdir()] == []


def test_a_folder_is_no_object_and_a_missing_bucket_says_so(buckets: Buckets) -> None:
    buckets.put(BUCKET, "a/b", b"")
    with pytest.raises(OssError, match="NoSuchKey"):
        buckets.find(BUCKET, "a")
    for name in ("other", "..", "Upper"):
        with pytest.raises(OssError, match="NoSuchBucket"):
            buckets.find(name, "a")


def test_a_new_version_has_a_new_etag_and_the_same_bytes(buckets: Buckets) -> None:
    before = buckets.put(BUCKET, "k", b"data")
    buckets.change_version(BUCKET, "k")
    after = buckets.find(BUCKET, "k")
    assert (after.etag != before.etag, len(after.etag)) == (True, 32)
    assert after.crc64 == before.crc64


def test_prepare_knows_every_object(buckets: Buckets) -> None:
    for key in ("a", "b/c", "d/"):
        buckets.put(BUCKET, key, b"x")
    assert Buckets(buckets.root).prepare() == 3


@pytest.mark.parametrize(
    ("name", "valid"),
    [("abc", True), ("a-1", True), ("ab", False), ("-ab", False), ("a_b", False), ("A" * 3, False),
     ("a" * 64, False)],
)  # fmt: skip
def test_bucket_names(name: str, valid: bool) -> None:
    assert is_bucket_name(name) is valid
