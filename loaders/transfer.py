"""Batches to the accelerator: `to_device`, and `record_stream` for who copies by himself.

A copy from a registered batch slot runs while the program goes on, so the slot may not be reused
before it has ended. What is copied on the stream that is current when the batch is let go is waited
for anyway; a copy on any other stream has to be told, as ``torch.Tensor.record_stream`` has it:
`to_device` tells its own, `record_stream` those of others. Batches that do not lie in registered
slots (copies on the heap, torch's pinned memory) need neither, and both functions take them too.

The CUDA side has not yet been verified on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpufeed.cachefs.errors import UsageError
from gpufeed.loaders.batchslots import SlotRing, find_slot
from gpufeed.loaders.streams import StreamKey, key_of

Move = Callable[[torch.Tensor], torch.Tensor]


def to_device(
    batch: Any,
    device: torch.device | str | int,
    *,
    non_blocking: bool = True,
    stream: torch.cuda.Stream | None = None,
) -> Any:
    """The batch with its tensors on `device`; what is no tensor stays as it is.

    Args:
        batch: tensors in dicts, lists, tuples and named tuples, nested.
        device: as in ``torch.Tensor.to``.
        non_blocking: as in ``torch.Tensor.to``.
        stream: copy on this stream of `device` instead of its current one. The current stream waits
            for it, without the program, and may use the result like its own.

    Raises:
        UsageError: `stream` is of another device.
        DeviceError: the accelerator failed.
    """
    target = torch.device(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(target, non_blocking=non_blocking)

    if target.type != "cuda":
        return _mapped(batch, move)
    consumer = torch.cuda.current_stream(target)
    if stream is None:
        return copy_out(batch, move, key_of(consumer))
    if stream.device != consumer.device:
        raise UsageError(f"the stream is of {stream.device}, the batch goes to {consumer.device}")

    def move_aside(tensor: torch.Tensor) -> torch.Tensor:
        moved = move(tensor)
        if moved is not tensor:  # its memory is of `stream`; reuse waits for the consumer too
            moved.record_stream(consumer)
        return moved

    with torch.cuda.stream(stream):
        moved = copy_out(batch, move_aside, key_of(stream))
    consumer.wait_stream(stream)
    return moved


def record_stream(batch: Any, stream: torch.cuda.Stream) -> None:
    """Tell that `stream` reads the batch: its memory is not reused before that has ended.

    For copies on a stream that is not the current one when the batch is let go. Call it before the
    batch is let go; the stream must live until the next batch is taken.
    """
    _declare(batch, key_of(stream))


def copy_out(batch: Any, move: Move, stream: StreamKey) -> Any:
    """Move the tensors, on `stream`, and let the slots that they lie in wait for just that."""
    moved = _mapped(batch, move)
    slots = _slots_of(batch)
    if slots:
        event = next(iter(slots))[0].record(stream)
        for ring, slot in slots:
            if event is None:  # a graph is being captured: wait for all that the stream gets
                ring.declare(slot, stream)
            else:
                ring.attach(slot, event)
    return moved


def _declare(batch: Any, stream: StreamKey) -> None:
    for ring, slot in _slots_of(batch):
        ring.declare(slot, stream)


def _slots_of(batch: Any) -> set[tuple[SlotRing, int]]:
    """The registered rings' slots in which tensors of the batch lie."""
    found = set()

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and tensor.numel():
            slot = find_slot(tensor.data_ptr())
            if slot is not None:
                found.add(slot)
        return tensor

    _mapped(batch, look)
    return found


def _mapped(value: Any, move: Move) -> Any:
    """The same tree with every tensor moved."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, dict):
        return {key: _mapped(part, move) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(part, move) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(part, move) for part in value)
    return value
