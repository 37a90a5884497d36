"""Mounted file systems: links, files that change or go, servers that fail, parts side by side."""

from __future__ import annotations

import asyncio
import errno
import os
import threading

import pytest
from blockbuster import blockbuster_ctx

from gpufeed.cachefs.errors import (
    AccessDeniedError,
    IntegrityError,
    NotFoundError,
    OriginUnavailableError,
    ShardChangedError,
)
from gpufeed.cachefs.metrics import Metrics
from gpufeed.cachefs.origin import local
from gpufeed.cachefs.origin.local import LocalOrigin
from gpufeed.cachefs.testing.origin_contract import content

DATA = content(100_000)


@pytest.fixture
async def origin():
    origin = LocalOrigin(Metrics())
    yield origin
    await origin.close()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


async def names(origin: LocalOrigin, prefix: str) -> list[str]:
    return [
        info.url.removeprefix(f"file://{prefix}") async for info in origin.list(f"file://{prefix}")
    ]


async def read(origin: LocalOrigin, path, info=None) -> bytes:
    info = info or await origin.head(f"file://{path}")
    memory = bytearray(info.size_bytes)
    await origin.read_into(info, 0, [memoryview(memory)], lambda _: None)
    return bytes(memory)


class TestListing:
    async def test_links_to_files_and_directories_are_followed(self, origin, folder, tmp_path):
        elsewhere = tmp_path / "elsewhere"
        (elsewhere / "sub").mkdir(parents=True)
        (elsewhere / "sub" / "b").write_bytes(DATA)
        (folder / "a").write_bytes(b"x")
        (folder / "linked").symlink_to(elsewhere)
        (folder / "one").symlink_to(elsewhere / "sub" / "b")
        assert await names(origin, f"{folder}/") == ["a", "linked/sub/b", "one"]
        assert await read(origin, folder / "linked" / "sub" / "b") == DATA
        assert await read(origin, folder / "one") == DATA

    async def test_a_directory_that_leads_back_to_itself_is_entered_once(self, origin, folder):
        (folder / "d").mkdir()
        (folder / "d" / "a").write_bytes(b"x")
        (folder / "d" / "up").symlink_to(folder)
        (folder / "d" / "self").symlink_to(folder / "d")
        assert await names(origin, f"{folder}/") == ["d/a"]

    async def test_a_directory_linked_twice_is_there_twice(self, origin, folder, tmp_path):
        other = tmp_path / "other"
        other.mkdir()
        (other / "a").write_bytes(b"x")
        (folder / "p").symlink_to(other)
        (folder / "q").symlink_to(other)
        assert await names(origin, f"{folder}/") == ["p/a", "q/a"]

    @pytest.mark.parametrize("target", ["nothing", "itself"])
    async def test_a_link_to_nothing_is_told_and_not_left_out(self, origin, folder, target):
        (folder / "a").write_bytes(b"x")
        (folder / "itself").symlink_to(target)
        with pytest.raises(NotFoundError, match=f"itself is a link to {target}, where there is"):
            await names(origin, f"{folder}/")

    async def test_what_is_no_file_is_no_object(self, origin, folder):
        os.mkfifo(folder / "pipe")
        (folder / "a").write_bytes(b"x")
        assert await names(origin, f"{folder}/") == ["a"]

    async def test_a_directory_that_may_not_be_read_is_told(self, origin, folder, monkeypatch):
        (folder / "shut").mkdir()
        real = os.scandir

        def scandir(path):
            if str(path).endswith("shut"):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return real(path)

        monkeypatch.setattr(local.os, "scandir", scandir)
        with pytest.raises(AccessDeniedError, match="shut may not be read"):
            await names(origin, f"{folder}/")

    async def test_folders_beside_the_prefix_are_not_searched(self, origin, folder, monkeypatch):
        for name in ("train-0", "train-1/x", "test/x"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"x")
        searched = []
        real = os.scandir
        monkeypatch.setattr(local.os, "scandir", lambda p: (searched.append(p), real(p))[1])
        assert await names(origin, f"{folder}/train-") == ["0", "1/x"]
        assert searched == [str(folder), f"{folder}/train-1"]

    async def test_listing_and_looking_up_do_not_block_the_loop(self, origin, folder):
        (folder / "a").write_bytes(DATA)
        with blockbuster_ctx():
            assert await names(origin, f"{folder}/") == ["a"]
            assert await read(origin, folder / "a") == DATA


