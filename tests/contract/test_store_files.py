"""The disk adapter on the file systems at hand."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufeed.cachefs.store import files as store_files
from gpufeed.cachefs.store.files import DiskFiles, Files
from gpufeed.cachefs.testing.faulty_files import FaultyFiles
from gpufeed.cachefs.testing.files_contract import FilesContract

SHM = "/dev/shm"


class TestOnDisk(FilesContract):
    @pytest.fixture
    def files(self) -> Files:
        return DiskFiles()

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path


class TestInMemory(TestOnDisk):
    @pytest.fixture
    def place(self) -> Iterator[Path]:
        if not os.access(SHM, os.W_OK):
            pytest.skip(f"{SHM} is not writable here")
        place = tempfile.mkdtemp(dir=SHM, prefix="gpufeed-files-")
        yield Path(place)
        shutil.rmtree(place)


class TestWhereDirectTransfersAreRefused(TestOnDisk):
    """As on file systems whose `open` does not know `O_DIRECT`; it may have made the file."""

    @pytest.fixture
    def files(self, monkeypatch: pytest.MonkeyPatch) -> Files:
        real_open = os.open

        def refusing(path, flags, *args, **kwargs):
            if flags & os.O_DIRECT:
                if flags & os.O_CREAT:
                    os.close(real_open(path, flags & ~os.O_DIRECT, *args, **kwargs))
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            return real_open(path, flags, *args, **kwargs)

        monkeypatch.setattr(store_files.os, "open", refusing)
        return DiskFiles()


class TestWhereNothingCanBePreallocated(TestOnDisk):
    @pytest.fixture
    def files(self, monkeypatch: pytest.MonkeyPatch) -> Files:
        def refusing(descriptor, offset, length):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr(store_files.os, "posix_fallocate", refusing)
        return DiskFiles()

    @pytest.mark.skip(reason="without preallocation a full disk shows when it is written")
    def test_a_file_without_room_is_refused_and_not_left(self, files, place) -> None:
        """Not here."""

    @pytest.mark.skip(reason="without preallocation the room is taken when it is written")
    def test_a_new_file_is_private_preallocated_and_never_an_old_one(self, files, place) -> None:
        """Not here."""


class TestTheFaultyOneAtRest(TestOnDisk):
    @pytest.fixture
    def files(self) -> Files:
        return FaultyFiles(DiskFiles())


def test_direct_transfers_are_used_where_the_disk_can(tmp_path: Path) -> None:
    import fcntl

    files = DiskFiles()
    descriptor = files.create(str(tmp_path / "a"), 4096)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    files.close(descriptor)
    probe = os.open(tmp_path / "b", os.O_CREAT | os.O_WRONLY)
    os.close(probe)
    try:
        os.close(os.open(tmp_path / "b", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("no O_DIRECT on the file system of the temporary directory")
    assert flags & os.O_DIRECT
