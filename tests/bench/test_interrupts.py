"""The first signal becomes an exception, the rest are ignored, clean-up is finished."""

import os
import signal

import pytest

from gpufeed.bench.interrupts import SIGNALS, Interrupted, deferred, interruptible, to_the_end


def raise_signal(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_becomes_an_exception_with_the_shells_status(number):
    with pytest.raises(Interrupted) as caught, interruptible():
        raise_signal(number)
    assert caught.value.exit_status == 128 + number


def test_later_signals_do_not_cut_the_clean_up_short():
    done = []

    def end_twice():
        try:
            raise_signal(signal.SIGTERM)
        finally:
            raise_signal(signal.SIGINT)
            raise_signal(signal.SIGTERM)
            done.append(1)

    with pytest.raises(Interrupted), interruptible():
        end_twice()
    assert done == [1]


def test_a_signal_in_a_deferred_block_waits_for_its_end():
    done = []

    def start_something():
        with deferred():
            raise_signal(signal.SIGTERM)
            done.append("started")
        done.append("unreachable")

    with pytest.raises(Interrupted) as caught, interruptible():
        start_something()
    assert done == ["started"]
    assert caught.value.exit_status == 143
    with deferred():
        pass


def test_the_handlers_from_before_come_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with interruptible():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_signal_in_the_middle_of_a_clean_up_does_not_leave_it_half_done():
    left = [1, 2, 3]

    def clean_up():
        while left:
            left.pop()
            if len(left) == 2:
                raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted), interruptible():
        to_the_end(clean_up)
    assert left == []
