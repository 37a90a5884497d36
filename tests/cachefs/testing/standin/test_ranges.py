"""OSS's own range rules, and conditional requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs.testing.standin.ranges import check_conditions, resolve
from gpufeed.cachefs.testing.standin.replies import OssError

SIZE = 1000
ETAG = "D41D8CD98F00B204E9800998ECF8427E"
EPOCH_DATE = "Thu, 01 Jan 1970 00:16:40 GMT"  # 1000 s


@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=0-999", (0, 1000)),
        ("bytes=500-", (500, 1000)),
        ("bytes=-1", (999, 1000)),
        ("bytes=-1000", (0, 1000)),
        ("bytes=1-2,5-6", (1, 3)),
        ("byte=0-1", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
        ("", None),
    ],
)
def test_a_range_inside_the_object_and_a_malformed_one_mean_the_same_either_way(
    header: str, expected: tuple[int, int] | None, standard: bool
) -> None:
    assert resolve(header, SIZE, standard=standard) == expected


@pytest.mark.parametrize(
    "header", ["bytes=0-1000", "bytes=1000-", "bytes=2000-3000", "bytes=-1001"]
)
def test_out_of_bounds_gives_the_whole_object_by_default(header: str) -> None:
    assert resolve(header, SIZE, standard=False) is None


def test_standard_behaviour_clips_the_end_and_refuses_a_start_beyond_it() -> None:
    assert resolve("bytes=990-5000", SIZE, standard=True) == (990, 1000)
    assert resolve("bytes=-5000", SIZE, standard=True) == (0, 1000)
    with pytest.raises(OssError, match="InvalidRange") as refused:
        resolve("bytes=1000-1001", SIZE, standard=True)
    assert refused.value.status == 416


@given(st.integers(0, 1200), st.integers(0, 1200), st.integers(0, 1100), st.booleans())
def test_a_resolved_range_always_lies_inside_the_object(
    first: int, last: int, size: int, standard: bool
) -> None:
    try:
        found = resolve(f"bytes={first}-{last}", size, standard=standard)
    except OssError:
        assert standard
        assert first >= size or last < first
        return
    if found is not None:
        begin, end = found
        assert begin == first
        assert begin < end <= size
        assert end == min(last + 1, size)


@pytest.mark.parametrize(
    ("headers", "not_modified"),
    [
        ({}, False),
        ({"if-match": f'"{ETAG}"'}, False),
        ({"if-none-match": '"other"'}, False),
        ({"if-none-match": f'"{ETAG}"'}, True),
        ({"if-modified-since": EPOCH_DATE}, True),
        ({"if-unmodified-since": EPOCH_DATE}, False),
        ({"if-modified-since": "nonsense"}, False),
    ],
)
def test_conditions_that_hold(headers: dict[str, str], not_modified: bool) -> None:
    assert check_conditions(headers, ETAG, 1000.5) is not_modified


@pytest.mark.parametrize(
    "headers", [{"if-match": '"other"'}, {"if-unmodified-since": "Thu, 01 Jan 1970 00:00:01 GMT"}]
)
def test_conditions_that_fail_are_412(headers: dict[str, str]) -> None:
    with pytest.raises(OssError) as refused:
        check_conditions(headers, ETAG, 1000.0)
    assert (refused.value.status, refused.value.code) == (412, "PreconditionFailed")
