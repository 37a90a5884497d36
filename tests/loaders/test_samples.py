import numpy as np
import pytest
import torch

from gpufeed.loaders.samples import SampleMaker, Task


def maker_and_arena(decode):
    arena = bytearray(b"0123456789" * 10)
    return SampleMaker(memoryview(arena).toreadonly(), decode), arena


TASK = Task("key", "shard", 0, 5, (("bin", ((10, 10),)), ("two", ((0, 5), (95, 5)))))


@pytest.mark.parametrize(
    "decode",
    [
        lambda sample: np.frombuffer(sample["bin"], np.uint8),
        lambda sample: [np.frombuffer(sample["bin"][2:], np.uint8)],
        lambda sample: {"x": np.asarray(sample["bin"])[::2]},
        lambda sample: torch.from_numpy(np.frombuffer(sample["bin"], np.uint8)),
    ],
    ids=["array", "slice in a list", "strided", "tensor"],
)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_a_kept_sample_never_lies_over_the_arena(decode):
    maker, arena = maker_and_arena(decode)
    sample = maker.make_owned(TASK)
    before = str(sample)
    arena[:] = b"\xee" * len(arena)
    assert str(sample) == before


def test_a_sample_that_owns_its_memory_is_not_copied():
    made = []

    def decode(sample):
        made.append(np.frombuffer(sample["bin"], np.uint8).copy())
        return made[-1]

    maker, _ = maker_and_arena(decode)
    assert maker.make_owned(TASK) is made[-1]


def test_fields_are_read_only_views_and_pieces_are_joined():
    seen = []

    def decode(sample):
        seen.append((sample["bin"].readonly, bytes(sample["bin"]), bytes(sample["two"])))

    maker, _ = maker_and_arena(decode)
    maker.make(TASK)
    maker.make_owned(TASK)
    assert seen == [(True, b"0123456789", b"0123456789"[:5] + b"56789")] * 2


def test_without_decode_fields_are_bytes_of_their_own():
    maker, arena = maker_and_arena(None)
    sample = maker.make(TASK)
    arena[:] = b"\xee" * len(arena)
    assert sample["bin"] == b"0123456789"
    assert type(sample["two"]) is bytes
