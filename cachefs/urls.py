"""Addresses as people write them: brace patterns, plain paths, buckets and keys.

`expand` turns patterns to addresses, `normalise` gives an address its one written form,
`check_text` refuses what is none, `split_bucket` takes it apart. All are pure, but that `normalise`
asks for the working directory when it meets a relative path, unless it is given.

The brace language is the shell's, as WebDataset users know it: ``{a,b}``, ``{000..127}`` (padded to
the wider end), ``{0..100..10}``, ``{a..e}``, any number of them, nested. Stricter than the shell,
because a wrong pattern must not become a wrong dataset: an empty or reversed range, an empty or
one-word brace, and a brace without its partner are errors. A backslash makes the next character
literal.
"""

from __future__ import annotations

import itertools
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpufeed.cachefs.errors import UsageError

# How many addresses one request may stand for; the largest public datasets have some 100,000.
EXPANSION_MAX = 2_000_000
# Digits of a number in a range: none of them stands for so many addresses.
DIGITS_MAX = 18
# How deep braces may nest.
NESTING_MAX = 16

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_LETTERS = re.compile(r"([a-z])\.\.([a-z])|([A-Z])\.\.([A-Z])")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET_SCHEMES = frozenset(("oss", "s3", "gs", "gcs", "az", "abfs", "cos", "obs", "tos"))


@dataclass(frozen=True, slots=True)
class _Choice:
    """A brace: one of `options`, each a sequence of parts."""

    options: tuple[tuple[_Part, ...], ...]


@dataclass(frozen=True, slots=True)
class _Range:
    """``{first..last..step}``, written `width` digits wide."""

    numbers: range
    width: int


_Part = str | _Choice | _Range


def expand(urls: str | Sequence[str]) -> list[str]:
    """All addresses that the patterns stand for, in order.

    Raises:
        UsageError: no address at all, a malformed pattern, or more than `EXPANSION_MAX` addresses.
    """
    patterns = [urls] if isinstance(urls, str) else list(urls)
    if not patterns:
        raise UsageError("no address given: an empty list of shards; name at least one")
    parsed = []
    total = 0
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UsageError(f"an address is {pattern!r}, not a string")
        if not pattern.strip():
            raise UsageError(
                "an address is empty; write for example oss://bucket/train-{00..99}.tar"
            )
        parts = _Parser(pattern).parse()
        total += _count(parts)
        if total > EXPANSION_MAX:
            raise UsageError(
                f"{pattern!r} brings the number of addresses to {total}; the limit is "
                f"{EXPANSION_MAX}"
            )
        parsed.append(parts)
    return [url for parts in parsed for url in _expansions(parts)]


def normalise(url: str, *, working_directory: str | None = None) -> str:
    """The one written form of an address.

    A path without a scheme becomes ``file:///absolute/path``; ``~/`` is the home directory. A
    scheme is lower case. Keys of object stores stay as they are, character for character. A
    trailing ``/`` (a prefix) is kept.

    Raises:
        UsageError: empty, no text, or ``file://`` with a path that is not absolute.
    """
    if not url.strip() or "\0" in url:
        raise UsageError(f"{url!r} is not an address; write oss://bucket/key or a path")
    check_text(url)
    match = _ADDRESS.fullmatch(url)
    if match is None:
        path = posixpath.expanduser(url)
        path = posixpath.join(working_directory or os.getcwd(), path)
        return "file://" + _clean_path(path)
    scheme, rest = match.group(1).lower(), match.group(2)
    if scheme != "file":
        return f"{scheme}://{rest}"
    if not rest.startswith("/"):
        raise UsageError(
            f"{url!r} is not an absolute path; write file:///{rest} or, relative to the working "
            f"directory, just {rest or '.'}"
        )
    return "file://" + _clean_path(rest)


def check_text(url: str) -> None:
    """Names of files may be any bytes, which Python shows as lone surrogates; addresses are text.

    Raises:
        UsageError: the address has a character that is none.
    """
    try:
        url.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{url!a} has a name that is not UTF-8 (at character {error.start + 1}): rename it"
        ) from None


