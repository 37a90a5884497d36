"""Choosing the step of the emulated accelerator: one length for every contender. Pure.

Two limits pull at it. The step must be long enough that the CPUs can decode for it with room to
spare (the origin, the daemon and the trainer share them), or even local files could not feed it.
And it must be short enough that one request an image visibly starves it, as a real GPU is. Both
rates are measured on this machine, without an accelerator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Part of the unthrottled decode rate that the accelerator asks for.
DEMAND_RATIO = 0.5
# What one request an image may reach at most; the promise is 0.20, the rest is for noise.
LOOSE_AU_RATIO_MAX = 0.195
GRAIN_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginShape:
    """How the origin answers: seconds to the first byte, bytes per second on one connection."""

    first_byte_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class StepChoice:
    """A step and why it is that long. Rates are None where they were not measured."""

    step_s: float
    reason: str
    ceiling_samples_per_s: float | None = None
    loose_samples_per_s: float | None = None


def step_for_ceiling(ceiling_samples_per_s: float, batch_size: int) -> float:
    """The step that asks for `DEMAND_RATIO` of what the CPUs decode, rounded up to the grain."""
    return math.ceil(batch_size / (ceiling_samples_per_s * DEMAND_RATIO) / GRAIN_S) * GRAIN_S


def step_cap_for_loose(
    loose_samples_per_s: float, *, batch_size: int, workers: int, steps: int
) -> float:
    """The longest step at which a loader of this pace stays within `LOOSE_AU_RATIO_MAX`.

    The first batch is outside the window, and the other workers' first batches arrive with it: of
    `steps` batches only ``steps - workers`` are waited for. Compute hides in the waiting for later
    batches, but for that of the last ones: utilisation is
    ``steps * step_s / ((steps - workers) * batch_s + workers * step_s)``.
    """
    batch_s = batch_size / loose_samples_per_s
    waited = max(steps - workers, 1)
    most = LOOSE_AU_RATIO_MAX
    cap_s = most * waited * batch_s / (steps - most * min(workers, steps))
    return max(GRAIN_S, math.floor(cap_s / GRAIN_S) * GRAIN_S)


def choose_step(
    ceiling_samples_per_s: float,
    loose_samples_per_s: float | None,
    *,
    batch_size: int,
    workers: int,
    loose_steps: int,
) -> StepChoice:
    """The step for a machine with these two rates; without the second, the first alone decides."""
    step_s = step_for_ceiling(ceiling_samples_per_s, batch_size)
    reason = (
        f"local files decode at {ceiling_samples_per_s:.0f} samples/s without an accelerator, and "
        f"{step_s * 1e3:.0f} ms a batch of {batch_size} asks for {DEMAND_RATIO:.0%} of that"
    )
    if loose_samples_per_s is not None:
        cap_s = step_cap_for_loose(
            loose_samples_per_s, batch_size=batch_size, workers=workers, steps=loose_steps
        )
        if cap_s < step_s:
            step_s = cap_s
            share = batch_size / step_s / ceiling_samples_per_s
            reason += (
                f"; shortened to {step_s * 1e3:.0f} ms, {share:.0%} of it, so that one request an "
                f"image ({loose_samples_per_s:.0f} samples/s) stays under {LOOSE_AU_RATIO_MAX:.0%}"
            )
    return StepChoice(step_s, reason, ceiling_samples_per_s, loose_samples_per_s)
