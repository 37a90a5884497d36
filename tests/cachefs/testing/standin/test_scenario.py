"""Fault rules decide by counts and by a seed, so that a failure can be replayed."""

from __future__ import annotations

import math
import statistics

import pytest

from gpufeed.cachefs.errors import ConfigError
from gpufeed.cachefs.testing.standin.scenario import Director, Scenario


def struck(rule: dict[str, object], count: int = 10, name: str = "b/k") -> list[int]:
    """Which of `count` GETs a 503 rule hits, from 1."""
    director = Director(Scenario.parse({"seed": 3, "faults": [{"status": 503, **rule}]}))
    return [n for n in range(1, count + 1) if director.effects("GET", name).status == 503]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ({"first": 2}, [1, 2]),
        ({"after": 7}, [8, 9, 10]),
        ({"after": 2, "first": 3}, [3]),
        ({"every": 4}, [4, 8]),
        ({"probability": 0.0}, []),
        ({"match": "b/other*"}, []),
        ({"match": "b/*"}, list(range(1, 11))),
        ({"methods": ["HEAD"]}, []),
        ({"methods": ["get"]}, list(range(1, 11))),
    ],
)
def test_a_rule_strikes_where_it_says(rule: dict[str, object], expected: list[int]) -> None:
    assert struck(rule) == expected


def test_the_same_seed_strikes_the_same_requests() -> None:
    once = struck({"probability": 0.3}, 1000)

    assert once == struck({"probability": 0.3}, 1000)
    assert 250 < len(once) < 350


def test_faults_that_apply_together_add_up() -> None:
    director = Director(
        Scenario.parse(
            {"faults": [{"flip_byte_at": 4}, {"qos_delay_ms": 50, "stall_after_bytes": 9}]}
        )
    )
    effects = director.effects("GET", "b/k")

    assert (effects.flip_byte_at, effects.stall_after_bytes) == (4, 9)
    assert (effects.qos_delay_ms, effects.delay_s) == (50, 0.05)


def test_latency_is_fixed_or_drawn_from_a_seeded_distribution() -> None:
    def draw(latency: object) -> list[float]:
        director = Director(Scenario.parse({"seed": 1, "first_byte_ms": latency}))
        return [director.first_byte_s() for _ in range(4000)]

    assert set(draw(20)) == {0.02}
    uniform = draw({"kind": "uniform", "low": 10, "high": 40})
    assert min(uniform) >= 0.01
    assert max(uniform) <= 0.04
    lognormal = draw({"kind": "lognormal", "median": 20, "p99": 200})
    assert lognormal == draw({"kind": "lognormal", "median": 20, "p99": 200})
    assert statistics.median(lognormal) == pytest.approx(0.02, rel=0.1)
    assert statistics.quantiles(lognormal, n=100)[98] == pytest.approx(0.2, rel=0.25)


@pytest.mark.parametrize(
    "scenario",
    [
        {"first_bite_ms": 3},
        {"faults": [{"reset": 1}]},
        {"first_byte_ms": {"kind": "normal", "mean": 3}},
        {"first_byte_ms": {"kind": "uniform", "low": 3}},
        {"faults": [{}] * 257},
        {"faults": {"status": 503}},
        {"faults": ["status"]},
        {"faults": [{"every": 0}]},
        {"faults": [{"probability": 1.5}]},
        {"faults": [{"probability": "often"}]},
        {"faults": [{"first": "2"}]},
        {"faults": [{"first": 1.5}]},
        {"faults": [{"status": 200}]},
        {"faults": [{"match": 3}]},
        {"faults": [{"methods": "GET"}]},
        {"faults": [{"ignore_range": 1}]},
        {"faults": [{"reset_after_bytes": -1}]},
        {"faults": [{"stall_after_bytes": 5, "stall_s": "long"}]},
        {"first_byte_ms": "abc"},
        {"first_byte_ms": -5},
        {"first_byte_ms": True},
        {"first_byte_ms": math.nan},
        {"first_byte_ms": {"kind": "uniform", "low": "a", "high": 3}},
        {"first_byte_ms": {"kind": "uniform", "low": 4, "high": 3}},
        {"first_byte_ms": {"kind": "lognormal", "median": 0, "p99": 1}},
        {"mb_per_s_total": -1},
        {"seed": "q"},
    ],
)
def test_a_scenario_that_is_not_one_is_refused(scenario: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="scenario"):
        Scenario.parse(scenario)
