"""The buckets: folders under a root, objects as files, with etag and CRC-64 as OSS has them.

Checksums are computed when first needed and kept as long as the file's time and size stay, so files
may also be put there from outside. A key is its path; keys that no path can express (``a//b``,
``../x``, a trailing slash, components over 255 bytes) lie percent-encoded in a folder of their own.

Blocking and not thread-safe: called from the server's loop, which is a test tool's.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass
from urllib.parse import quote, unquote

from gpufeed.cachefs import checksum
from gpufeed.cachefs.testing.standin.replies import OssError, no_such_bucket, no_such_key
from gpufeed.cachefs.units import MIB

_ODD = "\x01odd"
_ODD_MARK = "="
_TEMPORARY = "\x01tmp"
_NAME_BYTES_MAX = 255
KEY_BYTES_MAX = 1023


@dataclass(frozen=True, slots=True)
class Stored:
    """One object, as stored."""

    path: str
    size_bytes: int
    etag: str
    crc64: int
    modified_s: float


def is_bucket_name(name: str) -> bool:
    """OSS's rule for bucket names."""
    return (
        3 <= len(name) <= 63
        and all(c.islower() or c.isdigit() or c == "-" for c in name)
        and name[0] != "-"
        and name[-1] != "-"
    )


class Buckets:
    """All buckets under `root`."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        # By path: inode, time and size, which tell a file from its successor; and the object.
        self._known: dict[str, tuple[tuple[int, int, int], Stored]] = {}
        self._etags: dict[str, str] = {}
        self._versions: dict[str, int] = {}

    def names(self) -> list[str]:
        """All buckets."""
        with os.scandir(self.root) as entries:
            return sorted(e.name for e in entries if e.is_dir() and is_bucket_name(e.name))

    def require(self, bucket: str) -> str:
        """The bucket's folder.

        Raises:
            OssError: there is none.
        """
        path = os.path.join(self.root, bucket)
        if not is_bucket_name(bucket) or not os.path.isdir(path):
            raise no_such_bucket(bucket)
        return path

    def path(self, bucket: str, key: str) -> str:
        """Where an object lies or would lie."""
        if not key or len(key.encode()) > KEY_BYTES_MAX or "\0" in key:
            raise OssError(
                400, "InvalidObjectName", f"The object name {key!r} is invalid.", "0016-00000001"
            )
        parts = key.split("/")
        plain = all(
            part not in ("", ".", "..") and len(part.encode()) <= _NAME_BYTES_MAX for part in parts
        )
        if plain and parts[0] not in (_ODD, _TEMPORARY):
            return os.path.join(self.root, bucket, *parts)
        coded = quote(key, safe="")
        # The mark keeps a piece from being "." or "..", which no quoting changes.
        pieces = [_ODD_MARK + coded[i : i + 200] for i in range(0, len(coded), 200)]
        return os.path.join(self.root, bucket, _ODD, *pieces)

    def find(self, bucket: str, key: str) -> Stored:
        """An object.

        Raises:
            OssError: no such bucket or key.
        """
        path = self.path(bucket, key)
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            self.require(bucket)
            raise no_such_key(key) from None
        if not stat.S_ISREG(found.st_mode):
            raise no_such_key(key)
        known = self._known.get(path)
        identity = (found.st_ino, found.st_mtime_ns, found.st_size)
        if known is not None and known[0] == identity:
            return known[1]
        etag, crc = _checksums(path)
        version = self._versions.get(path, 0)
        if version:
            etag = f"{etag[:24]}{version:08X}"
        etag = self._etags.get(path, etag)
        stored = Stored(path, found.st_size, etag, crc, found.st_mtime)
        self._known[path] = (identity, stored)
        return stored

    def change_version(self, bucket: str, key: str) -> None:
        """Give the object another etag, as if it had been overwritten with the same bytes."""
        path = self.path(bucket, key)
        self._versions[path] = self._versions.get(path, 0) + 1
        self._known.pop(path, None)
        self._etags.pop(path, None)

    def put(self, bucket: str, key: str, data: bytes, etag: str = "") -> Stored:
        """Store an object; `etag` if it is not the MD5."""
        folder = self.require(bucket)
        path = self.path(bucket, key)
        temporary_folder = os.path.join(folder, _TEMPORARY)
        os.makedirs(temporary_folder, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=temporary_folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.rename(temporary, path)
        except OSError as error:
            os.unlink(temporary)
            if isinstance(error, IsADirectoryError | NotADirectoryError | FileExistsError):
                raise OssError(
                    409, "FileAlreadyExists", f"A key and a folder would share a name: {error}"
                ) from None
            raise
        self._known.pop(path, None)
        self._etags.pop(path, None)
        if etag:
            self._etags[path] = etag
        return self.find(bucket, key)

    def copied(self, source: str) -> bytes:
        """What a CopyObject request names as its source: ``/bucket/key``, percent-encoded.

        Raises:
            OssError: no such bucket or key.
        """
        bucket, _, key = unquote(source.lstrip("/")).partition("/")
        with open(self.find(bucket, key).path, "rb") as file:
            return file.read()

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object; a missing one is fine."""
        folder = self.require(bucket)
        path = self.path(bucket, key)
        try:
            os.unlink(path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return
        self._known.pop(path, None)
        parent = os.path.dirname(path)
        # A prefix without objects does not exist.
        while parent != folder and not os.listdir(parent):
            os.rmdir(parent)
            parent = os.path.dirname(parent)

    def keys(self, bucket: str) -> list[str]:
        """All keys of a bucket, in the order of OSS (by UTF-8 bytes)."""
        folder = self.require(bucket)
        keys = []
        for directory, folders, files in os.walk(folder):
            if directory == folder and _TEMPORARY in folders:
                folders.remove(_TEMPORARY)
            inside = os.path.relpath(directory, folder)
            odd = inside == _ODD or inside.startswith(_ODD + os.sep)
            for name in files:
                path = name if inside == "." else f"{inside}/{name}"
                if odd:
                    path = unquote(path.removeprefix(_ODD).replace("/" + _ODD_MARK, ""))
                keys.append(path)
        return sorted(keys, key=str.encode)

    def prepare(self) -> int:
        """Compute every checksum now; returns how many objects there are."""
        count = 0
        for bucket in self.names():
            for key in self.keys(bucket):
                self.find(bucket, key)
                count += 1
        return count


def _checksums(path: str) -> tuple[str, int]:
    md5 = hashlib.md5(usedforsecurity=False)
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(4 * MIB):
            md5.update(piece)
            crc = checksum.crc64(piece, crc)
    return md5.hexdigest().upper(), crc