def split_bucket(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and key of an address.

    ``oss://bucket/a/b`` is ``("oss", "bucket", "a/b")``; ``file:///a/b`` and a plain path are
    ``("file", "", "/a/b")``; of any other scheme the part up to the first ``/`` is the bucket. The
    key of a whole bucket is empty.

    Raises:
        UsageError: an object store's address without a bucket.
    """
    match = _ADDRESS.fullmatch(url)
    if match is None:
        return "file", "", url
    scheme, rest = match.group(1).lower(), match.group(2)
    if scheme == "file":
        return scheme, "", rest
    bucket, _, key = rest.partition("/")
    if not bucket and scheme in _BUCKET_SCHEMES:
        raise UsageError(f"{url!r} names no bucket; write {scheme}://bucket/key")
    return scheme, bucket, key


def _clean_path(path: str) -> str:
    clean = posixpath.normpath(path)
    if clean.startswith("//"):  # POSIX keeps two leading slashes; Linux gives them no meaning
        clean = clean[1:]
    return clean + "/" if path.endswith("/") and clean != "/" else clean


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def parse(self) -> tuple[_Part, ...]:
        parts = self._sequence(0)
        if self._at < len(self._pattern):
            raise self._error("has a '}' without its '{'")
        return parts

    def _error(self, what: str) -> UsageError:
        return UsageError(
            f"pattern {self._pattern!r} {what} (at character {self._at + 1}); write a literal "
            r"brace as \{ or \}"
        )

    def _sequence(self, depth: int) -> tuple[_Part, ...]:
        """Parts up to the end, or, within a brace, up to its ``,`` or ``}``."""
        parts: list[_Part] = []
        text: list[str] = []
        while self._at < len(self._pattern):
            char = self._pattern[self._at]
            if char == "}" or (char == "," and depth):
                break
            if char == "{":
                parts.append("".join(text))
                text = []
                parts.append(self._brace(depth + 1))
                continue
            if char == "\\" and self._at + 1 < len(self._pattern):
                self._at += 1
                char = self._pattern[self._at]
            text.append(char)
            self._at += 1
        parts.append("".join(text))
        return tuple(part for part in parts if part != "")

    def _brace(self, depth: int) -> _Part:
        if depth > NESTING_MAX:
            raise self._error(f"nests braces deeper than {NESTING_MAX}")
        begin = self._at
        self._at += 1
        options = []
        while True:
            option_begin = self._at
            options.append(self._sequence(depth))
            if self._at >= len(self._pattern):
                self._at = begin
                raise self._error("has a '{' without its '}'")
            closed = self._pattern[self._at] == "}"
            option = self._pattern[option_begin : self._at]
            self._at += 1
            if closed:
                break
        if len(options) > 1:
            return _Choice(tuple(options))
        return self._range(option, begin)

    def _range(self, body: str, begin: int) -> _Part:
        """A brace without a comma: a range of numbers or letters."""
        if match := _LETTERS.fullmatch(body):
            first, last = (ord(end) for end in match.groups() if end)
            if first <= last:
                return _Choice(tuple((chr(code),) for code in range(first, last + 1)))
        elif match := _RANGE.fullmatch(body):
            ends = match.groups()[:2]
            if max(map(len, (number for number in match.groups() if number))) > DIGITS_MAX:
                self._at = begin
                raise self._error(f"has a range of numbers longer than {DIGITS_MAX} digits")
            first, last, step = int(ends[0]), int(ends[1]), int(match.group(3) or 1)
            if step < 1:
                self._at = begin
                raise self._error(f"has a step of {step}; it must be at least 1")
            padded = any(len(end.lstrip("-")) > 1 and end.lstrip("-")[0] == "0" for end in ends)
            if first <= last:
                width = max(len(end) for end in ends) if padded else 0
                return _Range(range(first, last + 1, step), width)
        self._at = begin
        if match:
            raise self._error(f"has the range {{{body}}}, whose end lies before its start")
        what = f"has the brace {{{body}}}, which is neither a list {{a,b}} nor a range {{000..127}}"
        raise self._error(what)


def _count(parts: tuple[_Part, ...]) -> int:
    """How many addresses `parts` stands for, without making them."""
    count = 1
    for part in parts:
        if isinstance(part, _Range):
            count *= len(part.numbers)
        elif isinstance(part, _Choice):
            count *= sum(_count(option) for option in part.options)
    return count


def _texts(part: _Part) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, _Range):
        for number in part.numbers:
            yield str(number).zfill(part.width)
    else:
        for option in part.options:
            yield from _expansions(option)


def _expansions(parts: tuple[_Part, ...]) -> Iterator[str]:
    # The last brace varies fastest, as in the shell.
    return map("".join, itertools.product(*(list(_texts(part)) for part in parts)))
