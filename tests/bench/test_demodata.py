"""Demo data: the same bytes from the same seed, of the promised size, in the promised layout."""

import hashlib
import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from gpufeed.bench import demodata
from gpufeed.bench.demodata import BUCKET, DataSpec, ImageMaker
from gpufeed.cachefs.checksum import crc64
from gpufeed.cachefs.errors import IntegrityError, UsageError


@pytest.fixture(scope="module")
def maker():
    return ImageMaker(7)


def make(root, spec, maker, parts=1):
    partial = root / "made.partial"
    demodata.make_directories(partial / "objects")
    records = []
    for part in range(parts):
        for shard in demodata.shard_indices(spec, part, parts):
            records += demodata.make_shard(maker, spec, shard, partial / "objects")
    return demodata.finish(partial, root / "made", spec, records)


def tree_digest(root):
    state = hashlib.blake2b()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        state.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return state.hexdigest()


def test_images_have_the_size_of_those_that_people_train_on(maker):
    jpegs = [maker.jpeg(index) for index in range(120)]
    sizes = np.array([len(jpeg) for jpeg in jpegs])
    assert 105_000 <= sizes.mean() <= 116_000
    assert sizes.std() > 10_000
    shapes = {Image.open(io.BytesIO(jpeg)).size for jpeg in jpegs}
    assert (500, 375) in shapes
    assert len(shapes) > 2
    assert len(set(jpegs)) == len(jpegs)


def test_images_have_texture_everywhere(maker):
    pixels = np.asarray(Image.open(io.BytesIO(maker.jpeg(3))).convert("L"), np.float32)
    blocks = pixels[:320, :320].reshape(10, 32, 10, 32).std(axis=(1, 3))
    assert np.median(blocks) > 5


def test_labels_cover_all_classes(maker):
    assert {maker.label(index) for index in range(300)} == set(range(demodata.CLASS_COUNT))


def test_the_bytes_depend_on_the_seed_and_not_on_the_number_of_processes(tmp_path, maker):
    spec = DataSpec(sample_count=7, samples_per_shard=2)
    for name in ("one", "three"):
        (tmp_path / name).mkdir()
    one = make(tmp_path / "one", spec, maker)
    three = make(tmp_path / "three", spec, ImageMaker(7), parts=3)
    assert tree_digest(one.root) == tree_digest(three.root)
    assert ImageMaker(8).jpeg(0) != maker.jpeg(0)


def test_tars_and_loose_objects_hold_the_same_images(tmp_path, maker):
    data = make(tmp_path, DataSpec(sample_count=5, samples_per_shard=3), maker)
    members = {}
    for key in data.tar_keys:
        with tarfile.open(data.path_of(key)) as tar:
            for member in tar:
                members[member.name] = tar.extractfile(member).read()
    assert len(members) == 10
    for record, key in zip(data.samples, data.loose_keys, strict=True):
        jpeg = data.path_of(key).read_bytes()
        name = demodata.sample_key(record.index)
        assert members[f"{name}.jpg"] == jpeg
        assert members[f"{name}.cls"] == str(record.label).encode()
        assert record.size_bytes == len(jpeg)
        assert record.crc64 == crc64(jpeg)
        assert record.blake2b == hashlib.blake2b(jpeg, digest_size=16).hexdigest()
        assert key.split("/")[1] == str(record.label)
    assert (data.objects_dir / BUCKET).is_dir()


def test_a_data_set_reads_back_as_it_was_made(tmp_path, maker):
    data = make(tmp_path, DataSpec(sample_count=3), maker)
    assert demodata.load(data.root) == data
    assert data.tar_pattern == "tars/train-{000000..000000}.tar"


def test_a_broken_manifest_says_what_to_remove(tmp_path):
    with pytest.raises(IntegrityError, match="remove that directory"):
        demodata.load(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"samples": [[1, 2]], "spec": {}}))
    with pytest.raises(IntegrityError, match="remove that directory"):
        demodata.load(tmp_path)


def test_a_data_set_with_a_hole_is_not_finished(tmp_path, maker):
    spec = DataSpec(sample_count=4, samples_per_shard=2)
    partial = tmp_path / "x.partial"
    demodata.make_directories(partial / "objects")
    records = demodata.make_shard(maker, spec, 1, partial / "objects")
    with pytest.raises(IntegrityError, match="2 of 4"):
        demodata.finish(partial, tmp_path / "x", spec, records)
    assert not (tmp_path / "x").exists()


def test_specs_out_of_range_are_refused():
    with pytest.raises(UsageError):
        DataSpec(sample_count=0)
    with pytest.raises(UsageError):
        DataSpec(samples_per_shard=0)


def test_directories_of_different_bytes_have_different_names():
    specs = [DataSpec(), DataSpec(seed=1), DataSpec(sample_count=1), DataSpec(samples_per_shard=9)]
    assert len({spec.directory_name for spec in specs}) == len(specs)


def test_a_part_made_by_its_own_process_reports_every_sample(tmp_path, capsys):
    spec = DataSpec(sample_count=3, samples_per_shard=2)
    demodata.make_directories(tmp_path / "objects")
    fields = {"seed": 7, "sample_count": 3, "samples_per_shard": 2}
    assert demodata.main([json.dumps(fields), str(tmp_path / "objects"), "0", "1"]) == 0
    messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    records = [record for message in messages for record in demodata.records_from(message)]
    assert [record.index for record in records] == list(range(spec.sample_count))