class TestReading:
    @pytest.fixture
    def path(self, folder):
        (folder / "a").write_bytes(DATA)
        return folder / "a"

    @pytest.fixture
    def reads(self, monkeypatch):
        """What the next reads do: an errno to fail with, or a function called before; then real."""
        script: list = []
        real = os.preadv

        def preadv(descriptor, places, at):
            step = script.pop(0) if script else None
            if isinstance(step, int):
                raise OSError(step, os.strerror(step))
            if step is not None:
                step()
            # In pieces, so that there is a between.
            return real(descriptor, [places[0][:30_000]], at)

        monkeypatch.setattr(local.os, "preadv", preadv)
        return script

    async def test_a_file_replaced_or_rewritten_while_it_is_read_is_told(self, origin, path, reads):
        info = await origin.head(f"file://{path}")
        reported: list[int] = []

        def rewrite() -> None:
            path.write_bytes(content(100_000, seed=1))
            os.utime(path, ns=(1, 1))

        reads += [None, rewrite]
        memory = bytearray(info.size_bytes)
        with pytest.raises(ShardChangedError, match=r"was replaced: it had version .*, now "):
            await origin.read_into(info, 0, [memoryview(memory)], reported.append)
        assert reported == []

    async def test_a_file_cut_short_while_it_is_read_is_told(self, origin, path, reads):
        reads += [None, lambda: os.truncate(path, 30_000)]
        with pytest.raises(ShardChangedError):
            await read(origin, path)

    async def test_a_file_removed_while_it_is_read_is_read_to_the_end(self, origin, path, reads):
        reads += [None, path.unlink]
        assert await read(origin, path) == DATA

    async def test_a_file_that_has_gone_is_not_found(self, origin, path):
        info = await origin.head(f"file://{path}")
        path.unlink()
        with pytest.raises(NotFoundError, match="does not exist"):
            await read(origin, path, info)

    async def test_a_file_that_ends_too_early_though_unchanged_is_told(self, origin, path):
        info = await origin.head(f"file://{path}")
        wrong = type(info)(info.url, info.size_bytes + 1, info.etag)
        with pytest.raises(IntegrityError, match="ends at byte 100000 of 100001"):
            await read(origin, path, wrong)

    async def test_a_forgotten_handle_is_opened_again_once(self, origin, path, reads):
        reads += [None, errno.ESTALE]
        assert await read(origin, path) == DATA
        reads += [errno.ESTALE, errno.ESTALE]
        with pytest.raises(OriginUnavailableError, match=r"Stale.*the mount and its server"):
            await read(origin, path)

    async def test_a_forgotten_handle_of_a_replaced_file_is_a_change(self, origin, path, reads):
        def replace() -> None:
            path.with_name("new").write_bytes(b"other")
            path.with_name("new").rename(path)
            raise OSError(errno.ESTALE, "Stale file handle")

        reads += [None, replace]
        with pytest.raises(ShardChangedError):
            await read(origin, path)

    @pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN])
    async def test_a_failing_disk_or_server_may_work_later(self, origin, path, reads, number):
        reads.append(number)
        with pytest.raises(OriginUnavailableError, match=os.strerror(number)):
            await read(origin, path)
        assert await read(origin, path) == DATA

    async def test_a_file_that_may_not_be_read_is_told(self, origin, path, monkeypatch):
        info = await origin.head(f"file://{path}")
        real = os.open

        def refuse(name, *rest, **named):
            if name == str(path):
                raise PermissionError(errno.EACCES, "Permission denied", name)
            return real(name, *rest, **named)

        monkeypatch.setattr(local.os, "open", refuse)
        with pytest.raises(AccessDeniedError, match="may not be read by this user"):
            await read(origin, path, info)

    async def test_no_descriptor_is_left(self, origin, path, reads):
        before = len(os.listdir("/proc/self/fd"))
        for script in ([errno.EIO], [errno.ESTALE], [errno.ESTALE, errno.ESTALE], [path.unlink]):
            reads[:] = script
            info = await origin.head(f"file://{path}")
            try:
                await read(origin, path, info)
            except OriginUnavailableError:
                continue
        with pytest.raises(NotFoundError):
            await read(origin, path, info)
        assert len(os.listdir("/proc/self/fd")) == before

    async def test_parts_are_read_side_by_side_and_not_on_the_loop(self, origin, path, reads):
        together = threading.Barrier(4)
        threads: set[int] = set()

        def meet() -> None:
            threads.add(threading.get_ident())
            together.wait(30)

        reads += [meet] * 4
        info = await origin.head(f"file://{path}")
        parts = [bytearray(25_000) for _ in range(4)]
        await asyncio.gather(
            *(
                origin.read_into(info, i * 25_000, [memoryview(part)], lambda _: None)
                for i, part in enumerate(parts)
            )
        )
        assert b"".join(parts) == DATA
        assert len(threads) == 4
        assert threading.get_ident() not in threads

    async def test_a_cancelled_read_ends_before_its_memory_is_given_back(self, origin, path, reads):
        begun, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            go_on.wait(30)

        reads.append(hold)
        reading = asyncio.create_task(read(origin, path))
        await asyncio.to_thread(begun.wait, 30)
        reading.cancel()
        await asyncio.sleep(0)
        assert not reading.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
