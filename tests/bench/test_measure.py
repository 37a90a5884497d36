"""One window for every number, and the check that each sample came once with its own bytes."""

import os
import subprocess
import sys

import numpy as np
import pytest

from gpufeed.bench.measure import Batch, Epoch, busy_cpu_s, quantile, run_epoch, tree_cpu_s, verify
from gpufeed.cachefs.errors import IntegrityError


class Clock:
    """Time that moves only when told to."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def pass_s(self, seconds):
        self.now_s += seconds


class Device:
    """An accelerator that takes a fixed time on the test's clock."""

    description = "test"

    def __init__(self, clock, step_s):
        self.clock, self.step_s = clock, step_s

    def step(self, images, rows):
        self.clock.pass_s(self.step_s)


def batch(first, rows, checksum=lambda index: index * 10):
    indices = np.arange(first, first + rows, dtype=np.uint64)
    checksums = np.array([checksum(int(index)) for index in indices], np.uint64)
    return Batch(images=None, indices=indices, checksums=checksums)


def loader(clock, *, open_s, waits_s, rows=4):
    def open_epoch():
        clock.pass_s(open_s)

        def batches():
            for number, wait_s in enumerate(waits_s):
                clock.pass_s(wait_s)
                yield batch(number * rows, rows)
            clock.pass_s(50.0)  # ending the workers: not part of any number

        return batches()

    return open_epoch


def test_the_first_batch_counts_for_throughput_and_not_for_utilisation():
    clock = Clock()
    epoch = run_epoch(
        loader(clock, open_s=1.0, waits_s=[2.0, 0.5, 0.5, 1.0]), Device(clock, 0.5), now=clock
    )
    assert epoch.first_batch_s == pytest.approx(3.0)
    assert epoch.stall_s == pytest.approx(2.0)
    assert epoch.au_pct == pytest.approx(100 * 2.0 / 4.0)
    assert epoch.wall_s == pytest.approx(3.0 + 2.0 + 2.0)
    assert epoch.samples_per_s == pytest.approx(16 / 7.0)


def test_wait_percentiles_leave_the_first_batch_out():
    epoch = Epoch(waits_s=[9.0, 0.001, 0.002, 0.003, 0.004], computes_s=[0.1] * 5, rows=[1] * 5)
    assert epoch.wait_ms(0.5) == pytest.approx(2.0)
    assert epoch.wait_ms(0.99) == pytest.approx(4.0)


def test_an_epoch_without_steps_measures_nothing():
    epoch = Epoch()
    assert (epoch.au_pct, epoch.samples_per_s, epoch.first_batch_s) == (0.0, 0.0, 0.0)


def test_quantiles_are_values_that_occurred():
    assert quantile([], 0.5) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.0) == 1.0
    assert quantile([1.0, 2.0], 1.0) == 2.0


def epoch_of(*batches):
    epoch = Epoch()
    for piece in batches:
        epoch.indices.append(piece.indices)
        epoch.checksums.append(piece.checksums)
    return epoch


def check(epoch, count):
    verify(epoch, range(count), lambda index: index * 10, "test, cold epoch")


def test_a_complete_epoch_in_any_order_is_accepted():
    check(epoch_of(batch(4, 4), batch(0, 4)), 8)


def test_checksums_above_63_bits_are_compared_exactly():
    big = 2**64 - 7
    epoch = epoch_of(batch(0, 1, lambda _: big))
    verify(epoch, [0], lambda _: big, "test")
    with pytest.raises(IntegrityError, match="1 with wrong bytes"):
        verify(epoch, [0], lambda _: big - 1, "test")


@pytest.mark.parametrize(
    ("batches", "count", "message"),
    [
        ([(0, 4)], 5, "1 missing .*sample 4"),
        ([(0, 4), (3, 2)], 5, "1 repeated .*sample 3"),
        ([(0, 6)], 5, "1 unknown .*sample 5"),
        ([], 5, "5 missing"),
    ],
)
def test_a_missing_repeated_or_unknown_sample_is_named(batches, count, message):
    with pytest.raises(IntegrityError, match=message):
        check(epoch_of(*(batch(*piece) for piece in batches)), count)


def test_wrong_bytes_are_named():
    with pytest.raises(IntegrityError, match=r"1 with wrong bytes \(first: sample 2\)"):
        check(epoch_of(batch(0, 4, lambda index: index * 10 + (index == 2))), 4)


def test_cpu_time_of_ended_children_is_counted():
    before = tree_cpu_s(os.getpid())
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert tree_cpu_s(os.getpid()) - before >= 0.25


def test_cpu_time_of_a_process_that_is_gone_is_nothing():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert tree_cpu_s(done.pid) == 0.0


def test_the_whole_machine_is_at_least_as_busy_as_we_are():
    machine, own = busy_cpu_s(), tree_cpu_s(os.getpid())
    subprocess.run([sys.executable, "-c", "sum(range(30_000_000))"], check=True)
    used = tree_cpu_s(os.getpid()) - own
    # Both clocks tick in steps of 10 ms, and not at the same moment.
    assert busy_cpu_s() - machine >= used - 0.1
