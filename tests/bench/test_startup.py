"""`cachebench startup`: a made-up cache is one that real daemons serve from."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from gpufeed.bench import cli
from gpufeed.bench.startup import measure
from gpufeed.bench.startup.filler import add_shards, set_clean
from gpufeed.cachefs.store.directory import CacheDirectory
from gpufeed.cachefs.store.files import DiskFiles
from gpufeed.cachefs.store.index import Index
from gpufeed.cachefs.store.recovery import reconcile


def test_what_the_filler_makes_is_found_by_a_start_after_any_end(tmp_path: Path) -> None:
    add_shards(tmp_path, 50, 4096)
    for is_clean in (True, False):
        set_clean(tmp_path, is_clean)
        directory = CacheDirectory(str(tmp_path), DiskFiles())
        directory.open()
        index = Index(directory.index_path)
        assert index.is_clean is is_clean
        found = reconcile(directory, index, DiskFiles())
        assert len(set(found.digests)) == 50
        assert sorted(found.heads["last_use"]) == list(range(1, 51))
        index.close()
        directory.close()


@pytest.mark.slow
def test_daemons_over_it_serve_their_one_real_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    # The page cache is the whole machine's; a socket's path has 107 bytes.
    monkeypatch.setattr(measure, "_drop_page_cache", lambda: False)
    place = Path(tempfile.mkdtemp(prefix="gs-"))
    try:
        command = ["startup", "--shards", "200", "--repeats", "1", "--work-dir", str(place)]
        assert cli.main([*command, "--json", str(place / "result.json")]) == 0
        result = json.loads((place / "result.json").read_text())
        assert [path.name for path in place.iterdir()] == ["result.json"]
    finally:
        shutil.rmtree(place)

    assert result["cold_starts"] == "not allowed here"
    assert [(start["cold"], start["clean"]) for start in result["starts"]] == [
        (False, True), (False, False),
    ]  # fmt: skip
    for start in result["starts"]:
        assert 0 < start["ready_s"] < start["served_s"]
        assert start["from_store_bytes"] > 16 << 20
