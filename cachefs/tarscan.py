"""Finds the samples of a tar shard while its bytes stream by.

Owns the reading of tar headers (`TarScanner`), the grouping of members to samples by the rules of
WebDataset (`SampleGrouper`), and both behind one door for the daemon (`TarIndexer`). Only headers
are looked at: the body of a member is stepped over without touching it, so indexing costs some
microseconds a member and nothing a megabyte.

Understood: ustar, old V7, GNU long names (types ``L`` and ``K``), pax (``path`` and ``size``, of
one member or global), base-256 sizes. Directories, links and devices are stepped over. Refused, by
name: sparse members (their bytes in the tar are not the bytes of the file) and compressed tars.

Every header's checksum is verified. An archive ends at its first block of zeros, as tar itself and
WebDataset see it, or at the end of the object if that is where a member ends.

Invariants: pieces come in order and without gaps; a sample is complete when the next one begins or
the archive ends, so all its bytes lie below `TarIndexer.position_bytes`; after an error the same
error is raised again, and what was complete before it can still be taken.

Pure: no I/O. Not thread-safe.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from gpufeed.cachefs.errors import CorruptSampleError
from gpufeed.cachefs.sampleindex import SampleIndex, SampleIndexBuilder

BLOCK_BYTES = 512
# The longest name or pax header that is read. Linux paths end at 4 KiB; pax headers carry ACLs.
EXTENDED_HEADER_BYTES_MAX = 1 << 20

_ZERO_BLOCK = bytes(BLOCK_BYTES)
_REGULAR = frozenset((b"0", b"\0", b"7"))
# Links, devices, directories and FIFOs have no body, whatever their size field says.
_BODILESS = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))
_LONG_NAME = b"L"
_LONG_LINK = b"K"
_PAX = frozenset((b"x", b"X"))
_PAX_GLOBAL = b"g"
_EXTENDED = frozenset((_LONG_NAME, _LONG_LINK, _PAX_GLOBAL)) | _PAX
_SPARSE = b"S"
_GNU_MAGIC = b"ustar  \0"
_COMPRESSED = {
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd",
}  # fmt: skip
_SIGNED = struct.Struct("148b8x356b")
# name, size and what ends it, checksum and what ends it, type, first byte of the prefix
_PLAIN = struct.Struct("100s24x11sc12x6sc1xc188xc")
_NUMBER_ENDS = (b"\0", b" ")
_PAX_RECORD = re.compile(rb"(\d+) ([^=]+)=")

# The key of a member's name and its field, as WebDataset splits them: at the first dot of the last
# path component. A last component that begins with a dot gives its directory as the key.
_KEY_AND_FIELD = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
# Members under a first path component such as ``__meta__`` describe the shard, not a sample.
_SHARD_META = re.compile(r"__[^/]*__($|/)")
# Fields that WebDataset itself puts into each sample.
_RESERVED_FIELDS = ("__key__", "__url__")
_BAD_MARK = "__bad__"
_UNPACK_HINT = "name it .tar.gz or .tar.zst if it is one, or store it as a plain tar"


class TarMember(NamedTuple):
    """A regular file of a tar: its name and its bytes ``[offset, offset + size)`` in the tar."""

    name: str
    offset_bytes: int
    size_bytes: int


def _number(field: bytes) -> int:
    """An octal field, or base-256 for what octal cannot hold. Raises ValueError."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    value = int(field.partition(b"\0")[0].strip() or b"0", 8)
    if value < 0:
        raise ValueError(f"{value} is negative")
    return value


def _compression(begin: bytes | bytearray) -> str:
    return next((name for magic, name in _COMPRESSED.items() if begin.startswith(magic)), "")


