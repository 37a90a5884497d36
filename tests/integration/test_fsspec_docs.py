"""The examples of docs/fsspec.md do what they say, in their order, as one program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from gpufeed.cachefs.testing.pytest_plugin import KEY, SECRET

PAGE = Path(__file__).parents[2] / "docs" / "fsspec.md"
FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)
CHECKS = """
assert list(frame["x"]) == list(same["x"]) == column["x"].to_pylist() == list(range(1000))
assert [row["x"] for row in rows] == list(range(1000))
assert door.cat_file("my-bucket/notes/new.txt") == b"written to OSS"
"""


def test_the_examples_run(node, tmp_path) -> None:
    bucket = node.bucket.parent / "my-bucket"
    (bucket / "notes").mkdir(parents=True)
    (bucket / "tables").mkdir()
    (bucket / "notes" / "readme.txt").write_text("the first line\nthe second\n")
    table = pd.DataFrame({"x": np.arange(1000), "y": np.arange(1000) / 7})
    table.to_csv(bucket / "tables" / "points.csv", index=False)
    table.to_parquet(bucket / "tables" / "points.parquet")
    examples = FENCE.findall(PAGE.read_text())
    assert len(examples) == 5
    code = "".join(examples).replace(
        "https://oss-cn-hangzhou-internal.aliyuncs.com", node.standin.endpoint
    )
    code = code.replace('"KEY"', repr(KEY)).replace('"SECRET"', repr(SECRET))
    program = tmp_path / "examples.py"
    program.write_text(code + CHECKS)
    process = node.start()
    environment = {
        **node.environment(), "GPUFEED_DAEMON": node.socket, "HF_HOME": str(tmp_path / "hf"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the first line\n\n" * 2
    assert node.stop(process) == 0
