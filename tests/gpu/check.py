"""Run the checks of this folder and print one JSON object. See check.sh."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

PASSED, FAILED, NO_DEVICE = 0, 1, 77


class Collector:
    """Keeps what became of each test, and what it measured."""

    def __init__(self) -> None:
        self.checks: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("/")[2]
        check = self.checks.setdefault(name, {"outcome": "passed", "seconds": 0.0})
        check["seconds"] = round(check["seconds"] + report.duration, 3)
        if report.failed:
            check["outcome"] = "failed"
            check["error"] = str(report.longrepr)[-2000:]
        elif report.skipped and check["outcome"] != "failed":
            check["outcome"] = "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            check["reason"] = str(reason)
        if report.when == "call" and report.user_properties:
            check["measured"] = dict(report.user_properties)


def main() -> int:
    """Everything else that is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.monotonic()
    collector = Collector()
    here = Path(__file__).parent
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(here.parents[1]), str(here)]
    status = int(pytest.main([*options, *sys.argv[1:]], plugins=[collector]))
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    outcomes = [check["outcome"] for check in collector.checks.values()]
    report = {
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seconds": round(time.monotonic() - start, 1),
        "complete": status in (0, 1),
        "counts": {name: outcomes.count(name) for name in ("passed", "failed", "skipped")},
        "checks": collector.checks,
    }
    out.write(json.dumps(report) + "\n")
    out.close()
    if status != 0 or not outcomes:
        return FAILED
    return PASSED if device is not None else NO_DEVICE


if __name__ == "__main__":
    sys.exit(main())
