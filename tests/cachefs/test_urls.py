"""Brace patterns against braceexpand, and the written form of addresses."""

from __future__ import annotations

import os

import braceexpand
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs.errors import UsageError
from gpufeed.cachefs.urls import EXPANSION_MAX, NESTING_MAX, expand, normalise, split_bucket


class TestExpand:
    @pytest.mark.parametrize(
        "pattern",
        [
            "oss://b/train-{000000..000012}.tar",
            "{a,b,c}/x",
            "{a..e}{0..3}",
            "x{1..2}{a,b{3..5},{c,d}}y",
            "{0..100..25}",
            "{08..12}",
            "{-2..2}",
            "{,x}tail",
            "a,b",
            "no braces",
            r"literal \{a,b\} and {c,d}",
            "{-05..05}",
            "{1..010}",
            "/data/{train,val}/{00..03}.tar",
        ],
    )
    def test_agrees_with_braceexpand(self, pattern):
        assert expand(pattern) == list(braceexpand.braceexpand(pattern))

    @given(st.recursive(
        st.text("abc-_./", max_size=4)
        | st.tuples(st.integers(0, 20), st.integers(0, 5), st.integers(1, 3)).map(
            lambda t: f"{{{t[0]:02d}..{t[0] + t[1]:02d}}}"
        ),
        lambda inner: st.lists(inner, min_size=2, max_size=3).map(lambda x: "{" + ",".join(x) + "}")
        | st.lists(inner, min_size=1, max_size=2).map("".join),
        max_leaves=5,
    ))  # fmt: skip
    def test_agrees_with_braceexpand_on_any_nesting(self, pattern):
        if pattern and "{}" not in pattern:
            assert expand(pattern) == list(braceexpand.braceexpand(pattern))

    def test_takes_a_list_and_keeps_its_order(self):
        assert expand(["b{1..2}", "a"]) == ["b1", "b2", "a"]

    @pytest.mark.parametrize(
        ("pattern", "message"),
        [
            ("", "empty"),
            ("  ", "empty"),
            ([], "empty list"),
            ("{0..99999999999999999999}.tar", "longer than 18 digits"),
            ("{0..1" + 5000 * "0" + "}", "longer than 18 digits"),
            (["a", ""], "empty"),
            ([3], "not a string"),
            ("x{5..1}", "whose end lies before its start"),
            ("x{e..a}", "whose end lies before its start"),
            ("x{1..5..0}", "step of 0"),
            ("x{}", "neither a list"),
            ("x{abc}", "neither a list"),
            ("x{1..b}", "neither a list"),
            ("x{a..}", "neither a list"),
            ("x{0..3", r"'\{' without its '\}' \(at character 2\)"),
            ("x0..3}", r"'\}' without its '\{' \(at character 6\)"),
            ("{a,{b,c}", "without its"),
            ("{a," * (NESTING_MAX + 1) + "b" + "}" * (NESTING_MAX + 1), "deeper than"),
        ],
    )
    def test_a_wrong_pattern_is_a_clear_error(self, pattern, message):
        with pytest.raises(UsageError, match=message):
            expand(pattern)

    def test_the_limit_is_checked_before_anything_is_made(self):
        with pytest.raises(UsageError, match=f"the limit is {EXPANSION_MAX}"):
            expand("{0..99999999}{0..99999999}{0..99999999}")
        with pytest.raises(UsageError, match="the limit is"):
            expand([f"{{0..{EXPANSION_MAX // 2}}}"] * 2)


class TestNormalise:
    @pytest.mark.parametrize(
        ("url", "want"),
        [
            ("/data/a.tar", "file:///data/a.tar"),
            ("a.tar", "file:///w/a.tar"),
            ("./d/../a.tar", "file:///w/a.tar"),
            ("d/", "file:///w/d/"),
            ("/", "file:///"),
            ("//data//a", "file:///data/a"),
            ("file:///data/d/", "file:///data/d/"),
            ("FILE:///x", "file:///x"),
            ("oss://Bucket/a//b/../c", "oss://Bucket/a//b/../c"),
            ("OSS://b/k/", "oss://b/k/"),
            ("oss://b", "oss://b"),
            ("http://h/p?q=1", "http://h/p?q=1"),
        ],
    )
    def test_gives_one_written_form(self, url, want):
        assert normalise(url, working_directory="/w") == want
        assert normalise(want, working_directory="/elsewhere") == want

    @pytest.mark.parametrize("url", ["/data/\udcff.tar", "oss://bucket/\ud800", "file:///\udcff/"])
    def test_what_is_no_text_is_refused(self, url):
        with pytest.raises(UsageError, match=r"udcff.*UTF-8|ud800.*UTF-8"):
            normalise(url)

    def test_knows_the_working_directory_and_the_home(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", "/home/someone")
        assert normalise("x.tar") == f"file://{os.getcwd()}/x.tar"
        assert normalise("~/x.tar") == "file:///home/someone/x.tar"

    @pytest.mark.parametrize("url", ["", " ", "file://rel/path", "file://", "a\0b"])
    def test_a_wrong_address_is_a_clear_error(self, url):
        with pytest.raises(UsageError, match=r"address|absolute"):
            normalise(url)


class TestSplitBucket:
    @pytest.mark.parametrize(
        ("url", "want"),
        [
            ("oss://b/a/b.tar", ("oss", "b", "a/b.tar")),
            ("oss://b//a", ("oss", "b", "/a")),
            ("oss://b", ("oss", "b", "")),
            ("S3://b/", ("s3", "b", "")),
            ("file:///a/b", ("file", "", "/a/b")),
            ("/a/b", ("file", "", "/a/b")),
            ("http://h:80/p", ("http", "h:80", "p")),
            ("memory://x/y", ("memory", "x", "y")),
        ],
    )
    def test_takes_an_address_apart(self, url, want):
        assert split_bucket(url) == want

    @pytest.mark.parametrize("url", ["oss://", "oss:///key", "s3:///k"])
    def test_wants_a_bucket(self, url):
        with pytest.raises(UsageError, match="names no bucket"):
            split_bucket(url)
