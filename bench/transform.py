"""What every contender does to a sample: decode, random-resized-crop to 224, checksum, number.

The same callable for all, so that they differ in how the bytes arrive and in nothing else. The
checksum (CRC-64 of the JPEG as the decoder received it, some 3 us) is what the exactly-once and
equal-bytes check of every epoch works on; its cost is the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpufeed.cachefs.checksum import crc64
from gpufeed.loaders.decode import image_crop

CROP_PIXELS = 224

Row = dict[str, Any]


class DemoDecode:
    """Turns a raw sample (``jpg``, ``__key__`` and, in tars, ``cls``) into the arrays of one row.

    Loose objects have no ``cls``: their class is the last folder of the key.
    """

    def __init__(self) -> None:
        self._crop = image_crop(CROP_PIXELS, label=None)

    def __call__(self, sample: Mapping[str, Any]) -> Row:
        """Decode one sample."""
        jpeg = sample["jpg"]
        folder, _, name = str(sample["__key__"]).rpartition("/")
        label = bytes(sample["cls"]) if "cls" in sample else folder.rpartition("/")[2]
        return {
            "image": self._crop(dict(sample)),
            "label": np.int64(int(label)),
            "index": np.int64(int(name)),
            "checksum": signed(crc64(jpeg)),
        }


def signed(checksum: int) -> np.int64:
    """The 64 bits of `checksum` as torch can hold them."""
    return np.uint64(checksum).astype(np.int64)


def collate(rows: Sequence[Row]) -> dict[str, Any]:
    """Stack rows, in a worker straight into shared memory: one copy, as torch's default does.

    Only the images become a tensor. torch hands tensors over one by one, each by a handshake with
    the worker, and the numbers that this bench needs for its checks must not cost anybody that.
    """
    import torch  # noqa: PLC0415 the parent process never needs torch

    first = rows[0]["image"]
    shape = (len(rows), *first.shape)
    if torch.utils.data.get_worker_info() is None:
        images = torch.empty(shape, dtype=torch.uint8)
    else:
        size = len(rows) * first.size
        storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]  # torch's
        images = torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
    pixels = images.numpy()
    for row, target in zip(rows, pixels, strict=True):
        target[:] = row["image"]
    batch: dict[str, Any] = {"image": images}
    for name in ("label", "index", "checksum"):
        batch[name] = np.array([row[name] for row in rows], np.int64)
    return batch
