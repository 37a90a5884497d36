"""`cachebench share`: what the rounds say together, and one short run of it all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from gpufeed.bench import cli
from gpufeed.bench.share import report
from gpufeed.bench.share.jobs import Job
from gpufeed.bench.share.placement import kept_to, two_cpus
from gpufeed.cachefs.errors import UsageError

GB = 10**9


def reader(first_s: float, again_s: float, *, begin_s: float = 0.0) -> dict[str, object]:
    def run(span_s: float) -> dict[str, float]:
        return {"bytes": 4 * GB, "began_s": begin_s, "ended_s": begin_s + span_s, "sum": 1}

    return {"first": run(first_s), "again": run(again_s)}


def one_round(hits_s: float, wake_us: float) -> dict[str, object]:
    return {
        "hits": [reader(hits_s, 1.0), reader(hits_s, 1.0)],
        "plain": [reader(1.0, 0.5), reader(1.0, 0.5)],
        "nvme": [reader(4.0, 4.0)],
        "bare": [reader(3.0, 3.0)],
        "daemon_cpu_s": {"first": 0.16, "again": 0.08},
        "wake": {"took_us": [wake_us] * 99 + [10 * wake_us]},
        "ping": {"took_us": [50.0] * 100},
    }


def test_ratios_are_taken_within_a_round_and_the_median_of_rounds_counts() -> None:
    rounds = [one_round(1.25, 60.0), one_round(1.0, 100.0), one_round(2.0, 70.0)]
    result = report.assemble(rounds, {"readers": 2})
    assert result["summary"] == pytest.approx(
        {
            "daemon_cpu_s_per_gb": 0.02,
            "throughput_ratio": 0.8,
            "nvme_ratio": 0.75,
            "wakeup_ratio": 1.4,
            "throughput_mapped_ratio": 0.5,
            "daemon_cpu_mapped_s_per_gb": 0.01,
            "wakeup_ratio_p99": 14.0,
        }
    )
    met = {target["name"]: target["met"] for target in result["targets"]}
    assert met == {
        "daemon_cpu_s_per_gb": True, "throughput_ratio": False, "nvme_ratio": False,
        "wakeup_ratio": True,
    }  # fmt: skip
    spread = {target["name"]: target["spread"] for target in result["targets"]}
    assert spread["throughput_ratio"] == pytest.approx([0.5, 1.0])
    assert result["rounds"][0]["hits_gb_per_s"] == pytest.approx(2 * 4 / 1.25)


def test_readers_that_begin_at_different_times_count_from_the_first_to_the_last() -> None:
    readers = [reader(1.0, 1.0), reader(1.0, 1.0, begin_s=1.0)]
    assert report.gb_per_s(readers, "first") == pytest.approx(4.0)


def test_a_job_survives_its_way_to_the_reader() -> None:
    job = Job(mode="plain", go_fd=3, map_fd=4, sizes_bytes=(5, 6), extent_bytes=7, files=("a",))
    assert Job.load(job.dump()) == job


@pytest.mark.parametrize(
    "flags", [["--readers", "0"], ["--data-size", "1MiB"], ["--rounds", "0"], ["--gb", "0"]]
)
def test_flags_out_of_range_are_refused(flags: list[str], capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["share", *flags]) == UsageError.exit_status
    assert flags[0] in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_run_measures_everything_and_leaves_nothing(
    capsys: pytest.CaptureFixture,
) -> None:
    place = Path(tempfile.mkdtemp(prefix="gs-"))
    try:
        command = ["share", "--data-size", "128MiB", "--gb", "0.3", "--readers", "2"]
        command += ["--rounds", "1", "--turns", "20", "--work-dir", str(place / "work")]
        assert cli.main([*command, "--json", str(place / "result.json")]) == 0
        result = json.loads((place / "result.json").read_text())
        left = [path.name for path in (place / "work").iterdir() if path.name != ".lock"]
    finally:
        shutil.rmtree(place)

    assert left == []
    assert {"daemon_cpu_s_per_gb", "throughput_ratio", "wakeup_ratio"} <= set(result["summary"])
    assert all(value > 0 for value in result["rounds"][0].values() if isinstance(value, float))
    assert result["settings"]["read_bytes"] >= 2 * result["settings"]["data_bytes"]
    assert "arena hits / plain shared mapping" in capsys.readouterr().out


def test_a_process_is_kept_to_a_cpu_for_as_long_as_is_asked_and_nothing_else_is() -> None:
    before = os.sched_getaffinity(0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        with kept_to(other.pid, [min(before)]):
            assert os.sched_getaffinity(other.pid) == {min(before)}
            assert os.sched_getaffinity(0) == before
        assert os.sched_getaffinity(other.pid) == before
        with kept_to(other.pid, []):
            assert os.sched_getaffinity(other.pid) == before
        other.communicate()


def test_the_two_ends_of_a_round_trip_are_never_kept_to_one_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 3, 5})
    assert two_cpus() == (3, 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4})
    assert two_cpus() == ()
