"""From rows to the result: its shape, medians, checks, targets, verdict and money."""

import json

import pytest
from bench_rows import SETTINGS, all_rows, row

from gpufeed.bench import report
from gpufeed.bench.report import Price
from gpufeed.bench.table import closing_lines, failed_checks, print_result
from gpufeed.cachefs.errors import UsageError


@pytest.fixture
def result():
    return report.assemble(all_rows(), SETTINGS, Price(2.0, 10))


def test_the_result_has_the_published_shape(result):
    value = json.loads(json.dumps(result))
    assert value["origin"] == {"first_byte_ms": 20, "mb_per_s_per_connection": 80}
    assert value["workers"] == 2
    assert value["step_ms"] == 100
    assert [(entry["name"], entry["phase"]) for entry in value["rows"]] == [
        ("loose-http", "cold"),
        ("loose-ossfs", "cold"),
        ("webdataset-direct", "cold"),
        ("ceiling", "warm"),
        ("gpufeed", "cold"),
        ("gpufeed", "warm"),
        ("gpufeed-loose", "cold"),
        ("gpufeed-loose", "warm"),
    ]
    for entry in value["rows"]:
        for name in ("au_pct", "samples_per_s", "stall_s", "first_batch_s"):
            assert isinstance(entry[name], float)
        assert isinstance(entry["origin_requests"], int)
        assert isinstance(entry["origin_bytes"], int)
    assert report.validate(value) == value


def test_all_checks_and_targets_pass_on_good_rows(result):
    assert result["checks"] == {
        "exactly_once": True,
        "bytes_equal": True,
        "warm_epoch_without_origin_requests": True,
    }
    assert all(target["passed"] for target in result["targets"])
    assert failed_checks(result) == []


def test_one_request_in_a_warm_epoch_fails_the_check():
    rows = [row("gpufeed", "warm", requests=1)]
    assert report.checks(rows)["warm_epoch_without_origin_requests"] is False


@pytest.mark.parametrize(
    ("name", "phase", "fields", "part"),
    [
        ("ceiling", "warm", {"au_pct": 96.9}, "97 %"),
        ("loose-http", "cold", {"au_pct": 20.1}, "20 % or less"),
        ("gpufeed", "warm", {"au_pct": 95.9}, "96 % or more"),
        ("gpufeed-loose", "warm", {"au_pct": 95.9}, "2 points"),
        ("gpufeed", "cold", {"au_pct": 95.0}, "as well fed as webdataset"),
        ("gpufeed", "cold", {"first_batch_s": 0.51}, "0.5 s"),
        ("gpufeed-loose", "cold", {"samples_per_s": 100.0}, "5 x"),
    ],
)
def test_each_target_can_be_missed(name, phase, fields, part):
    rows = [
        entry | fields if (entry["name"], entry["phase"]) == (name, phase) else entry
        for entry in all_rows()
    ]
    missed = [target.target for target in report.targets(rows) if not target.passed]
    assert any(part in text for text in missed)


def test_repetitions_become_medians_with_their_spread():
    repeats = [row("ceiling", "warm", au_pct=value) for value in (97.0, 99.0, 98.0)]
    merged = report.merge_rows(repeats)
    assert len(merged) == 1
    assert merged[0]["au_pct"] == 98.0
    assert merged[0]["spread"]["au_pct"] == [97.0, 99.0]
    assert merged[0]["repeats"] == 3


def test_one_bad_repetition_is_not_outvoted():
    repeats = [row("gpufeed", "warm"), row("gpufeed", "warm"), row("gpufeed", "warm", requests=2)]
    repeats[0]["bytes_equal"] = False
    merged = report.merge_rows(repeats)
    found = report.checks(merged)
    assert found["bytes_equal"] is False
    assert found["warm_epoch_without_origin_requests"] is False


def test_money_is_idle_time_at_the_price_given(result):
    money = result["cost"]
    assert money["idle_per_hour_before"] == pytest.approx(20 * 0.85)
    assert money["idle_per_hour_after"] == pytest.approx(20 * 0.015)
    assert money["saved_per_hour"] == pytest.approx(20 * 0.835)
    assert "saves 16.70 an hour" in report.cost_sentence(money)


def test_a_loss_is_called_a_loss():
    rows = [row("loose-http", "cold", au_pct=90.0), row("gpufeed", "warm", au_pct=80.0)]
    assert "loses 0.10 an hour" in report.cost_sentence(report.cost(rows, Price(1.0, 1)))


def test_the_verdict_says_how_far_local_files_would_go():
    slower, faster = row("ceiling", "warm", au_pct=98.0), row("ceiling", "warm", au_pct=99.0)
    others = [row("loose-http", "cold", au_pct=15.0), row("gpufeed", "warm", au_pct=98.5)]
    assert "would allow 99 %" in report.verdict([*others, faster])
    assert "give 98 %" in report.verdict([*others, slower])


def test_without_a_pair_there_is_no_verdict_and_no_cost():
    rows = [row("ceiling", "warm")]
    assert report.verdict(rows).startswith("No verdict")
    assert report.cost(rows, Price(1.0, 1)) is None
    assert report.cost_sentence(None) == ""


def test_rows_measured_beside_a_busy_program_are_named(result):
    assert report.disturbed(result["rows"]) == []
    result["rows"][3]["others_cpu_pct"] = 42.0
    assert report.disturbed(result["rows"]) == ["ceiling warm (42 %)"]
    assert any("do not trust ceiling warm" in line for line in closing_lines(result))


def test_prices_out_of_range_are_refused():
    with pytest.raises(UsageError):
        Price(-1.0, 1)
    with pytest.raises(UsageError):
        Price(1.0, 0)


@pytest.mark.parametrize(
    "value",
    [[], {}, {"rows": []}, dict(SETTINGS, rows=[{"name": "x"}]), dict(SETTINGS, rows=[], schema=9)],
)
def test_what_is_not_a_result_is_refused(value):
    with pytest.raises(UsageError):
        report.validate(value)


def test_the_table_has_every_row_and_the_closing_says_what_was_missed(result, capsys):
    result["targets"][0]["passed"] = False
    result["checks"]["exactly_once"] = False
    print_result(result)
    shown = capsys.readouterr().out
    for entry in result["rows"]:
        assert entry["name"] in shown
    assert "FAILED CHECK: exactly_once" in shown
    assert any(line.startswith("  missed:") for line in closing_lines(result))
