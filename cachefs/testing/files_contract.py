"""What every `gpufeed.cachefs.store.files.Files` must do. Subclass it and give `files` and `place`.

::

    class TestDisk(FilesContract):
        @pytest.fixture
        def files(self): return DiskFiles()
        @pytest.fixture
        def place(self, tmp_path): return tmp_path
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpufeed.cachefs.errors import StorageError
from gpufeed.cachefs.store.files import AlignedBuffer, Files
from gpufeed.cachefs.units import BLOCK_BYTES, MIB


class FilesContract:
    """Tests; `files` is under test, `place` is an empty directory on the disk to test."""

    def test_what_was_written_is_read_back(self, files: Files, place: Path) -> None:
        """Whole blocks at any aligned place, in any order."""
        data = os.urandom(3 * BLOCK_BYTES)
        descriptor = files.create(str(place / "a"), 4 * BLOCK_BYTES)
        for block in (2, 0, 1):
            piece = AlignedBuffer(data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
            files.write(descriptor, piece.view, block * BLOCK_BYTES)
            piece.close()
        files.sync(descriptor)
        files.close(descriptor)

        assert (place / "a").read_bytes() == data + bytes(BLOCK_BYTES)
        descriptor = files.open(str(place / "a"))
        target = AlignedBuffer.empty(2 * BLOCK_BYTES)
        assert files.read(descriptor, target.view, BLOCK_BYTES) == 2 * BLOCK_BYTES
        assert bytes(target.view) == data[BLOCK_BYTES:]
        files.close(descriptor)
        target.close()

    def test_a_write_may_be_large_and_extend_the_file(self, files: Files, place: Path) -> None:
        """A trailer lies behind what was preallocated."""
        data = os.urandom(5 * MIB)
        descriptor = files.create(str(place / "a"), BLOCK_BYTES)
        buffer = AlignedBuffer(data)
        files.write(descriptor, buffer.view, BLOCK_BYTES)
        files.close(descriptor)
        buffer.close()

        assert (place / "a").read_bytes()[BLOCK_BYTES:] == data

    def test_a_read_ends_at_the_end_of_the_file(self, files: Files, place: Path) -> None:
        """It tells how much it found; nothing beyond is touched."""
        (place / "a").write_bytes(b"x" * (BLOCK_BYTES + 100))
        descriptor = files.open(str(place / "a"))
        target = AlignedBuffer.empty(4 * BLOCK_BYTES)

        assert files.read(descriptor, target.view, 0) == BLOCK_BYTES + 100
        assert files.read(descriptor, target.view, 2 * BLOCK_BYTES) == 0
        assert bytes(target.view[2 * BLOCK_BYTES :]) == bytes(2 * BLOCK_BYTES)
        files.close(descriptor)
        target.close()

    def test_memory_off_the_page_works_if_more_slowly(self, files: Files, place: Path) -> None:
        """Only direct transfers need alignment; they fall back."""
        descriptor = files.create(str(place / "a"), BLOCK_BYTES)
        files.write(descriptor, memoryview(bytearray(b"y" * (BLOCK_BYTES + 1)))[1:], 0)
        files.close(descriptor)

        assert (place / "a").read_bytes() == b"y" * BLOCK_BYTES

    def test_a_new_file_is_private_preallocated_and_never_an_old_one(
        self, files: Files, place: Path
    ) -> None:
        """The room is taken when the file is made, not when it is written."""
        path = place / "a"
        files.close(files.create(str(path), 64 * BLOCK_BYTES))

        status = path.stat()
        assert status.st_size == 64 * BLOCK_BYTES
        assert status.st_blocks * 512 >= 64 * BLOCK_BYTES
        assert status.st_mode & 0o777 == 0o600
        with pytest.raises(StorageError, match="EEXIST"):
            files.create(str(path), BLOCK_BYTES)

    def test_a_file_without_room_is_refused_and_not_left(self, files: Files, place: Path) -> None:
        """Preallocation is where a full disk shows."""
        with pytest.raises(StorageError, match=r"ENOSPC|EFBIG"):
            files.create(str(place / "a"), 1 << 46)

        assert list(place.iterdir()) == []

    def test_publishing_replaces_and_removing_tolerates_absence(
        self, files: Files, place: Path
    ) -> None:
        """A rename is atomic; an unlink may be repeated."""
        (place / "new").write_bytes(b"new")
        (place / "old").write_bytes(b"old")

        files.publish(str(place / "new"), str(place / "old"))

        assert (place / "old").read_bytes() == b"new"
        files.remove(str(place / "old"))
        files.remove(str(place / "old"))
        assert list(place.iterdir()) == []

    def test_refusals_are_storage_errors_with_their_cause(self, files: Files, place: Path) -> None:
        """One class; the errno is kept for who must tell a shortage from a sick disk."""
        missing = str(place / "missing")
        for call in (
            lambda: files.open(missing),
            lambda: files.publish(missing, missing),
            lambda: files.space(missing),
            lambda: files.create(str(place / "no" / "where"), BLOCK_BYTES),
        ):
            with pytest.raises(StorageError, match="ENOENT") as caught:
                call()
            assert isinstance(caught.value.__cause__, OSError)

    def test_space_is_what_the_file_system_says(self, files: Files, place: Path) -> None:
        """Free bytes for us, and all bytes."""
        space = files.space(str(place))

        assert 0 < space.free_bytes <= space.total_bytes
