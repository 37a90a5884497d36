"""Listing pages, walked to their end, against a plain model."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs.testing.standin.listing import list_objects
from gpufeed.cachefs.testing.standin.objects import Stored
from gpufeed.cachefs.testing.standin.replies import OssError, Request, no_such_key

KEYS = ["a b+c.txt", "a/1", "a/2", "a/b/3", "a-x", "z&<.txt", "数据/1", "數/2"]


def page(keys: list[str], **query: str) -> ET.Element:
    names = {name.replace("_", "-"): value for name, value in query.items()}
    request = Request("GET", "bucket", "", tuple(names.items()), {})
    ordered = sorted(keys, key=str.encode)
    return ET.fromstring(
        list_objects(request, ordered, lambda key: Stored(key, len(key), "E" * 32, 1, 0.0))
    )


def walk(keys: list[str], version: int, **query: str) -> tuple[list[str], list[str]]:
    """All keys and prefixes, page by page, as a client sees them."""
    found_keys: list[str] = []
    found_prefixes: list[str] = []
    more: dict[str, str] = {"list_type": "2"} if version == 2 else {}
    token = "NextContinuationToken" if version == 2 else "NextMarker"
    decode = unquote if query.get("encoding_type") == "url" else str
    for _ in range(len(keys) + 1):
        root = page(keys, **query, **more)
        page_keys = [decode(e.text or "") for e in root.iterfind("Contents/Key")]
        page_prefixes = [decode(e.text or "") for e in root.iterfind("CommonPrefixes/Prefix")]
        assert len(page_keys) + len(page_prefixes) <= int(query.get("max_keys", "100"))
        found_keys += page_keys
        found_prefixes += page_prefixes
        if root.findtext("IsTruncated") == "false":
            return found_keys, found_prefixes
        name = "continuation_token" if version == 2 else "marker"
        more[name] = decode(root.findtext(token) or "")
    raise AssertionError("the listing does not end")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("encoding", [{}, {"encoding_type": "url"}])
@pytest.mark.parametrize("max_keys", ["1", "2", "1000"])
def test_all_keys_come_once_and_in_order(
    version: int, encoding: dict[str, str], max_keys: str
) -> None:
    keys, prefixes = walk(KEYS, version, max_keys=max_keys, **encoding)

    assert keys == sorted(KEYS, key=str.encode)
    assert prefixes == []


@given(
    keys=st.lists(st.text("ab/-.", min_size=1, max_size=6), unique=True, max_size=25),
    prefix=st.text("ab/", max_size=2),
    delimiter=st.sampled_from(["", "/", "-"]),
    max_keys=st.integers(1, 4),
    version=st.sampled_from([1, 2]),
)
def test_paging_with_prefix_and_delimiter_agrees_with_a_model(
    keys: list[str], prefix: str, delimiter: str, max_keys: int, version: int
) -> None:
    expected_keys, expected_prefixes = [], []
    for key in sorted(k for k in keys if k.startswith(prefix)):
        at = key.find(delimiter, len(prefix)) if delimiter else -1
        if at < 0:
            expected_keys.append(key)
        elif key[: at + 1] not in expected_prefixes:
            expected_prefixes.append(key[: at + 1])

    found = walk(
        keys, version, prefix=prefix, delimiter=delimiter, max_keys=str(max_keys),
        encoding_type="url",
    )  # fmt: skip

    assert found == (expected_keys, expected_prefixes)


def test_start_after_is_exclusive_and_key_count_counts_prefixes_too() -> None:
    root = page(["a", "b", "c/1", "c/2"], list_type="2", start_after="a", delimiter="/")

    assert [e.text for e in root.iterfind("Contents/Key")] == ["b"]
    assert root.findtext("KeyCount") == "2"


@pytest.mark.parametrize("value", ["0", "1001", "x", "-1"])
def test_max_keys_out_of_range_is_an_error(value: str) -> None:
    with pytest.raises(OssError, match="InvalidArgument"):
        page(KEYS, max_keys=value)


def test_a_made_up_token_is_an_error() -> None:
    with pytest.raises(OssError, match="continuation-token"):
        page(KEYS, list_type="2", continuation_token="no such token")


def test_an_object_deleted_while_it_is_listed_is_left_out() -> None:
    def find(key: str) -> Stored:
        if key == "b":
            raise no_such_key(key)
        return Stored(key, 1, "E" * 32, 1, 0.0)

    request = Request("GET", "bucket", "", (("list-type", "2"),), {})
    root = ET.fromstring(list_objects(request, ["a", "b", "c"], find))

    assert [e.text for e in root.iterfind("Contents/Key")] == ["a", "c"]
    assert root.findtext("KeyCount") == "2"
