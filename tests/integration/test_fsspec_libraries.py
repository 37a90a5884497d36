"""pandas, pyarrow, HF datasets and webdataset read through the fsspec door, cold and then warm."""

from __future__ import annotations

import gzip
import io
import tarfile

import fsspec
import pytest

from gpufeed.cachefs import calls
from gpufeed.cachefs.fs import GpufeedFileSystem
from gpufeed.cachefs.testing.pytest_plugin import BUCKET, KEY, SECRET

ROWS = 20_000


@pytest.fixture
def target(node) -> dict[str, str]:
    return {"endpoint": node.standin.endpoint, "key": KEY, "secret": SECRET}


@pytest.fixture(autouse=True)
def daemon(node, monkeypatch):
    process = node.start()
    monkeypatch.setenv("GPUFEED_DAEMON", node.socket)
    GpufeedFileSystem.clear_instance_cache()
    yield process
    calls.close_shared()
    GpufeedFileSystem.clear_instance_cache()
    assert node.stop(process) == 0


@pytest.fixture
def frame():
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(3)
    return pd.DataFrame(
        {
            "id": np.arange(ROWS),
            "weight": rng.random(ROWS),
            "text": [f"row {i} {'x' * (i % 50)}" for i in range(ROWS)],
        }
    )


def settled(node) -> None:
    while node.status()["fills_in_flight"]:
        pass


def test_pandas_reads_csv_and_parquet(node, target, frame) -> None:
    import pandas as pd

    frame.to_csv(node.bucket / "t.csv", index=False)
    frame.to_parquet(node.bucket / "t.parquet", row_group_size=1000)
    for _ in range(2):
        pd.testing.assert_frame_equal(pd.read_csv(f"gpufeed://{BUCKET}/t.csv"), frame)
        chained = pd.read_parquet(
            f"gpufeed::oss://{BUCKET}/t.parquet", storage_options={"oss": target}
        )
        pd.testing.assert_frame_equal(chained, frame)
        column = pd.read_parquet(f"gpufeed://{BUCKET}/t.parquet", columns=["weight"])
        pd.testing.assert_frame_equal(column, frame[["weight"]])
        settled(node)


def test_pandas_writes_through_ossfs_and_the_next_read_is_new(node, target, frame) -> None:
    import pandas as pd

    url, options = f"gpufeed::oss://{BUCKET}/out/t.parquet", {"oss": target}
    for part in (frame, frame[:100]):
        part.to_parquet(url, storage_options=options)
        pd.testing.assert_frame_equal(pd.read_parquet(url, storage_options=options), part)


def test_pandas_compresses_where_it_is_told_to_or_the_address_is_plain(node, target, frame) -> None:
    import pandas as pd

    chained, short = f"gpufeed::oss://{BUCKET}/c.csv.gz", f"gpufeed://{BUCKET}/s.csv.gz"
    told = {"storage_options": {"oss": target}, "compression": "gzip"}
    frame.to_csv(chained, index=False, **told)
    frame.to_csv(short, index=False, storage_options={"target_options": target})
    for name in ("c.csv.gz", "s.csv.gz"):
        packed = gzip.decompress((node.bucket / name).read_bytes())
        assert packed.decode() == frame.to_csv(index=False)
    pd.testing.assert_frame_equal(pd.read_csv(chained, **told), frame)
    pd.testing.assert_frame_equal(pd.read_csv(short), frame)


def test_pyarrow_reads_a_dataset_by_its_columns(node, frame) -> None:
    import pyarrow as pa
    import pyarrow.dataset as ds
    import pyarrow.fs
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame)
    for part in range(3):
        folder = node.bucket / "set" / f"part={part}"
        folder.mkdir(parents=True)
        pq.write_table(table, folder / "data.parquet", row_group_size=500)
    door = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(GpufeedFileSystem()))
    for _ in range(2):
        dataset = ds.dataset(f"{BUCKET}/set", filesystem=door, partitioning="hive")
        found = dataset.to_table(columns=["id", "part"], filter=ds.field("part") == 1)
        assert found.column("id").to_pylist() == list(range(ROWS))
        whole = pq.read_table(f"{BUCKET}/set/part=0/data.parquet", filesystem=door)
        assert whole.column("text").equals(table.column("text"))
        settled(node)


@pytest.fixture
def hf_files(node, frame) -> None:
    (node.bucket / "hf").mkdir()
    for part in range(2):
        rows = frame[part * 100 : (part + 1) * 100]
        rows.to_parquet(node.bucket / "hf" / f"{part}.parquet")
        rows.to_json(node.bucket / "hf" / f"{part}.json", orient="records", lines=True)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("form", ["chained", "plain"])
@pytest.mark.parametrize("format_", ["parquet", "json"])
def test_hf_datasets_load(target, frame, tmp_path, hf_files, format_, form, streaming) -> None:
    import datasets

    if form == "chained":
        url, options = f"gpufeed::oss://{BUCKET}/hf/*.{format_}", {"oss": target}
    else:
        url, options = f"gpufeed://{BUCKET}/hf/*.{format_}", {"gpufeed": {"target_options": target}}
    how = {
        "data_files": url, "storage_options": options, "cache_dir": str(tmp_path),
        "split": "train", "streaming": streaming,
    }  # fmt: skip
    if form == "chained" and streaming:
        # HF takes a chain's first link for a local path as soon as it streams, whoever's it is.
        with pytest.raises(FileNotFoundError):
            list(datasets.load_dataset(format_, **how))
        return
    rows = list(datasets.load_dataset(format_, **how))
    assert [row["id"] for row in rows] == list(range(200))
    assert [row["text"] for row in rows] == list(frame["text"][:200])


def test_webdataset_reads_tars_through_fsspec(node) -> None:
    import webdataset as wds
    from node import make_samples, tar_of

    samples = make_samples(50, 1)
    (node.bucket / "w.tar").write_bytes(tar_of(samples))
    with fsspec.open(f"gpufeed://{BUCKET}/w.tar") as stream:
        files = wds.tariterators.tar_file_expander([{"url": "w.tar", "stream": stream}])
        found = {s["__key__"]: s["jpg"] for s in wds.tariterators.group_by_keys(files)}
    assert found == {key: fields["jpg"] for key, fields in samples.items()}


def test_tarfile_and_zip_over_the_door(node) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        info = tarfile.TarInfo("inner.txt")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"hello"))
    (node.bucket / "x.tar.gz").write_bytes(packed.getvalue())
    # The bytes of the object itself, though the loader's cache unpacks such tars.
    with fsspec.open(f"gpufeed://{BUCKET}/x.tar.gz") as file:
        assert file.read() == packed.getvalue()
    with fsspec.open(f"tar://inner.txt::gpufeed://{BUCKET}/x.tar.gz") as file:
        assert file.read() == b"hello"
