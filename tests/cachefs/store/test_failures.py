"""Every disk call fails once, in turn: nothing is left, and the accounts are right."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from store_rig import Rig

from gpufeed.cachefs.errors import IntegrityError, StorageError
from gpufeed.cachefs.store import parts
from gpufeed.cachefs.store.files import DiskFiles
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.testing.faulty_files import FaultyFiles
from gpufeed.cachefs.testing.shards import content, make_spec
from gpufeed.cachefs.units import KIB

CALLS_MAX = 60


def index_on(files: FaultyFiles) -> type[Index]:
    """An index whose transactions count among the calls of `files`, and fail in their turn."""

    class FaultyIndex(Index):
        def put(self, entries):
            files._call(super().put, list(entries))

        def put_uses(self, uses):
            files._call(super().put_uses, uses)

        def delete(self, digests):
            files._call(super().delete, list(digests))

        def mark_clean(self):
            files._call(super().mark_clean)

    return FaultyIndex


@pytest.mark.parametrize("happens_anyway", [False, True])
async def test_any_failing_call_of_a_fill_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens_anyway: bool
) -> None:
    spec = make_spec(1)
    for n in range(1, CALLS_MAX):
        files = FaultyFiles(DiskFiles(), happens_anyway=happens_anyway)
        monkeypatch.setattr(parts, "Index", index_on(files))
        rig = Rig(tmp_path / str(n), files=files)
        calls_before = files.calls_count
        files.fail_at = calls_before + n
        with contextlib.suppress(StorageError):
            await rig.fill(spec)
        failed = files.calls_count >= files.fail_at
        await rig.close()
        monkeypatch.setattr(parts, "Index", Index)
        rig = Rig(tmp_path / str(n))
        rig.check()
        if rig.holds(spec):
            assert await rig.read(spec) == content(spec)
        await rig.close()
        if not failed:
            assert n > 7
            return
    pytest.fail(f"the fill never got through in {CALLS_MAX} calls")


@pytest.mark.parametrize("happens_anyway", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_any_failing_call_of_a_busy_life_keeps_the_accounts_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens_anyway: bool
) -> None:
    specs = [make_spec(n) for n in range(3)]
    for n in range(1, 3 * CALLS_MAX):
        files = FaultyFiles(DiskFiles(), happens_anyway=happens_anyway)
        monkeypatch.setattr(parts, "Index", index_on(files))
        rig = Rig(tmp_path / str(n), capacity_bytes=450 * KIB, files=files)
        files.fail_at = files.calls_count + n
        for spec in specs:
            # The third evicts one; each is read at once; some are read when they are gone.
            with contextlib.suppress(StorageError):
                await rig.fill(spec)
            rig.check_limit()
            with contextlib.suppress(IntegrityError):
                assert await rig.read(spec) == content(spec)
            rig.check_limit()
            rig.clock.advance(31)
        await rig.close()
        if files.calls_count < files.fail_at:
            assert n > 20
            return
    pytest.fail("the scenario never got through")


@pytest.mark.parametrize("happens_anyway", [False, True])
async def test_any_failing_call_of_a_start_is_clear_or_harmless(
    tmp_path: Path, happens_anyway: bool
) -> None:
    spec = make_spec(1)
    for n in range(1, CALLS_MAX):
        path = tmp_path / str(n)
        rig = Rig(path)
        await rig.fill(spec)
        await rig.close()
        (path / "index" / "data.mdb").unlink()
        files = FaultyFiles(DiskFiles(), fail_at=n, happens_anyway=happens_anyway)
        try:
            rig = Rig(path, files=files)
        except StorageError:
            rig = Rig(path)
        if rig.holds(spec):
            with contextlib.suppress(IntegrityError):
                assert await rig.read(spec) == content(spec)
        await rig.close()
        if files.calls_count < n:
            assert n > 4
            return
    pytest.fail("the start never got through")
