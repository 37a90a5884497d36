"""Medians, spread, targets and words of an engine result."""

import pytest

from gpufeed.bench.cli import main
from gpufeed.bench.engine import report, runner

GB = 10**9


def run(cpu_s, *, wall_s=1.0, server_s=0.3, others_s=0.0, **notes):
    return {
        "bytes": GB,
        "wall_s": wall_s,
        "user_s": cpu_s / 4,
        "system_s": 3 * cpu_s / 4,
        "server_s": server_s,
        "others_s": others_s,
        "peak_rss_bytes": 100_000_000,
        "notes": notes,
    }


def assembled(runs, skipped=()):
    settings = {
        "environment": {"cpus_online": 2},
        "size_bytes": GB,
        "objects": 15,
        "part_bytes": 2**23,
        "connections": 8,
        "server_cpus": [0],
        "client_cpus": [1],
        "source": "nginx",
    }
    return report.assemble(runs, settings, skipped)


def test_a_row_has_median_and_spread_in_decimal_gigabytes():
    row = assembled({"raw": [run(0.3, wall_s=0.5), run(0.5, wall_s=1.0), run(0.4, wall_s=2.0)]})[
        "rows"
    ][0]

    assert (row["engine"], row["repeats"]) == ("raw", 3)
    assert (row["cpu_s_per_gb_min"], row["cpu_s_per_gb"], row["cpu_s_per_gb_max"]) == (
        0.3,
        0.4,
        0.5,
    )
    assert (row["gb_per_s_min"], row["gb_per_s"], row["gb_per_s_max"]) == (0.5, 1.0, 2.0)
    assert row["user_s_per_gb"] == 0.1
    assert row["system_s_per_gb"] == 0.3


def test_a_ratio_is_taken_within_each_round():
    # The machine became three times slower in the last round, for both.
    runs = {
        "raw": [run(0.4), run(0.4), run(1.2)],
        "gpufeed": [run(0.44), run(0.48), run(1.32)],
    }
    (target,) = assembled(runs)["targets"]

    assert target["target"] == "CPU of gpufeed <= 1.25 x raw"
    assert (target["got_min"], target["got"], target["got_max"]) == (1.1, 1.1, 1.2)
    assert target["passed"]


@pytest.mark.parametrize(("fill_s", "passed"), [(0.719, True), (0.721, False)])
def test_a_target_is_met_up_to_its_ratio(fill_s, passed):
    result = assembled({"raw": [run(0.4)], "gpufeed-fill": [run(fill_s)]})

    assert [target["passed"] for target in result["targets"]] == [passed]
    assert bool(report.missed(result)) is not passed
    assert report.closing_lines(result)[-1].startswith("met" if passed else "MISSED")


def test_what_was_not_measured_is_unknown_and_not_zero():
    row = assembled({"raw": [run(0.4, server_s=None), run(0.4, server_s=None)]})["rows"][0]

    assert row["server_s_per_gb"] is None


def test_lateness_is_a_row_s_own_and_shown(capsys):
    late = {"lateness_ms_p50": 0.5, "lateness_ms_p99": 7.25, "lateness_ms_max": 9.0}
    result = assembled({"raw": [run(0.4)], "gpufeed": [run(0.4, **late)]})

    assert "lateness_ms_p99" not in result["rows"][0]
    assert result["rows"][1]["lateness_ms_p99"] == 7.25
    report.print_result(result)
    assert "0.5 / 7.2 / 9.0" in capsys.readouterr().out


def test_a_disturbed_machine_and_a_skipped_engine_are_said():
    skipped = [{"engine": "obstore", "reason": "obstore is not installed"}]
    result = assembled({"raw": [run(0.4, others_s=0.5)], "aiohttp": [run(1.0)]}, skipped)

    lines = report.closing_lines(result)
    assert lines[0] == "skipped obstore: obstore is not installed"
    assert lines[-1].endswith("of raw")


@pytest.mark.parametrize(("fill_s", "status"), [(0.7, 0), (0.8, 5)])
def test_check_ends_with_a_status_of_its_own(monkeypatch, tmp_path, fill_s, status):
    runs = {
        "raw": [run(0.4)],
        "aiohttp": [run(1.0)],
        "gpufeed": [run(0.4)],
        "gpufeed-fill": [run(fill_s)],
    }
    monkeypatch.setattr(runner, "run", lambda options, progress: assembled(runs))

    assert main(["engine", "--work-dir", str(tmp_path), "--check"]) == status
    assert main(["engine", "--work-dir", str(tmp_path)]) == 0


def test_a_target_that_could_not_be_judged_is_not_met(monkeypatch, tmp_path):
    skipped = [{"engine": "aiohttp", "reason": "aiohttp is not installed"}]
    runs = {"raw": [run(0.4)], "gpufeed": [run(0.4)], "gpufeed-fill": [run(0.5)]}
    monkeypatch.setattr(runner, "run", lambda options, progress: assembled(runs, skipped))

    assert main(["engine", "--work-dir", str(tmp_path), "--check"]) == 5