class TarScanner:
    """Turns contiguous pieces of a tar into its regular members.

    `name` names the shard in errors. `ended` says that the archive's end mark was met; bytes after
    it are passed over.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.position_bytes = 0
        self.ended = False
        self._next_bytes = 0  # where the block that we want next begins
        self._want_bytes = BLOCK_BYTES
        self._kind = b""  # type of the extended header whose body is wanted; b"" = a header
        self._body_bytes = 0  # its length without padding
        self._partial = bytearray()
        self._pending: dict[str, str] = {}  # what extended headers say of the next member
        self._global: dict[str, str] = {}
        self._last_name = ""
        self._error: CorruptSampleError | None = None

    def feed(self, data: memoryview | bytes, offset_bytes: int) -> Iterator[TarMember]:
        """Yield the members whose headers end in this piece. Exhaust it before the next call.

        Args:
            data: the next bytes of the tar.
            offset_bytes: where they lie; the end of the last piece.

        Raises:
            CorruptSampleError: not a tar, a header that does not check, or a sparse member.
        """
        if self._error is not None:
            raise self._error
        assert offset_bytes == self.position_bytes, (offset_bytes, self.position_bytes)
        view = memoryview(data)
        length = len(view)
        self.position_bytes = offset_bytes + length
        partial = self._partial
        while not self.ended:
            begin = self._next_bytes + len(partial) - offset_bytes
            end = self._next_bytes + self._want_bytes - offset_bytes
            if begin >= length:
                return
            if end > length:
                partial += view[begin:]
                return
            if not (partial or self._kind or self._pending or self._global):
                plain = self._plain(view, begin)
                if plain is not None:
                    yield plain
                    continue
            block = bytes(view[begin:end])
            if partial:
                block = bytes(partial) + block
                partial.clear()
            if self._kind:
                self._extended(block)
            elif (member := self._header(block)) is not None:
                yield member

    def finish(self, size_bytes: int) -> None:
        """Say that the tar ends here, at `size_bytes`.

        Raises:
            CorruptSampleError: it ends within a member or a header, or is empty.
        """
        if self._error is not None:
            raise self._error
        assert size_bytes == self.position_bytes, (size_bytes, self.position_bytes)
        if self.ended:
            return
        if size_bytes == 0:
            raise self._fail(0, "the shard is empty (0 bytes); a tar has at least one block")
        if self._next_bytes == 0 and (packing := _compression(self._partial)):
            raise self._fail(0, f"the shard is compressed ({packing}); {_UNPACK_HINT}")
        if self._next_bytes > size_bytes:
            raise self._fail(
                size_bytes,
                f"truncated: member {self._last_name!r} needs bytes up to {self._next_bytes}, the "
                f"shard ends at {size_bytes}",
            )
        if self._partial or self._kind or self._pending:
            raise self._fail(self._next_bytes, "truncated: the shard ends within a header")

    def _fail(self, at_bytes: int, what: str) -> CorruptSampleError:
        self._error = CorruptSampleError(f"{self.name}: offset {at_bytes}: {what}")
        return self._error

    def _plain(self, view: memoryview, begin: int) -> TarMember | None:
        """A regular file's header as nearly all are; None: it wants a closer look.

        A fill sees thousands a second, so what most of them share costs half as much here.
        """
        name, size, size_end, want, want_end, kind, prefix = _PLAIN.unpack_from(view, begin)
        if kind != b"0" or prefix != b"\0":
            return None
        if size_end not in _NUMBER_ENDS or want_end not in _NUMBER_ENDS:
            return None
        half, end = begin + BLOCK_BYTES // 2, begin + BLOCK_BYTES
        # See `_check`; its own field counts as eight spaces.
        have = (
            (zlib.adler32(view[begin:half]) & 0xFFFF) + (zlib.adler32(view[half:end]) & 0xFFFF)
            - 2 + 8 * 0x20 - sum(view[begin + 148 : begin + 156])
        )  # fmt: skip
        try:
            size_bytes = int(size, 8)
            if have != int(want, 8) or size_bytes < 0:
                return None
        except ValueError:
            return None
        body_at = self._next_bytes + BLOCK_BYTES
        self._next_bytes = body_at + (size_bytes + 511 & -512)
        self._last_name = name.partition(b"\0")[0].decode(errors="surrogateescape")
        return TarMember(self._last_name, body_at, size_bytes)

    def _header(self, block: bytes) -> TarMember | None:
        at = self._next_bytes
        if block == _ZERO_BLOCK:
            if self._pending:
                raise self._fail(at, "the archive ends between a long name and its member")
            self.ended = True
            return None
        self._check(block, at)
        kind = block[156:157]
        try:
            size_bytes = _number(block[124:136])
        except ValueError as error:
            raise self._fail(at, f"a header's size field is wrong: {error}") from None
        body_at = at + BLOCK_BYTES
        if kind in _EXTENDED:
            self._begin_extended(kind, size_bytes, at)
            return None
        name = self._member_name(block, kind)
        if self._pending or self._global:
            size_bytes, name = self._overrides(size_bytes, name, at)
        self._last_name = name
        if kind in _BODILESS or (kind == b"\0" and name.endswith("/")):
            self._next_bytes = body_at
            return None
        self._next_bytes = body_at + (size_bytes + 511 & -512)
        if kind in _REGULAR:
            return TarMember(name, body_at, size_bytes)
        if kind == _SPARSE:
            raise self._sparse(name, at)
        return None  # a kind that nobody knows is stepped over with its body, as tar does

    def _check(self, block: bytes, at: int) -> None:
        """Verify the checksum: the sum of all bytes, those of its own field taken as spaces."""
        try:
            want = _number(block[148:156])
        except ValueError:
            want = -1
        # Adler's low half is one plus the sum modulo 65521: exact for 256 bytes, and 20 times as
        # fast as summing in Python.
        have = (
            (zlib.adler32(block[:148] + b"        ") & 0xFFFF)
            + (zlib.adler32(block[156:384]) & 0xFFFF)
            + (zlib.adler32(block[384:]) & 0xFFFF)
            - 3
        )
        if have == want:
            return
        # Some old tars summed signed bytes.
        if sum(_SIGNED.unpack(block)) + 256 != want:
            raise self._fail(at, self._not_a_header(block, have))

    def _not_a_header(self, block: bytes, have: int) -> str:
        if self._next_bytes == 0:
            if packing := _compression(block):
                return f"the shard is compressed ({packing}); {_UNPACK_HINT}"
            return "the shard is not a tar: its first block is not a header"
        field = block[148:156].strip(b"\0 ").decode(errors="replace")
        return (
            f"a header's checksum field is {field!r}, its bytes sum to {have:o} (octal); the shard "
            f"is damaged after member {self._last_name!r}"
        )

    def _member_name(self, block: bytes, kind: bytes) -> str:
        name = block[:100].partition(b"\0")[0]
        # GNU keeps times where ustar keeps the prefix.
        if block[345] and block[257:265] != _GNU_MAGIC and kind != _SPARSE:
            name = block[345:500].partition(b"\0")[0] + b"/" + name
        return name.decode(errors="surrogateescape")

    def _begin_extended(self, kind: bytes, size_bytes: int, at: int) -> None:
        if size_bytes > EXTENDED_HEADER_BYTES_MAX:
            raise self._fail(
                at, f"an extended header of {size_bytes} bytes; the limit is "
                f"{EXTENDED_HEADER_BYTES_MAX}",
            )  # fmt: skip
        self._next_bytes = at + BLOCK_BYTES
        if size_bytes == 0:
            return
        self._kind = kind
        self._body_bytes = size_bytes
        self._want_bytes = size_bytes + 511 & -512

    def _extended(self, block: bytes) -> None:
        kind, body, at = self._kind, block[: self._body_bytes], self._next_bytes
        self._next_bytes += self._want_bytes
        self._kind = b""
        self._want_bytes = BLOCK_BYTES
        if kind == _LONG_NAME:
            name = body.partition(b"\0")[0].decode(errors="surrogateescape")
            self._pending.setdefault("path", name)
        elif kind == _PAX_GLOBAL:
            self._global.update(self._pax(body, at))
        elif kind in _PAX:
            for key, value in self._pax(body, at).items():
                self._pending.setdefault(key, value)

    def _pax(self, body: bytes, at: int) -> dict[str, str]:
        """The records ``<length> <keyword>=<value>`` that we need, each ended by a newline."""
        found: dict[str, str] = {}
        begin = 0
        while (match := _PAX_RECORD.match(body, begin)) is not None:
            length = int(match.group(1))
            if length <= match.end() - begin or begin + length > len(body):
                raise self._fail(at, f"a pax record claims {length} bytes")
            keyword = match.group(2)
            value = body[match.end() : begin + length - 1].decode(errors="surrogateescape")
            if keyword == b"path":
                found["path"] = value.rstrip("/")
            elif keyword == b"size":
                found["size"] = value
            elif keyword.startswith(b"GNU.sparse."):
                found["sparse"] = value
            begin += length
        return found

    def _overrides(self, size_bytes: int, name: str, at: int) -> tuple[int, str]:
        said = {**self._global, **self._pending}
        self._pending.clear()
        name = said.get("path", name)
        if "sparse" in said:
            raise self._sparse(name, at)
        if "size" in said:
            text = said["size"]
            if not (text.isascii() and text.isdigit()):
                raise self._fail(at, f"a pax header gives {text!r} as the size of {name!r}")
            size_bytes = int(text)
        return size_bytes, name

    def _sparse(self, name: str, at: int) -> CorruptSampleError:
        return self._fail(
            at, f"member {name!r} is sparse: its bytes are not laid out in the tar; pack it "
            "without --sparse",
        )  # fmt: skip


class SampleGrouper:
    """Groups members to samples as WebDataset does, into `builder`.

    Neighbouring members of one key are one sample. The key is the path up to the first dot of its
    last component, the field is what follows, in lower case (``"a/7.Seg.PNG"`` is field
    ``"seg.png"`` of ``"a/7"``). Members without a dot, and members under ``__name__``, belong to no
    sample. A field that a sample already has is an error.
    """

    def __init__(self, name: str, builder: SampleIndexBuilder) -> None:
        self._name = name
        self._builder = builder
        self._key: str | None = None
        self._begin = "\0"  # no name begins so
        self._fields: dict[str, None] = {}  # in order
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self._bad = False
        self.sample_count = 0

    def add(self, name: str, offset_bytes: int, size_bytes: int) -> None:
        """Take the next member; a sample that it ends goes to the builder.

        Raises:
            CorruptSampleError: the sample has this field already.
        """
        field = name[len(self._begin) :] if name.startswith(self._begin) else ""
        if not field or "/" in field or name.startswith("__"):
            # Not the next field of the sample under way, or perhaps not.
            if name.startswith("__") and _SHARD_META.match(name):
                return
            begin = name.rfind("/") + 1
            dot = name.find(".", begin)
            if dot > begin and "\n" not in name:
                # What the pattern below finds, at a third of its cost.
                key, field = name[:dot], name[dot + 1 :]
            else:
                match = _KEY_AND_FIELD.match(name)
                if match is None:
                    return
                key, field = match.groups()
            if key != self._key:
                self.flush()
                self._key = key
                self._begin = f"{key}."
        field = field.lower()
        if field in self._fields or field in _RESERVED_FIELDS:
            raise CorruptSampleError(
                f"{self._name}: offset {offset_bytes}: sample {self._key!r} has field {field!r} "
                f"twice (member {name!r}); fields are told apart in lower case"
            )
        self._fields[field] = None
        self._offsets.append(offset_bytes)
        self._sizes.append(size_bytes)
        if field == _BAD_MARK and size_bytes:
            self._bad = True

    def flush(self) -> None:
        """The archive ends: the sample under way is complete."""
        if self._key is not None and not self._bad:
            self._builder.add_columns(self._key, self._fields, self._offsets, self._sizes)
            self.sample_count += 1
        self._key = None
        self._begin = "\0"
        self._bad = False
        self._fields.clear()
        self._offsets.clear()
        self._sizes.clear()


class TarIndexer:
    """Feed a shard's bytes in order, take the samples as they complete."""

    def __init__(self, shard_name: str) -> None:
        self._scanner = TarScanner(shard_name)
        self._builder = SampleIndexBuilder()
        self._grouper = SampleGrouper(shard_name, self._builder)
        self._error: CorruptSampleError | None = None

    @property
    def sample_count(self) -> int:
        """Samples complete so far, taken or not."""
        return self._grouper.sample_count

    @property
    def position_bytes(self) -> int:
        """Bytes fed so far."""
        return self._scanner.position_bytes

    def feed(self, view: memoryview) -> None:
        """Scan the next contiguous bytes.

        Raises:
            CorruptSampleError: the tar is broken here; see `TarScanner.feed`. Raised again by every
                later call.
        """
        if self._error is not None:
            raise self._error
        add = self._grouper.add
        try:
            for name, offset_bytes, size_bytes in self._scanner.feed(view, self.position_bytes):
                add(name, offset_bytes, size_bytes)
        except CorruptSampleError as error:
            self._error = error
            raise
        if self._scanner.ended:
            self._grouper.flush()

    def take(self) -> SampleIndex | None:
        """The samples completed since the last call, or None.

        All their bytes lie below `position_bytes`.
        """
        return self._builder.build(clear=True) if len(self._builder) else None

    def finish(self) -> None:
        """The shard ends here; the last sample is complete.

        Raises:
            CorruptSampleError: the shard is truncated.
        """
        if self._error is not None:
            raise self._error
        try:
            self._scanner.finish(self.position_bytes)
        except CorruptSampleError as error:
            self._error = error
            raise
        self._grouper.flush()
