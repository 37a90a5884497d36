"""The step fits what the CPUs decode and what one request an image can reach."""

import pytest

from gpufeed.bench.stepchoice import (
    LOOSE_AU_RATIO_MAX,
    choose_step,
    step_cap_for_loose,
    step_for_ceiling,
)


def test_the_step_asks_for_a_part_of_what_local_files_decode():
    step_s = step_for_ceiling(1000.0, 64)
    assert step_s == pytest.approx(0.130)
    assert 64 / step_s <= 0.5 * 1000


def test_the_cap_keeps_the_slow_loader_under_its_limit():
    batch_s = 64 / 80.0
    cap_s = step_cap_for_loose(80.0, batch_size=64, workers=2, steps=15)
    # Fifteen steps of compute against thirteen batches that are waited for and a tail of two.
    assert 15 * cap_s / (13 * batch_s + 2 * cap_s) <= LOOSE_AU_RATIO_MAX


def test_fast_cpus_get_the_step_that_the_ceiling_needs():
    choice = choose_step(2000.0, 80.0, batch_size=64, workers=2, loose_steps=15)
    assert choice.step_s == pytest.approx(step_for_ceiling(2000.0, 64))
    assert "shortened" not in choice.reason


def test_slow_cpus_get_the_cap_and_the_reason_says_so():
    choice = choose_step(400.0, 80.0, batch_size=64, workers=2, loose_steps=15)
    assert choice.step_s == step_cap_for_loose(80.0, batch_size=64, workers=2, steps=15)
    assert "shortened" in choice.reason


def test_without_a_slow_contender_the_ceiling_decides():
    choice = choose_step(400.0, None, batch_size=64, workers=2, loose_steps=15)
    assert choice.step_s == pytest.approx(step_for_ceiling(400.0, 64))


def test_a_step_is_never_zero():
    assert step_cap_for_loose(1e9, batch_size=1, workers=4, steps=1) > 0
