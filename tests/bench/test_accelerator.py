"""The emulated accelerator keeps its deadline and leaves the CPU alone."""

import pytest

from gpufeed.bench import accelerator
from gpufeed.bench.accelerator import SleepAccelerator
from gpufeed.cachefs.errors import UsageError


class Sleeper:
    """A clock that sleeping moves; `early` wakes up before the time, as signals make it."""

    def __init__(self, early=1.0):
        self.now_s, self.early, self.slept = 0.0, early, []

    def now(self):
        return self.now_s

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds if len(self.slept) > 1 else seconds * self.early


def test_a_full_batch_takes_the_step():
    clock = Sleeper()
    SleepAccelerator(0.08, 64, now=clock.now, sleep=clock.sleep).step(None, 64)
    assert clock.now_s == pytest.approx(0.08)


def test_a_part_of_a_batch_takes_its_part_of_the_step():
    clock = Sleeper()
    SleepAccelerator(0.08, 64, now=clock.now, sleep=clock.sleep).step(None, 16)
    assert clock.now_s == pytest.approx(0.02)


def test_a_sleep_that_ends_early_goes_on_to_the_same_deadline():
    clock = Sleeper(early=0.25)
    SleepAccelerator(0.08, 64, now=clock.now, sleep=clock.sleep).step(None, 64)
    assert clock.slept == pytest.approx([0.08, 0.06])
    assert clock.now_s == pytest.approx(0.08)


def test_no_step_means_no_sleep():
    clock = Sleeper()
    SleepAccelerator(0.0, 64, now=clock.now, sleep=clock.sleep).step(None, 64)
    assert clock.slept == []


def test_unknown_accelerators_and_steps_out_of_range_are_refused():
    with pytest.raises(UsageError, match="sleep or cuda"):
        accelerator.make("tpu", 0.1, 64)
    with pytest.raises(UsageError, match="0 to 60 s"):
        accelerator.make("sleep", 61.0, 64)


def test_cuda_without_a_device_is_refused_in_one_line():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(UsageError, match="no CUDA device"):
        accelerator.make("cuda", 0.1, 64)


@pytest.mark.gpu
def test_a_cuda_step_takes_about_its_time():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = accelerator.make("cuda", 0.05, 4)
    device.step(torch.zeros(4, 3, 8, 8, dtype=torch.uint8).pin_memory(), 4)
