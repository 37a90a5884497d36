"""The demo itself, small: every contender over the real stand-in and daemon, and nothing left."""

import json
import signal
import subprocess
import sys

import pytest

for module in ("torch", "rich", "webdataset", "ossfs"):
    pytest.importorskip(module)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_process_left")]

COMMAND = "import sys; from gpufeed.bench.demo import command; sys.exit(command(sys.argv[1:]))"


def start_demo(directory, *flags):
    command = [
        sys.executable, "-c", COMMAND, "--samples", "330", "--slow-samples", "24",
        "--batch-size", "16", "--step-ms", "10", "--first-byte-ms", "5",
        "--out", str(directory / "out"), "--work-dir", str(directory / "work"), *flags,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def left_in(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_demo_measures_everybody_and_leaves_report_and_result(tmp_path):
    demo = start_demo(tmp_path)
    shown, said = demo.communicate(timeout=240)
    assert demo.returncode == 0, said
    assert "What next:" in shown
    assert left_in(tmp_path / "out") == ["report.html", "result.json"]
    assert left_in(tmp_path / "work") == [".lock", "demodata-v1-s7-n330"]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    rows = {(row["name"], row["phase"]): row for row in result["rows"]}
    assert list(rows) == [
        ("loose-http", "cold"),
        ("loose-ossfs", "cold"),
        ("webdataset-direct", "cold"),
        ("ceiling", "warm"),
        ("gpufeed", "cold"),
        ("gpufeed", "warm"),
        ("gpufeed-loose", "cold"),
        ("gpufeed-loose", "warm"),
    ]
    assert all(result["checks"].values())
    assert rows["loose-http", "cold"]["origin_requests"] == 24
    assert rows["gpufeed", "warm"]["origin_requests"] == 0
    assert rows["gpufeed-loose", "warm"]["origin_requests"] == 0
    assert rows["gpufeed-loose", "cold"]["origin_requests"] >= 330
    assert rows["gpufeed", "cold"]["samples"] == rows["gpufeed", "warm"]["samples"] == 330


@pytest.mark.parametrize("line", ["loose-http 1 ...", "gpufeed 1 ...", "gpufeed, cold:"])
def test_a_signal_ends_origin_daemon_and_workers(tmp_path, processes, line):
    with start_demo(tmp_path, "--contenders", "loose-http,gpufeed", "--repeats", "50") as demo:
        said = ""
        while said is not None and line not in said:
            said = demo.stderr.readline() or None
        demo.send_signal(signal.SIGINT)
        _, rest = demo.communicate(timeout=60)
    assert said, "the demo ended by itself"
    assert demo.returncode == 128 + signal.SIGINT
    assert "Traceback" not in rest
    assert processes(str(tmp_path)) == []
    assert left_in(tmp_path / "work") == [".lock", "demodata-v1-s7-n330"]
    assert left_in(tmp_path / "out") == []
