"""Emulated accelerators: what stands in for the forward and backward pass of a training step.

`SleepAccelerator` frees the CPU until an absolute deadline, as a GPU does while the host waits for
it: the step does not grow when the sleeper is scheduled late within it, only when it wakes late.
`CudaAccelerator` copies the batch to the device and spins a kernel there.

A batch that is not full takes its share of the step, so that every contender has the same compute
to do for the same samples, however it cuts its batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from gpufeed.cachefs.errors import UsageError

STEP_S_MAX = 60.0
_CALIBRATION_CYCLES = 50_000_000


class Accelerator(Protocol):
    """Runs one step for a batch; returns when the step is over."""

    @property
    def description(self) -> str:
        """What it is and what it does not cover, for the report."""
        ...

    def step(self, images: Any, rows: int) -> None:
        """Train on `images`, which has `rows` rows."""
        ...


class SleepAccelerator:
    """A step that takes `step_s` seconds for `batch_size` rows and no CPU."""

    description = "a sleep to an absolute deadline; the copy to a device is not included"

    def __init__(
        self,
        step_s: float,
        batch_size: int,
        *,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        _check_step(step_s)
        self._row_s = step_s / batch_size
        self._now = now
        self._sleep = sleep

    def step(self, images: Any, rows: int) -> None:
        """Sleep until this step's deadline."""
        deadline = self._now() + self._row_s * rows
        while (left := deadline - self._now()) > 0:
            self._sleep(left)


class CudaAccelerator:
    """Copies each batch to the GPU and spins a kernel for `step_s` seconds.

    Not yet verified on hardware.
    """

    description = "copy to the GPU and a spin kernel; not yet verified on hardware"

    def __init__(self, step_s: float, batch_size: int) -> None:
        import torch  # noqa: PLC0415 the training process decides whether torch is there

        _check_step(step_s)
        if not torch.cuda.is_available():
            raise UsageError("--compute cuda: torch sees no CUDA device here; use --compute sleep")
        self._torch: Any = torch
        self._row_cycles = self._cycles_per_s() * step_s / batch_size

    def _spin(self, cycles: int) -> None:
        self._torch.cuda._sleep(cycles)

    def _cycles_per_s(self) -> float:
        event = self._torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        self._spin(_CALIBRATION_CYCLES)
        begin.record()
        self._spin(_CALIBRATION_CYCLES)
        end.record()
        self._torch.cuda.synchronize()
        return float(_CALIBRATION_CYCLES / (begin.elapsed_time(end) / 1e3))

    def step(self, images: Any, rows: int) -> None:
        """Copy, spin, and wait for the device."""
        on_device = images.to("cuda", non_blocking=True)
        self._spin(int(self._row_cycles * rows))
        self._torch.cuda.current_stream().synchronize()
        del on_device


def make(kind: str, step_s: float, batch_size: int) -> Accelerator:
    """The accelerator called `kind`: ``sleep`` or ``cuda``.

    Raises:
        UsageError: no such kind, no device, or a step out of range.
    """
    if kind == "sleep":
        return SleepAccelerator(step_s, batch_size)
    if kind == "cuda":
        return CudaAccelerator(step_s, batch_size)
    raise UsageError(f"no accelerator {kind!r}; use sleep or cuda")


def _check_step(step_s: float) -> None:
    if not 0 <= step_s <= STEP_S_MAX:
        raise UsageError(f"a step of {step_s * 1e3:.0f} ms; it must be 0 to {STEP_S_MAX:.0f} s")
