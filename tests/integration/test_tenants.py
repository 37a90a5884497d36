"""Two tenants on one daemon: each reads what its own credentials may, once fetched for both."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
from node import Node, read_all, wait_until_gone

from gpufeed.cachefs import calls
from gpufeed.cachefs.client import DatasetRequest, Session
from gpufeed.cachefs.errors import AccessDeniedError, CapacityError
from gpufeed.cachefs.fs import GpufeedFileSystem
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, SECRET
from gpufeed.cachefs.testing.standin.config import AccessKey

RED, BLUE = "red-" + "r" * 32, "blue-" + "b" * 32
SHARDS = 3
BY_NAME = DatasetRequest(urls=(f"oss://{BUCKET}/train-{{000..{SHARDS - 1:03d}}}.tar",))
BY_PREFIX = DatasetRequest(urls=(f"oss://{BUCKET}/",))


class Shared(Node):
    """A node whose daemon serves the tenants red and blue."""

    def configure(self, red: str = "", blue: str = "", more: str = "") -> None:
        for name, token in (("red", RED), ("blue", BLUE)):
            (self.place / name).write_text(token + "\n")
        self.config = self.place / "gpufeed.toml"
        self.config.write_text(
            f"""
            [tenants.red]
            token_file = "{self.place}/red"
            key = "red-key"
            secret = "red-secret"
            {red}
            [tenants.blue]
            token_file = "{self.place}/blue"
            key = "blue-key"
            secret = "blue-secret"
            {blue}
            {more}
            """
        )

    def environment(self, **extra: str) -> dict[str, str]:
        return {
            **super().environment(), "GPUFEED_CONFIG": str(self.config),
            "GPUFEED_ARENA_SIZE_BYTES": "32MiB", **extra,
        }  # fmt: skip

    def session(self, token: str | None) -> Session:
        return Session.connect(self.socket, token=token)


@pytest.fixture
def shared(oss_standin_factory):
    """`make(blue_reads)` gives a node; red may read everything."""
    made = []

    def make(blue_reads: tuple[str, ...] | None) -> Shared:
        standin = oss_standin_factory(
            keys=(
                AccessKey(KEY, SECRET),
                AccessKey("red-key", "red-secret"),
                AccessKey("blue-key", "blue-secret", reads=blue_reads),
            )
        )
        node = Shared(standin, Path(tempfile.mkdtemp(prefix="gt-")))
        node.configure()
        made.append(node)
        return node

    yield make
    for node in made:
        node.close()
        shutil.rmtree(node.place)


def settled(node: Shared) -> dict[str, float]:
    """The status when every fill has committed; looks for at most 20 s."""
    deadline_s = time.monotonic() + 20
    status = node.status()
    while status["fills_in_flight"] and time.monotonic() < deadline_s:
        status = node.status()
    assert status["fills_in_flight"] == 0
    return status


def counts(dataset) -> list[int | None]:
    return [shard.sample_count for shard in dataset.shards]


def tar_bytes(node: Shared) -> int:
    """What the origin has sent of shards."""
    by_key = node.standin.counters()["by_key"]
    return sum(key["bytes"] for name, key in by_key.items() if name.endswith(".tar"))


def train(session: Session, request: DatasetRequest) -> dict[str, dict[str, bytes]]:
    dataset = session.open_dataset(request)
    return read_all(session, dataset, range(SHARDS))


def test_what_one_tenant_has_cached_is_not_served_to_one_that_may_not_read_it(shared) -> None:
    node = shared(("nothing-of-that/",))
    samples = node.put_tars(SHARDS, 8)
    process = node.start()
    with node.session(RED) as red:
        dataset = red.open_dataset(BY_PREFIX)
        assert read_all(red, dataset, range(SHARDS)) == samples
        settled(node)
        assert counts(red.open_dataset(BY_PREFIX)) == [8] * SHARDS

    with node.session(BLUE) as blue, pytest.raises(AccessDeniedError):
        blue.open_dataset(BY_NAME)
    with node.session(BLUE) as blue:
        # Its policy lets it list: that is no right to read.
        listed = blue.open_dataset(BY_PREFIX)
        assert counts(listed) == [None] * SHARDS, "how many samples there are is not told either"
        with pytest.raises(AccessDeniedError, match=r"train-000\.tar is cached, but this tenant's"):
            read_all(blue, listed, [0])
    with node.session(BLUE) as blue, pytest.raises(AccessDeniedError):
        blue.index_dataset(blue.open_dataset(BY_PREFIX))

    status = node.status()
    assert status["access_refused_total"] >= 2
    assert status["tenant_copied_bytes_total"] == 0
    wait_until_gone(node)
    assert node.stop(process) == 0


def test_files_of_the_cache_ask_for_the_same_right(shared, monkeypatch) -> None:
    node = shared(("nothing-of-that/",))
    (node.bucket / "file.bin").write_bytes(b"secret" * 100_000)
    process = node.start()
    monkeypatch.setenv("GPUFEED_DAEMON", node.socket)
    for token, may in ((RED, True), (BLUE, False)):
        monkeypatch.setenv("GPUFEED_TOKEN", token)
        GpufeedFileSystem.clear_instance_cache()
        calls.close_shared()
        fs = GpufeedFileSystem()
        if may:
            assert fs.cat_file(f"oss://{BUCKET}/file.bin") == b"secret" * 100_000
        else:
            with pytest.raises(PermissionError):
                fs.cat_file(f"oss://{BUCKET}/file.bin")
    calls.close_shared()
    GpufeedFileSystem.clear_instance_cache()
    assert node.stop(process) == 0


@pytest.mark.parametrize("request_", [BY_NAME, BY_PREFIX], ids=["by name", "by prefix"])
def test_with_the_right_it_comes_from_the_store_into_memory_of_its_own(shared, request_) -> None:
    node = shared((f"{BUCKET}/",))
    samples = node.put_tars(SHARDS, 8)
    process = node.start()
    with node.session(RED) as red, node.session(BLUE) as blue:
        assert train(red, request_) == samples
        settled(node)
        fetched = tar_bytes(node)

        assert train(blue, request_) == samples

        assert tar_bytes(node) == fetched
        heads = node.standin.counters()["requests_by_kind"].get("head", 0)
        assert heads == (2 * SHARDS if request_ is BY_NAME else SHARDS)
        inodes = {os.fstat(session.arena_fd).st_ino for session in (red, blue)}
        assert len(inodes) == 2
        assert red.arena_bytes == blue.arena_bytes == 16 * 1024 * 1024
    wait_until_gone(node)
    assert node.stop(process) == 0


def test_neither_arena_holds_a_byte_of_what_only_the_other_read(shared) -> None:
    node = shared((f"{BUCKET}/",))
    node.put_tars(SHARDS, 8)
    (node.bucket / "red.bin").write_bytes(b"only red reads this " * 50_000)
    process = node.start()
    red_only = DatasetRequest(urls=(f"oss://{BUCKET}/red.bin",), kind="loose")
    with node.session(RED) as red, node.session(BLUE) as blue:
        dataset = red.open_dataset(red_only)
        assert read_all(red, dataset, [0])
        assert train(blue, BY_NAME)
        assert b"only red reads this" in bytes(red.arena())
        assert b"only red reads this" not in bytes(blue.arena())
    assert node.stop(process) == 0


def test_both_at_once_make_one_fetch(shared) -> None:
    node = shared((f"{BUCKET}/",))
    samples = node.put_tars(SHARDS, 40)
    size = sum(path.stat().st_size for path in node.bucket.glob("*.tar"))
    process = node.start()
    node.standin.set_scenario({"first_byte_ms": 200, "mb_per_s_per_connection": 4})
    found: dict[str, object] = {}
    begin = threading.Barrier(2)

    def run(token: str) -> None:
        with node.session(token) as session:
            dataset = session.open_dataset(BY_NAME)
            begin.wait()
            found[token] = read_all(session, dataset, range(SHARDS))

    threads = [threading.Thread(target=run, args=(token,)) for token in (RED, BLUE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found[RED] == found[BLUE] == samples
    status = settled(node)
    assert status["origin_bytes_total"] == size
    assert status["tenant_copied_bytes_total"] > 0
    wait_until_gone(node)
    assert node.stop(process) == 0


def test_a_tenant_that_stands_still_does_not_hold_up_the_other(shared) -> None:
    node = shared((f"{BUCKET}/",))
    samples = node.put_tars(SHARDS, 200)
    process = node.start()
    node.standin.set_scenario({"first_byte_ms": 50})
    with node.session(BLUE) as still, node.session(RED) as red:
        # Its plan is published as far as its window goes; nothing ever comes back.
        still.extend_plan(still.open_dataset(BY_NAME), range(SHARDS))
        assert train(red, BY_NAME) == samples
    wait_until_gone(node)
    assert node.stop(process) == 0


def test_who_is_nobodys_is_told_what_to_set_and_tokens_are_replaced_while_it_runs(shared) -> None:
    node = shared(None)
    process = node.start()
    with pytest.raises(AccessDeniedError, match="GPUFEED_TOKEN"):
        node.session(None)
    with pytest.raises(AccessDeniedError, match="of no tenant"):
        node.session("red-" + "x" * 32)
    with node.session(RED):
        rotated = node.place / "new"
        rotated.write_text("next-" + "n" * 32 + "\n")
        os.replace(rotated, node.place / "red")
        with pytest.raises(AccessDeniedError, match="of no tenant"):
            node.session(RED)
        node.session("next-" + "n" * 32).close()
        node.session(BLUE).close()
    wait_until_gone(node)
    process.terminate()
    _, log = process.communicate(timeout=30)
    assert RED.encode() not in log
    assert b"next-" not in log


def test_a_socket_of_its_own_says_who_comes(shared) -> None:
    node = shared(None)
    own = node.place / "red-door"
    own.mkdir()
    node.config.write_text(
        f"""
        [daemon]
        socket_mode = "0666"
        [tenants.red]
        socket_path = "{own}/s"
        allow = ["oss://{BUCKET}/red/"]
        sessions_max = 1
        [tenants.blue]
        token_file = "{node.place}/blue"
        """
    )
    process = node.start()
    assert stat.S_IMODE(os.stat(f"{own}/s").st_mode) == 0o666
    with Session.connect(f"{own}/s") as red:
        with pytest.raises(AccessDeniedError, match=r"tenants\.red\.allow"):
            red.open_dataset(DatasetRequest(urls=(f"oss://{BUCKET}/train-000.tar",)))
        with pytest.raises(CapacityError, match="sessions_max"):
            Session.connect(f"{own}/s")
        node.session(BLUE).close()
    with pytest.raises(AccessDeniedError, match="GPUFEED_TOKEN"):
        node.session(None)
    assert node.stop(process) == 0
    assert not os.path.exists(f"{own}/s")


def test_a_tenants_quota_holds_and_the_other_keeps_what_it_has(shared) -> None:
    node = shared((f"{BUCKET}/",))
    node.put_tars(6, 24)
    size = (node.bucket / "train-000.tar").stat().st_size
    quota = 2 * (size + 80_000)
    node.configure(red=f"quota_bytes = {quota}")
    process = node.start()
    with node.session(RED) as red:
        first = DatasetRequest(urls=(f"oss://{BUCKET}/train-{{000..003}}.tar",))
        dataset = red.open_dataset(first)
        assert read_all(red, dataset, range(4))
        held = settled(node)["store_resident_bytes"]
        assert 0 < held <= quota
    with node.session(BLUE) as blue:
        rest = DatasetRequest(urls=(f"oss://{BUCKET}/train-{{004..005}}.tar",))
        dataset = blue.open_dataset(rest)
        assert read_all(blue, dataset, range(2))
        assert settled(node)["store_resident_shards"] == 4
    assert node.stop(process) == 0


def test_a_forged_object_is_not_served_for_the_real_one(shared, oss_standin_factory, tmp_path):
    """Red has a server of its own, where the same address has other bytes under the same etag."""
    node = shared((f"{BUCKET}/",))
    samples = node.put_tars(SHARDS, 8)
    forged_root = tmp_path / "forged"
    (forged_root / BUCKET).mkdir(parents=True)
    for path in node.bucket.glob("*.tar"):
        data = bytearray(path.read_bytes())
        (forged_root / BUCKET / path.name).write_bytes(bytes(data))
    hostile = oss_standin_factory(root=str(forged_root), keys=(AccessKey("red-key", "red-secret"),))
    there = DatasetRequest(urls=BY_NAME.urls, storage_options={"endpoint": hostile.endpoint})
    process = node.start()
    with node.session(RED) as red, pytest.raises(AccessDeniedError, match=r"daemon\.endpoints"):
        red.open_dataset(there)
    assert hostile.counters()["requests"] == 0
    assert node.stop(process) == 0

    # Where the operator lets it be asked, it is another object.
    process = node.start(GPUFEED_DAEMON_ENDPOINTS=hostile.endpoint)
    with node.session(RED) as red, node.session(BLUE) as blue:
        dataset = red.open_dataset(there)
        assert read_all(red, dataset, range(SHARDS)) == samples
        settled(node)
        node.standin.reset()
        assert train(blue, BY_NAME) == samples
        assert node.standin.counters()["bytes"] > 0, "what came from elsewhere is not its bytes"
    assert node.stop(process) == 0
