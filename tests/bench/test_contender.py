"""The contender's process: its messages, its checks, and a loader that lies."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from gpufeed.bench import contenders, demodata
from gpufeed.bench.contender import Reporter, read_spec, run, write_spec
from gpufeed.bench.contenders import ContenderSpec, Kind
from gpufeed.bench.demodata import DataSpec, ImageMaker
from gpufeed.bench.measure import Batch
from gpufeed.cachefs.errors import IntegrityError, UsageError


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    spec = DataSpec(sample_count=9, samples_per_shard=5)
    demodata.make_directories(root / "p" / "objects")
    maker = ImageMaker(spec.seed)
    records = []
    for shard in range(spec.shard_count):
        records += demodata.make_shard(maker, spec, shard, root / "p" / "objects")
    return demodata.finish(root / "p", root / "data", spec, records)


class Fake:
    """A loader that hands out the source's checksums; `spoil` may change what it hands out."""

    def __init__(self, data, spoil):
        self.data, self.spoil, self.closed = data, spoil, False

    def prepare(self):
        pass

    def epoch(self):
        indices = np.arange(len(self.data.samples), dtype=np.uint64)
        checksums = np.array([record.crc64 for record in self.data.samples], np.uint64)
        indices, checksums = self.spoil(indices, checksums)
        for at in range(0, len(indices), 4):
            yield Batch(None, indices[at : at + 4], checksums[at : at + 4])

    def close(self):
        self.closed = True


def spec_of(data, **fields):
    values = {
        "name": "fake",
        "phases": ("cold", "warm"),
        "data_root": str(data.root),
        "sample_count": 9,
        "batch_size": 4,
        "workers": 1,
        "step_s": 0.0,
    }
    return ContenderSpec(**(values | fields))


def run_fake(monkeypatch, data, spoil=lambda *arrays: arrays, **fields):
    fake = Fake(data, spoil)
    kind = Kind(lambda spec, loaded: fake, ("cold", "warm"), (), "a fake")
    monkeypatch.setitem(contenders.KINDS, "fake", kind)
    lines = []
    try:
        run(spec_of(data, **fields), Reporter(lines.append))
    finally:
        assert fake.closed
    return [json.loads(line) for line in lines]


def test_a_contender_reports_ready_progress_a_row_an_epoch_and_its_end(monkeypatch, data):
    messages = run_fake(monkeypatch, data)
    kinds = [message["type"] for message in messages]
    assert kinds[0] == "ready"
    assert kinds[-1] == "end"
    rows = [message["row"] for message in messages if message["type"] == "row"]
    assert [(row["phase"], row["samples"], row["steps"]) for row in rows] == [
        ("cold", 9, 3),
        ("warm", 9, 3),
    ]
    assert all(row["exactly_once"] and row["bytes_equal"] for row in rows)
    assert all(len(row["waits_ms"]) == len(row["computes_ms"]) == 3 for row in rows)
    assert any(message["type"] == "step" and message["total"] == 9 for message in messages)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda i, c: (i[:-1], c[:-1]), "1 missing"),
        (lambda i, c: (np.append(i, i[0]), np.append(c, c[0])), "1 repeated"),
        (lambda i, c: (i, c ^ np.uint64(1 << 63)), "9 with wrong bytes"),
    ],
)
def test_a_loader_that_loses_repeats_or_changes_samples_is_caught(
    monkeypatch, data, spoil, message
):
    with pytest.raises(IntegrityError, match=f"fake, cold epoch.*{message}"):
        run_fake(monkeypatch, data, spoil)


def test_a_spec_survives_its_file_and_only_we_may_read_it(tmp_path, data):
    spec = spec_of(data, origin={"endpoint": "http://127.0.0.1:1", "secret": "s"}, daemon_pid=5)
    path = tmp_path / "spec.json"
    write_spec(spec, path)
    assert read_spec(path) == spec
    assert path.stat().st_mode & 0o077 == 0


def test_unknown_contenders_are_refused():
    with pytest.raises(UsageError, match="there are loose-http"):
        contenders.kind_of("tfdata")


def test_the_slow_ones_get_a_seeded_choice_of_the_images(data):
    few = spec_of(data, sample_count=4, seed=1)
    chosen = contenders.chosen_indices(data, few)
    assert len(set(chosen)) == 4
    assert chosen == contenders.chosen_indices(data, few)
    others = [dataclasses.replace(few, seed=seed) for seed in range(2, 8)]
    assert any(contenders.chosen_indices(data, other) != chosen for other in others)
    assert contenders.chosen_indices(data, spec_of(data)) == list(range(9))


def test_local_files_through_torch_come_complete_and_equal(tmp_path, data):
    pytest.importorskip("torch")
    write_spec(
        spec_of(data, name="ceiling", phases=("warm",), batch_size=4, workers=0),
        tmp_path / "spec.json",
    )
    assert in_process(tmp_path / "spec.json")["type"] == "end"


def test_an_error_in_the_process_becomes_a_message_and_a_status(tmp_path, data):
    write_spec(spec_of(data, name="nobody"), tmp_path / "spec.json")
    message = in_process(tmp_path / "spec.json", status=2)
    assert (message["type"], message["class"]) == ("error", "UsageError")


def in_process(path, status=0):
    """Run the module as the runner does; returns its last message."""
    command = [sys.executable, "-m", "gpufeed.bench.contender", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
