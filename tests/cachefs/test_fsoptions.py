"""What the fsspec door refuses by name, before anything is asked of a daemon or an origin."""

from __future__ import annotations

import inspect

import fsspec
import pytest

from gpufeed.cachefs import fsoptions
from gpufeed.cachefs.errors import UsageError
from gpufeed.cachefs.fs import GpufeedFileSystem

TARGET = {"endpoint": "http://127.0.0.1:1", "key": "K", "secret": "hidden"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpoint": "http://127.0.0.1:1"}, "no option 'endpoint'.*put it in target_options"),
        ({"traget_options": TARGET}, "did you mean target_options"),
        ({"listings_expiry": 3}, "did you mean listings_expiry_time"),
        ({"osss": TARGET}, "did you mean oss"),
        (
            {"wholly_different": 3},
            "no option 'wholly_different'; if it is one of the target's, put",
        ),
        ({"target_options": {**TARGET, "endpiont": "x"}}, "no 'endpiont'; did you mean endpoint"),
        ({"target_options": {"endpoint_url": "x"}}, "did you mean endpoint"),
        ({"target_options": {"anon": True}}, "no 'anon'; known are endpoint, key, secret, token"),
        ({"target_options": "http://x"}, "must be a mapping of names to values, not str"),
        ({"block_size": "1MiB"}, "block_size is '1MiB'; it must be a positive number of bytes"),
        ({"block_size": 0}, "block_size is 0; it must"),
    ],
)
def test_an_option_that_nobody_reads_is_refused_with_the_one_that_was_meant(options, words) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        fsspec.filesystem("gpufeed", **options)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_options_of_a_chain_are_looked_at_too() -> None:
    url = "gpufeed::oss://bucket/key"
    with pytest.raises(UsageError, match="did you mean endpoint"):
        fsspec.open(url, oss={"endpiont": "x", "key": "K", "secret": "hidden"})
    with pytest.raises(UsageError, match=r"no option 'endpoint'.*gpufeed::oss:// in oss=\{"):
        fsspec.open(url, **TARGET)
    pandas = pytest.importorskip("pandas")
    with pytest.raises(UsageError, match="put it in target_options"):
        pandas.read_csv("gpufeed::oss://bucket/t.csv", storage_options=TARGET)


def test_what_fsspec_and_the_targets_read_is_taken() -> None:
    door = fsspec.filesystem(
        "gpufeed", skip_instance_cache=True, asynchronous=False, loop=None,
        use_listings_cache=False, listings_expiry_time=1, max_paths=10, fo="bucket/key",
        target_protocol="oss", daemon="off", block_size=1 << 20,
        target_options={
            **TARGET, "token": "T", "region": "r", "default_block_size": 1,
            "default_cache_type": "none", "use_listings_cache": False, "skip_instance_cache": True,
        },
    )  # fmt: skip
    assert door.target_options["region"] == "r"
    # Other targets hand theirs on to their clients.
    s3 = GpufeedFileSystem("s3", {"client_kwargs": {"endpoint_url": "u"}, "anything": 1})
    assert s3.target_options["anything"] == 1


def test_the_names_are_those_of_ossfs() -> None:
    ossfs = pytest.importorskip("ossfs")
    base = next(c for c in ossfs.OSSFileSystem.__mro__ if c.__name__ == "BaseOSSFileSystem")
    taken = [
        name
        for name, parameter in inspect.signature(base.__init__).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and name != "self"
    ]
    assert sorted(taken) == sorted(fsoptions.OSSFS_OPTIONS)


def test_an_address_without_a_path_names_no_file() -> None:
    for mode in ("rb", "wb", "rt"):
        with pytest.raises(UsageError, match="names no file: give gpufeed://bucket/key"):
            fsspec.open("gpufeed://", mode).open()


def test_times_are_not_told_and_the_message_says_why() -> None:
    door = GpufeedFileSystem()
    for call in (door.modified, door.created):
        with pytest.raises(NotImplementedError, match="versions of files are etags"):
            call("bucket/key")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give target_options with endpoint, key and secret: the daemon's credentials are for"),
        ({"region": "r"}, "cannot write: give target_options"),
        ({"key": "K", "secret": "S"}, "lack endpoint"),
        ({"endpoint": "e", "key": "K"}, "lack secret"),
        ({"secret": "S"}, "lack endpoint and key"),
    ],
)
def test_what_cannot_write_says_so_before_ossfs_is_asked(options, words, monkeypatch) -> None:
    monkeypatch.delenv("OSS_ENDPOINT", raising=False)
    door = GpufeedFileSystem("oss", options, skip_instance_cache=True)
    for call in (
        lambda: door.pipe_file("b/k", b"x"),
        lambda: door.rm("b/k"),
        lambda: door.rm_file("b/k"),
        lambda: door.open("b/k", "wb"),
        lambda: door.makedirs("b/k", exist_ok=True),
        lambda: door.put_file(__file__, "b/k"),
    ):
        with pytest.raises(UsageError, match=words):
            call()
    assert door._target_made is None


def test_an_endpoint_of_the_environment_counts_with_a_key(monkeypatch) -> None:
    monkeypatch.setenv("OSS_ENDPOINT", "http://127.0.0.1:1")
    fsoptions.must_be_writable("oss", {"key": "K", "secret": "S"})
    with pytest.raises(UsageError, match="cannot write"):
        fsoptions.must_be_writable("oss", {})
    # Open to everybody.
    monkeypatch.delenv("OSS_ENDPOINT")
    fsoptions.must_be_writable("oss", {"endpoint": "e"})
    fsoptions.must_be_writable("s3", {})
