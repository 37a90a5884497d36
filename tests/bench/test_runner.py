"""Whole small runs on local files: a result at the end and nothing else left, also by Ctrl-C."""

import signal
import subprocess
import sys

import pytest

from gpufeed.bench import contenders, runner
from gpufeed.bench.demodata import DataSpec
from gpufeed.bench.progress import Silent
from gpufeed.bench.report import Price
from gpufeed.bench.runner import RunOptions, child_environment, run, runnable, steady_samples_per_s
from gpufeed.bench.workplace import require_free, workplace
from gpufeed.cachefs.errors import IntegrityError, OperatorError, StorageError, UsageError

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("no_process_left")

SAMPLES = 24


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory):
    """One work dir for all runs here: the data is made once."""
    return tmp_path_factory.mktemp("work")


def options(work_dir, **fields):
    values = {
        "work_dir": work_dir,
        "names": ("ceiling",),
        "data": DataSpec(sample_count=SAMPLES),
        "batch_size": 8,
        "workers": 1,
        "step_ms": 1.0,
        "price": Price(1.0, 1),
    }
    return RunOptions(**(values | fields))


def left_in(work_dir):
    return {path.name for path in work_dir.iterdir()}


def test_a_run_ends_with_a_result_and_leaves_only_the_data(work_dir):
    result = run(options(work_dir, repeats=2), Silent())
    assert [(row["name"], row["phase"]) for row in result["rows"]] == [("ceiling", "warm")]
    assert result["rows"][0]["samples"] == SAMPLES
    assert result["rows"][0]["repeats"] == 2
    assert result["rows"][0]["origin_requests"] == 0
    assert result["checks"] == {"exactly_once": True, "bytes_equal": True}
    assert result["step_ms"] == 1
    assert result["environment"]["cpus_usable"] >= 1
    assert left_in(work_dir) == {".lock", DataSpec(sample_count=SAMPLES).directory_name}


COMMAND = """
import sys
from gpufeed.bench.cli import main
sys.exit(main(sys.argv[1:]))
"""


def start_run(work_dir, *flags):
    command = [
        sys.executable, "-c", COMMAND, "run", "--contenders", "ceiling", "--samples", "48",
        "--batch-size", "8", "--workers", "2", "--step-ms", "20", "--repeats", "90",
        "--work-dir", str(work_dir), *flags,
    ]  # fmt: skip
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("line", ["making demo data", "ceiling 1 ...", "ceiling, warm:"])
def test_a_signal_ends_a_run_and_everything_it_started(tmp_path, processes, line, number):
    work_dir = tmp_path / "work"
    with start_run(work_dir) as bench:
        said = ""
        while said is not None and line not in said:
            said = bench.stderr.readline() or None
        bench.send_signal(number)
        _, rest = bench.communicate(timeout=60)
    assert said, "the run ended by itself"
    assert bench.returncode == 128 + number
    assert signal.Signals(number).name in rest
    assert "Traceback" not in rest
    assert processes(str(work_dir)) == []
    assert left_in(work_dir) <= {".lock", DataSpec(sample_count=48).directory_name}


def test_a_run_after_a_killed_one_removes_what_that_left(work_dir):
    (work_dir / "run-dead" / "cache").mkdir(parents=True)
    (work_dir / "demodata-x.partial").mkdir()
    with workplace(work_dir, keep=False) as place:
        assert not (work_dir / "run-dead").exists()
        assert not (work_dir / "demodata-x.partial").exists()
        assert place.run_dir.is_dir()
    assert not place.run_dir.exists()


def test_two_runs_do_not_share_a_work_dir(tmp_path):
    with (
        workplace(tmp_path, keep=False),
        pytest.raises(OperatorError, match="another cachebench run"),
        workplace(tmp_path, keep=False),
    ):
        pass


def test_kept_runs_are_kept_and_the_socket_directory_goes(tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    with workplace(deep, keep=True) as place:
        assert place.socket_dir != place.run_dir
        assert len(str(place.socket_dir)) < 80
    assert place.run_dir.is_dir()
    assert not place.socket_dir.exists()


def test_a_work_dir_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(StorageError, match="--work-dir"),
        workplace(tmp_path / "file" / "x", keep=False),
    ):
        pass


def test_a_disk_without_room_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(StorageError, match="fewer --samples"):
        require_free(tmp_path, 1 << 62, "a run")


def test_a_contender_without_its_module_is_skipped_and_named(monkeypatch):
    monkeypatch.setattr(
        contenders, "missing_modules", lambda name: ["ossfs"] if name == "loose-ossfs" else []
    )
    able, skipped = runnable(["loose-ossfs", "ceiling"])
    assert able == ["ceiling"]
    assert skipped[0]["name"] == "loose-ossfs"
    assert "gpufeed[bench]" in skipped[0]["reason"]


def test_without_torch_nothing_runs_and_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(contenders, "missing_modules", lambda name: ["torch"])
    with pytest.raises(UsageError, match=r"pip install 'gpufeed\[bench\]'"):
        runnable(["ceiling"])


@pytest.mark.parametrize(
    "fields",
    [
        {"names": ()}, {"names": ("x",)}, {"batch_size": 0}, {"workers": 0}, {"repeats": 0},
        {"step_ms": -1.0}, {"step_ms": 1e9}, {"first_byte_ms": -1.0}, {"mb_per_s": 0.0},
        {"slow_samples": 0},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(work_dir, fields):
    with pytest.raises(UsageError):
        options(work_dir, **fields)


def test_the_pace_leaves_the_first_batches_out():
    row = {"name": "x", "samples": 80, "steps": 10, "waits_ms": [900.0] * 2 + [10.0] * 8}
    assert steady_samples_per_s(row, 2) == pytest.approx(800.0)
    with pytest.raises(IntegrityError):
        steady_samples_per_s({**row, "waits_ms": []}, 2)


def test_children_get_no_proxy_and_no_settings_of_another_gpufeed(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    monkeypatch.setenv("GPUFEED_DAEMON", "off")
    environment = child_environment()
    assert "HTTPS_PROXY" not in environment
    assert not [name for name in environment if name.startswith("GPUFEED_")]
    assert runner.SILENCE_S > 0
