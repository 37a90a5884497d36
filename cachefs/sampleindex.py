"""Where each sample of a shard lies: a compact, append-only index of members and samples.

A **member** is one field of one sample: its name and its bytes ``[offset, offset + size)`` within
the shard. Members of one sample are neighbours. The index is four columns and a blob of names, so
that a million samples are a few numpy arrays rather than a million objects.

Encoded form (little-endian), pinned by a test; used on the session socket in pieces and, whole,
in the store::

    magic "GFIX", version u16, reserved u16, sample_count u32, member_count u32,
    names_bytes u32, keys_bytes u32
    sample_key_end  u32[sample_count]     end of each sample's key in the key blob
    sample_first    u32[sample_count]     its first member
    member_offset   u64[member_count]
    member_size     u64[member_count]
    member_ext_end  u32[member_count]     end of each member's extension in the extension blob
    key blob (keys_bytes), extension blob (the rest of names_bytes)

Pure: no I/O. `SampleIndexBuilder` is not thread-safe; a finished `SampleIndex` is immutable.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpufeed.cachefs.errors import ProtocolError

MAGIC = b"GFIX"
VERSION = 1
# Names are UTF-8, but tars written elsewhere hold other bytes; they come back as they went in.
_NAME_ERRORS = "surrogateescape"
_HEADER = struct.Struct("<4sHHIIII")


# Tuples: a fill makes one for every member that streams by, and a frozen dataclass takes half as
# long again to make (0.66 against 0.46 microseconds).
class Member(NamedTuple):
    """One field of one sample. `ext` is its name without the key and the dot (``"jpg"``)."""

    ext: str
    offset_bytes: int
    size_bytes: int


class SampleRef(NamedTuple):
    """One sample: its key and its members, in the order of the shard."""

    key: str
    members: tuple[Member, ...]


class SampleIndex:
    """An immutable run of samples. ``len()`` is their number; ``index[i]`` is a `SampleRef`."""

    __slots__ = ("_ext_end", "_exts", "_first", "_key_end", "_keys", "_offset", "_size")

    def __init__(
        self,
        *,
        key_end: npt.NDArray[np.uint32],
        first: npt.NDArray[np.uint32],
        offset: npt.NDArray[np.uint64],
        size: npt.NDArray[np.uint64],
        ext_end: npt.NDArray[np.uint32],
        blobs: tuple[bytes, bytes],
    ) -> None:
        self._key_end = key_end
        self._first = first
        self._offset = offset
        self._size = size
        self._ext_end = ext_end
        self._keys, self._exts = blobs

    def __len__(self) -> int:
        return len(self._key_end)

    def __getitem__(self, position: int) -> SampleRef:
        count = len(self)
        if not 0 <= position < count:
            raise IndexError(f"sample {position} of {count}")
        key_begin = int(self._key_end[position - 1]) if position else 0
        key = self._keys[key_begin : int(self._key_end[position])].decode(errors=_NAME_ERRORS)
        begin = int(self._first[position])
        end = int(self._first[position + 1]) if position + 1 < count else len(self._offset)
        members = []
        ext_begin = int(self._ext_end[begin - 1]) if begin else 0
        for row in range(begin, end):
            ext_end = int(self._ext_end[row])
            ext = self._exts[ext_begin:ext_end].decode(errors=_NAME_ERRORS)
            members.append(Member(ext, int(self._offset[row]), int(self._size[row])))
            ext_begin = ext_end
        return SampleRef(key, tuple(members))

    def __iter__(self) -> Iterator[SampleRef]:
        return (self[i] for i in range(len(self)))

    @property
    def nbytes(self) -> int:
        """Length of the encoded form."""
        names = len(self._keys) + len(self._exts)
        return _HEADER.size + 8 * len(self) + 20 * len(self._offset) + names

    def ends(self) -> npt.NDArray[np.uint64]:
        """For each sample, the offset just past the last of its bytes, in the shard. ``[n]``."""
        if not len(self):
            return np.zeros(0, dtype=np.uint64)
        return np.maximum.reduceat(self._offset + self._size, self._first)

    def slice(self, begin: int, end: int) -> SampleIndex:
        """Samples ``[begin, end)`` as an index of their own; offsets stay those of the shard."""
        count = len(self)
        assert 0 <= begin <= end <= count, (begin, end, count)
        member_begin = int(self._first[begin]) if begin < count else len(self._offset)
        member_end = int(self._first[end]) if end < count else len(self._offset)
        key_base = int(self._key_end[begin - 1]) if begin else 0
        key_stop = int(self._key_end[end - 1]) if end else 0
        ext_base = int(self._ext_end[member_begin - 1]) if member_begin else 0
        ext_stop = int(self._ext_end[member_end - 1]) if member_end else 0
        return SampleIndex(
            key_end=self._key_end[begin:end] - np.uint32(key_base),
            first=self._first[begin:end] - np.uint32(member_begin),
            offset=self._offset[member_begin:member_end],
            size=self._size[member_begin:member_end],
            ext_end=self._ext_end[member_begin:member_end] - np.uint32(ext_base),
            blobs=(self._keys[key_base:key_stop], self._exts[ext_base:ext_stop]),
        )

    def encode(self) -> bytes:
        """The encoded form (see the top of the file)."""
        header = _HEADER.pack(
            MAGIC, VERSION, 0, len(self), len(self._offset),
            len(self._keys) + len(self._exts), len(self._keys),
        )  # fmt: skip
        columns = (self._key_end, self._first, self._offset, self._size, self._ext_end)
        return b"".join((header, *(c.tobytes() for c in columns), self._keys, self._exts))

    @classmethod
    def decode(cls, data: bytes | memoryview) -> SampleIndex:
        """Read the encoded form.

        Raises:
            ProtocolError: wrong magic, version or length.
        """
        view = memoryview(data)
        if len(view) < _HEADER.size:
            raise ProtocolError(f"sample index of {len(view)} bytes, under {_HEADER.size}")
        magic, version, _, samples, members, names, keys = _HEADER.unpack_from(view)
        if magic != MAGIC or version != VERSION:
            raise ProtocolError(f"sample index magic {magic!r} version {version}, want {VERSION}")
        want = _HEADER.size + 8 * samples + 20 * members + names
        if len(view) != want or keys > names:
            raise ProtocolError(f"sample index has {len(view)} bytes, its header says {want}")
        at = _HEADER.size
        columns = []
        for dtype, count in (("<u4", samples), ("<u4", samples), ("<u8", members),
                             ("<u8", members), ("<u4", members)):  # fmt: skip
            column = np.frombuffer(view, dtype=dtype, count=count, offset=at)
            columns.append(column)
            at += column.nbytes
        blobs = (bytes(view[at : at + keys]), bytes(view[at + keys :]))
        return cls(
            key_end=columns[0], first=columns[1], offset=columns[2], size=columns[3],
            ext_end=columns[4], blobs=blobs,
        )  # fmt: skip


class SampleIndexBuilder:
    """Collects samples; `build` makes the index of those since the last `build(clear=True)`."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._keys = bytearray()
        self._exts = bytearray()
        self._key_end: list[int] = []
        self._first: list[int] = []
        self._offset: list[int] = []
        self._size: list[int] = []
        self._ext_end: list[int] = []

    def __len__(self) -> int:
        return len(self._key_end)

    def add(self, key: str, members: Sequence[Member]) -> None:
        """Append one sample."""
        exts, offsets, sizes = zip(*members, strict=True) if members else ((), (), ())
        self.add_columns(key, exts, offsets, sizes)

    def add_columns(
        self, key: str, exts: Iterable[str], offsets: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Append one sample: its members' names, offsets and sizes, in the order of the shard."""
        self._keys += key.encode(errors=_NAME_ERRORS)
        self._key_end.append(len(self._keys))
        self._first.append(len(self._offset))
        self._offset += offsets
        self._size += sizes
        for ext in exts:
            self._exts += ext.encode(errors=_NAME_ERRORS)
            self._ext_end.append(len(self._exts))

    def extend(self, index: SampleIndex) -> None:
        """Append all samples of `index`, whole columns at a time."""
        keys, exts, members = len(self._keys), len(self._exts), len(self._offset)
        self._keys += index._keys
        self._exts += index._exts
        self._key_end += (index._key_end.astype(np.int64) + keys).tolist()
        self._first += (index._first.astype(np.int64) + members).tolist()
        self._ext_end += (index._ext_end.astype(np.int64) + exts).tolist()
        self._offset += index._offset.tolist()
        self._size += index._size.tolist()

    def build(self, *, clear: bool = False) -> SampleIndex:
        """The index of what was added."""
        index = SampleIndex(
            key_end=np.array(self._key_end, dtype="<u4"),
            first=np.array(self._first, dtype="<u4"),
            offset=np.array(self._offset, dtype="<u8"),
            size=np.array(self._size, dtype="<u8"),
            ext_end=np.array(self._ext_end, dtype="<u4"),
            blobs=(bytes(self._keys), bytes(self._exts)),
        )
        if clear:
            self._clear()
        return index
