"""The command line: help with an example, one line for each error, light to import."""

import json
import subprocess
import sys

import pytest
from bench_rows import SETTINGS, all_rows

from gpufeed.bench import demo, report
from gpufeed.bench.cli import main
from gpufeed.bench.report import Price


@pytest.fixture
def result_file(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(report.assemble(all_rows(), SETTINGS, Price(2.0, 8))))
    return path


@pytest.mark.parametrize("words", [["run", "--help"], ["report", "--help"]])
def test_help_has_an_example(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "example:\n  cachebench" in capsys.readouterr().out


def test_the_demo_has_help_with_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        demo.command(["--help"])
    assert ended.value.code == 0
    assert "gpufeed demo --gpu-price" in capsys.readouterr().out


def test_a_result_can_be_shown_again(tmp_path, result_file, capsys):
    page = tmp_path / "new" / "report.html"
    copy = tmp_path / "new" / "copy.json"
    assert main(["report", str(result_file), "--html", str(page), "--json", str(copy)]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(copy.read_text()) == json.loads(result_file.read_text())
    assert "webdataset-direct" in capsys.readouterr().out
    assert {path.name for path in page.parent.iterdir()} == {"report.html", "copy.json"}


def test_a_result_with_a_failed_check_has_a_status_of_its_own(tmp_path, result_file):
    value = json.loads(result_file.read_text())
    value["checks"]["bytes_equal"] = False
    result_file.write_text(json.dumps(value))
    assert main(["report", str(result_file)]) == 5


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["report", "missing.json"], 2, "No such file"),
        (["run", "--step-ms", "soon"], 2, "milliseconds or auto"),
        (["run", "--contenders", "nobody"], 2, "there are loose-http"),
        (["run", "--samples", "0"], 2, "must be 1 to"),
        (["run", "--gpus", "0"], 2, "--gpus"),
        (["run", "--json", "/proc/none/x.json"], 3, "/proc/none"),
    ],
)
def test_errors_are_one_line_and_a_status(words, status, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if words[0] == "run":
        words = [*words, "--work-dir", str(tmp_path / "work")]
    assert main(words) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("cachebench: ")
    assert message in lines[0]


def test_the_demo_without_torch_names_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert demo.command([]) == 2
    assert "pip install 'gpufeed[bench]'" in capsys.readouterr().err


def test_the_command_line_imports_nothing_heavy():
    code = (
        "import sys; import gpufeed.bench.cli, gpufeed.bench.demo; "
        "print([name for name in ('torch', 'numpy', 'rich', 'webdataset') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
