"""Slots against torch: what is read from a slot is what `default_collate` would have made."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from gpufeed.loaders.batch import BatchRecord, HandOver
from gpufeed.loaders.batchslots import SlotRing, SlotWriter
from gpufeed.loaders.layout import find_layout

Pair = namedtuple("Pair", "left right")

DTYPES = ["u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "?", "c8"]


def leaves(rng):
    return {
        "array": lambda: rng.integers(0, 100, (2, 3)).astype(rng.choice(["u1"])),
        "int": lambda: int(rng.integers(-(2**62), 2**62)),
        "float": lambda: float(rng.random()),
        "bool": lambda: bool(rng.integers(2)),
        "str": lambda: f"text {rng.integers(1000)}",
        "bytes": lambda: rng.bytes(3),
        "number": lambda: np.float32(rng.random()),
        "double": lambda: np.float64(rng.random()),
        "tensor": lambda: torch.from_numpy(rng.random((4,))),
        "scalar array": lambda: np.array(rng.random()),
        "empty": lambda: np.zeros((0, 3), dtype=np.int32),
    }


shapes = st.recursive(
    st.sampled_from(sorted(leaves(np.random.default_rng(0)))),
    lambda child: st.one_of(
        st.lists(child, min_size=1, max_size=3).map(lambda c: ("list", c)),
        st.lists(child, min_size=1, max_size=3).map(lambda c: ("tuple", c)),
        st.lists(child, min_size=1, max_size=3).map(lambda c: ("dict", c)),
        st.tuples(child, child).map(lambda c: ("pair", list(c))),
    ),
    max_leaves=6,
)


def make(shape, rng):
    if isinstance(shape, str):
        return leaves(rng)[shape]()
    kind, children = shape
    parts = [make(child, rng) for child in children]
    if kind == "list":
        return parts
    if kind == "tuple":
        return tuple(parts)
    return Pair(*parts) if kind == "pair" else {f"k{i}": part for i, part in enumerate(parts)}


def same(left, right):
    assert type(left) is type(right), (left, right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert torch.equal(left, right)
    elif isinstance(left, np.ndarray | np.generic):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for name in left:
            same(left[name], right[name])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            same(a, b)
    else:
        assert left == right


def through_slot(samples, rows):
    """Collate by way of a slot. None when the layout does not take the first sample."""
    layout = find_layout(samples[0], rows)
    if layout is None:
        return None
    ring = SlotRing()
    assert ring.configure(layout, 2)
    writer = SlotWriter(ring.fd, ring.shape)
    slot = ring.take()
    record = BatchRecord(1, 0, 1, slot)
    for row, sample in enumerate(samples):
        objects = writer.write(slot, row, sample)
        assert objects is not None, sample
        record.objects[row] = objects
    record.rows = len(samples)
    back = layout.read_row(layout.views(ring.read(slot)), record.objects[0], 0)
    same(back, samples[0])
    batch = HandOver(ring).to_torch(record)
    ring.close()
    return batch


@settings(max_examples=150, deadline=None)
@given(shapes, st.integers(1, 5), st.integers(0, 3), st.integers(0, 2**31))
def test_a_batch_from_a_slot_is_what_torch_collates(shape, rows, spare, seed):
    rng = np.random.default_rng(seed)
    samples = [make(shape, rng) for _ in range(rows)]
    batch = through_slot(samples, rows + spare)
    if batch is not None:
        same(batch, default_collate(samples))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_plain_dtype_has_a_column(dtype):
    samples = [np.ones((2, 2), dtype=dtype) * n for n in range(3)]
    same(through_slot(samples, 3), default_collate(samples))


@pytest.mark.parametrize(
    "sample",
    [
        None, object(), [], {}, np.array(["a"]), np.array([None]), "only text", {1, 2},
        torch.ones(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True),
        np.zeros(2, dtype=">i4"), (1, None),
    ],
)  # fmt: skip
def test_what_has_no_fixed_place_has_no_layout(sample):
    assert find_layout(sample, 4) is None


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (1, 1.0), (1, True), (1, 2**63), (1.0, 1), (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.zeros(2, "f4")), ((1, 2), [1, 2]), ((1, 2), (1, 2, 3)),
        ({"a": 1}, {"b": 1}), ({"a": 1}, {"a": 1, "b": 2}), ((1, "x"), (1, b"x"[0])),
        (torch.zeros(2), np.zeros(2, "f4")), (Pair(1, 2), (1, 2)), (np.int8(1), 1),
    ],
)  # fmt: skip
def test_a_sample_that_does_not_fit_is_told(first, other):
    layout = find_layout(first, 2)
    ring = SlotRing()
    ring.configure(layout, 2)
    writer = SlotWriter(ring.fd, ring.shape)
    assert writer.write(0, 0, first) is not None
    assert writer.write(0, 1, other) is None
    ring.close()


def test_torch_tensors_that_are_not_contiguous_are_written_right():
    samples = [torch.arange(6).reshape(2, 3).t() + n for n in range(2)]
    same(through_slot(samples, 2), default_collate(samples))
