"""`cachebench sim`: offline bounds against brute force, the table, the command."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufeed.bench import cli
from gpufeed.bench.sim import runner
from gpufeed.bench.sim.offline import fractional_bytes, min_bytes, next_reads


def brute_force(trace: list[int], capacity: int) -> int:
    """The least misses of unit shards: every subset may be kept after every read."""
    best = {frozenset(): 0}
    for shard in trace:
        following: dict[frozenset[int], int] = {}
        for held, misses in best.items():
            cost = misses + (shard not in held)
            union = held | {shard}
            for count in range(min(capacity, len(union)) + 1):
                for kept in itertools.combinations(sorted(union), count):
                    key = frozenset(kept)
                    following[key] = min(following.get(key, cost), cost)
        best = following
    return min(best.values())


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(0, 4))
def test_min_with_bypass_is_the_least_possible(trace: list[int], capacity: int) -> None:
    sizes = [1] * 5
    assert min_bytes(trace, sizes, capacity) == brute_force(trace, capacity)
    assert fractional_bytes(trace, sizes, capacity) == brute_force(trace, capacity)


@given(
    st.lists(st.integers(0, 4), max_size=20),
    st.lists(st.integers(1, 9), min_size=5, max_size=5),
    st.integers(0, 30),
)
def test_the_fractional_bound_is_below_greedy_and_above_the_cold_misses(trace, sizes, capacity):
    bound = fractional_bytes(trace, sizes, capacity)
    assert sum(sizes[shard] for shard in set(trace)) <= bound
    assert bound <= min_bytes(trace, sizes, capacity) <= sum(sizes[shard] for shard in trace)


def test_next_reads() -> None:
    assert [at if at < 99 else None for at in next_reads([7, 8, 7, 7])] == [2, None, 3, None]


def test_the_command_writes_rows_with_the_promised_fields(tmp_path: Path, capsys) -> None:
    out = tmp_path / "sim.json"
    status = cli.main([
        "sim", "--jobs", "1,2", "--cache", "0.5", "--sizes", "equal,lognormal", "--shards", "60",
        "--epochs", "2", "--workers", "1", "--json", str(out),
    ])  # fmt: skip
    assert status == 0
    result = json.loads(out.read_text())
    wanted = {"jobs", "cache_ratio", "sizes", "speeds", "policy", "origin_bytes", "min_bytes",
              "au_pct", "nvme_bytes_written"}  # fmt: skip
    assert all(wanted <= row.keys() for row in result["rows"])
    cells = {(row["jobs"], row["sizes"], row["speeds"], row["policy"]) for row in result["rows"]}
    assert len(cells) == len(result["rows"]) == 2 * 2 * 2 * 5
    shown = capsys.readouterr().out
    assert "offline MIN" in shown
    assert "2-random" in shown


def test_a_missed_target_fails_the_check_only(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(runner, "RATIO_MAX", 0.5)
    flags = ["sim", "--jobs", "1", "--cache", "0.5", "--sizes", "equal", "--shards", "40",
             "--epochs", "1", "--workers", "1", "--policies", "gpufeed"]  # fmt: skip
    assert cli.main(flags) == 0
    assert cli.main([*flags, "--check"]) == 5
    assert "MISSED origin bytes / offline MIN" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--jobs", "x"], "'x'; give numbers of 1 to 64"),
        (["--cache", "1.5"], "'1.5'; give ratios above 0, to 1"),
        (["--policies", "arc"], "'arc'; there are gpufeed, never-evict"),
        (["--shards", "3"], "--shards must be at least 20"),
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], said: str, capsys) -> None:
    assert cli.main(["sim", *flags]) == 2
    assert said in capsys.readouterr().err


def test_processes_and_one_process_find_the_same() -> None:
    from gpufeed.bench.progress import Silent

    def rows(workers: int):
        options = runner.SimOptions(
            jobs=(1, 2), cache_ratios=(0.5,), sizes=("equal",), speeds=("equal",), shard_count=40,
            epochs_min=1, workers=workers, policies=("gpufeed", "lru"),
        )  # fmt: skip
        return runner.run(options, Silent())["rows"]

    assert rows(1) == rows(2)
    assert multiprocessing.active_children() == []


def test_the_cost_of_decisions_is_measured(tmp_path: Path, capsys) -> None:
    out = tmp_path / "policy.json"
    flags = ["--shards", "2000", "--jobs", "3", "--reads", "400", "--json", str(out)]
    assert cli.main(["policy", *flags]) == 0
    result = json.loads(out.read_text())
    assert 0 < result["decisions"] <= 400
    assert result["decision_us_mean"] > 0
    assert {target["what"] for target in result["targets"]} == {
        "microseconds a decision", "microseconds a read", "bytes a shard",
    }  # fmt: skip
    assert "us a decision" in capsys.readouterr().out
