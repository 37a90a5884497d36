"""Compressed tars through a real daemon and the loader: the same samples as the plain tar's."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys

import pytest
import zstandard
from node import Node, make_samples, read_all, tar_of, wait_until_gone

from gpufeed.cachefs.client import DatasetRequest, Session
from gpufeed.cachefs.errors import IntegrityError, UsageError
from gpufeed.cachefs.testing.pytest_plugin import BUCKET

SHARDS = 3
PACK = {
    "tar.gz": lambda data: gzip.compress(data, 1),
    "tgz": lambda data: gzip.compress(data[:99_999], 1) + gzip.compress(data[99_999:], 1),
    "tar.zst": zstandard.ZstdCompressor().compress,
}
SCRIPT = """
import hashlib, sys
from gpufeed.loaders import DataLoader, ShardDataset

def decode(sample):
    return {"key": sample["__key__"], "sum": hashlib.sha256(sample["jpg"]).hexdigest()}

dataset = ShardDataset(sys.argv[1], decode=decode, daemon=sys.argv[2])
loader = DataLoader(dataset, batch_size=16, num_workers=2)
for _ in range(2):
    for batch in loader:
        for key, digest in zip(batch["key"], batch["sum"]):
            print(key, digest)
    print("end")
loader.close()
"""


def put_packed(node: Node, extension: str) -> dict[str, dict[str, bytes]]:
    everything: dict[str, dict[str, bytes]] = {}
    for i in range(SHARDS):
        samples = make_samples(60, i)
        path = node.bucket / f"train-{i:03d}.{extension}"
        path.write_bytes(PACK[extension](tar_of(samples)))
        everything |= samples
    return everything


def pattern(extension: str) -> str:
    return f"oss://{BUCKET}/train-{{000..{SHARDS - 1:03d}}}.{extension}"


def settle(node: Node) -> None:
    while node.status()["fills_in_flight"]:
        pass


@pytest.mark.parametrize("extension", PACK)
def test_the_second_epoch_neither_fetches_nor_decompresses_and_a_restart_neither(
    node: Node, extension: str
) -> None:
    samples = put_packed(node, extension)
    request = DatasetRequest(urls=(pattern(extension),))
    process = node.start()
    with Session.connect(node.socket) as session:
        dataset = session.open_dataset(request)
        assert dataset.kind == "tar"
        assert read_all(session, dataset, [2, 0, 1]) == samples
        settle(node)
        expanded = node.status()["decompressed_bytes_total"]
        sizes = [shard.size_bytes for shard in session.open_dataset(request).shards]
        node.standin.reset()
        assert read_all(session, dataset, [1, 2, 0]) == samples
        assert node.standin.counters()["requests"] == 0
        assert node.status()["decompressed_bytes_total"] == expanded == sum(sizes)
    wait_until_gone(node)
    assert node.stop(process) == 0

    process = node.start()
    with Session.connect(node.socket) as session:
        dataset = session.open_dataset(request)
        assert [shard.size_bytes for shard in dataset.shards] == sizes
        assert [shard.sample_count for shard in dataset.shards] == [60] * SHARDS
        assert read_all(session, dataset, range(SHARDS)) == samples
        assert node.status()["decompressed_bytes_total"] == 0
    wait_until_gone(node)
    assert node.stop(process) == 0


@pytest.mark.parametrize("extension", ["tar.gz", "tar.zst"])
def test_without_a_store_each_epoch_streams(node: Node, extension: str) -> None:
    samples = put_packed(node, extension)
    process = node.start(GPUFEED_STORE_PATH="")
    with Session.connect(node.socket) as session:
        dataset = session.open_dataset(DatasetRequest(urls=(pattern(extension),)))
        for order in ([2, 0, 1], [0, 1, 2]):
            assert read_all(session, dataset, order) == samples
    wait_until_gone(node)
    assert node.stop(process) == 0


@pytest.mark.parametrize("extension", ["tar.gz", "tar.zst"])
def test_the_loader_gives_the_samples_of_the_plain_tar(node: Node, extension: str) -> None:
    samples = put_packed(node, extension)
    process = node.start()
    script = node.place / "train.py"
    script.write_text(SCRIPT)

    done = subprocess.run(
        [sys.executable, str(script), pattern(extension), node.socket],
        check=False, env=node.environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    expected = {key: hashlib.sha256(one["jpg"]).hexdigest() for key, one in samples.items()}
    first, second, rest = done.stdout.split("end\n")
    for epoch in (first, second):
        assert dict(line.split() for line in epoch.splitlines()) == expected
    assert rest == ""
    assert node.stop(process) == 0


def test_a_cut_archive_is_one_clear_error_and_the_next_shard_is_served(node: Node) -> None:
    samples = put_packed(node, "tar.gz")
    cut = node.bucket / "train-001.tar.gz"
    cut.write_bytes(cut.read_bytes()[:-1000])
    process = node.start()
    with Session.connect(node.socket) as session:
        dataset = session.open_dataset(DatasetRequest(urls=(pattern("tar.gz"),)))
        with pytest.raises(IntegrityError, match=r"train-001\.tar\.gz: byte .* cut off"):
            read_all(session, dataset, [1])
    with Session.connect(node.socket) as session:
        dataset = session.open_dataset(DatasetRequest(urls=(pattern("tar.gz"),)))
        found = read_all(session, dataset, [0, 2])
        assert found == {key: one for key, one in samples.items() if not key.startswith("01")}
    wait_until_gone(node)
    assert node.stop(process) == 0


def test_decompressing_can_be_turned_off(node: Node) -> None:
    put_packed(node, "tgz")
    process = node.start(GPUFEED_STORE_DECOMPRESS="false")
    with Session.connect(node.socket) as session, pytest.raises(UsageError, match="decompress"):
        session.open_dataset(DatasetRequest(urls=(pattern("tgz"),)))
    assert node.stop(process) == 0
