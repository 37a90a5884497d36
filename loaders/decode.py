"""Decoders for common samples: `image_crop` for training images.

They are picklable, keep nothing of the sample, and draw from Python's `random`, which the engine
seeds for each sample. JPEGs are decoded by simplejpeg into a buffer that each thread reuses;
whatever simplejpeg refuses (CMYK, other formats, damage it will not repair) goes through Pillow.
Resizing is torch's, which is vectorised and three times as fast as Pillow's, where torch is
installed. Which of the two is settled when the decoder is made, so that all workers agree.
"""

from __future__ import annotations

import importlib.util
import io
import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpufeed.cachefs.errors import CorruptSampleError, UsageError

Layout = Literal["HWC", "CHW"]
Resizer = Literal["auto", "torch", "pillow"]
Box = tuple[int, int, int, int]  # left, top, right, bottom
Pixels = npt.NDArray[np.uint8]

IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp")
IMAGE_PIXELS_MAX = 178_956_970  # Pillow's own limit against decompression bombs
_CROP_TRIES = 10
_JPEG_MAGIC = b"\xff\xd8\xff"


class _Buffer(threading.local):
    """Decoded pixels of the image under way, reused: fresh pages would cost as much as resizing."""

    pixels: Pixels = np.empty(0, dtype=np.uint8)


_buffer = _Buffer()


def image_crop(  # noqa: PLR0913 every argument is a public option of the transform
    size: int = 224,
    *,
    field: str | Sequence[str] = IMAGE_FIELDS,
    label: str | Callable[[dict[str, Any]], Any] | None = "cls",
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: bool = True,
    train: bool = True,
    layout: Layout = "CHW",
    resizer: Resizer = "auto",
) -> Callable[[dict[str, Any]], Any]:
    """A decoder: image to a `size` x `size` uint8 array by random resized crop and flip.

    Args:
        size: edge of the result, pixels.
        field: name of the image field, or names of which the first present is taken.
        label: a field that holds a whole number in text, a callable on the sample, or None.
        scale: range of the crop's area, as part of the image.
        ratio: range of the crop's width to height.
        flip: mirror half of the images.
        train: False takes the central crop of 7/8 of the shorter edge, without flip.
        layout: ``"CHW"`` or ``"HWC"``.
        resizer: ``"torch"``, ``"pillow"``, or ``"auto"`` for torch where it is installed. Both
            filter bilinearly with antialiasing; pixels may differ by rounding.

    Returns:
        A picklable callable from a sample to ``(image, label)``, or to the image without label.

    Raises:
        UsageError: an argument is out of range.
    """
    if size < 1 or layout not in ("HWC", "CHW"):
        raise UsageError(f"size is {size} and layout {layout!r}; want a positive size, HWC or CHW")
    if not (0 < scale[0] <= scale[1] <= 1 and 0 < ratio[0] <= ratio[1]):
        raise UsageError(f"scale is {scale}, ratio {ratio}; want ascending positive ranges")
    fields = (field,) if isinstance(field, str) else tuple(field)
    if resizer not in ("auto", "torch", "pillow"):
        raise UsageError(f"resizer is {resizer!r}; it must be auto, torch or pillow")
    with_torch = resizer == "torch"
    if resizer == "auto":
        with_torch = importlib.util.find_spec("torch") is not None
    options = (flip and train, train, layout, with_torch)
    return _ImageCrop(size, fields, label, (scale, ratio), options)


def label_from_directory(sample: dict[str, Any]) -> str:
    """The last directory of the sample's key: ``"n01440764"`` of ``"train/n01440764/17"``."""
    parts = str(sample["__key__"]).rsplit("/", 2)
    if len(parts) < 2:
        raise CorruptSampleError(f"key {sample['__key__']!r} of {sample['__url__']} has no folder")
    return parts[-2]


class _ImageCrop:
    def __init__(
        self,
        size: int,
        fields: tuple[str, ...],
        label: str | Callable[[dict[str, Any]], Any] | None,
        ranges: tuple[tuple[float, float], tuple[float, float]],
        options: tuple[bool, bool, Layout, bool],
    ) -> None:
        self.size = size
        self.fields = fields
        self.label = label
        self.scale, self.ratio = ranges
        self.flip, self.train, self.layout, self.with_torch = options

    def __call__(self, sample: dict[str, Any]) -> Any:
        data = next((sample[name] for name in self.fields if name in sample), None)
        if data is None:
            have = ", ".join(name for name in sample if not name.startswith("__"))
            raise CorruptSampleError(f"no field of {', '.join(self.fields)}; the sample has {have}")
        image = self._image(data)
        if self.label is None:
            return image
        if callable(self.label):
            return image, self.label(sample)
        if self.label not in sample:
            fields = ", ".join(name for name in sample if not name.startswith("__"))
            raise UsageError(
                f"sample {sample.get('__key__')} has no field {self.label!r} (it has {fields}): "
                "pass label=None, a field, or a callable such as label_from_directory"
            )
        return image, int(bytes(sample[self.label]))

    def _image(self, data: memoryview | bytes) -> Pixels:
        pixels = _decode(data, "RGB" if self.with_torch else "RGBX")
        height, width, _ = pixels.shape
        box = self._box(width, height)
        mirror = self.flip and random.random() < 0.5  # noqa: S311 seeded on purpose
        resize = _resize_torch if self.with_torch else _resize_pillow
        small = resize(pixels, box, self.size)
        if mirror:
            small = small[:, :, ::-1]
        if self.layout == "HWC":
            small = small.transpose(1, 2, 0)
        # Negative strides are what torch cannot take. Otherwise the write into the batch copies.
        return np.ascontiguousarray(small) if mirror or self.layout == "HWC" else small

    def _box(self, width: int, height: int) -> Box:
        if not self.train:
            edge = min(width, height) * 7 / 8
            return _centred(width, height, edge, edge)
        area = width * height
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_CROP_TRIES):
            target = area * random.uniform(*self.scale)  # noqa: S311 seeded on purpose
            aspect = math.exp(random.uniform(low, high))  # noqa: S311 seeded on purpose
            crop_width = round(math.sqrt(target * aspect))
            crop_height = round(math.sqrt(target / aspect))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                left = random.randint(0, width - crop_width)  # noqa: S311 seeded on purpose
                top = random.randint(0, height - crop_height)  # noqa: S311 seeded on purpose
                return (left, top, left + crop_width, top + crop_height)
        aspect = min(max(width / height, self.ratio[0]), self.ratio[1])
        return _centred(width, height, min(width, height * aspect), min(height, width / aspect))


def _centred(width: int, height: int, crop_width: float, crop_height: float) -> Box:
    wide, high = max(1, round(crop_width)), max(1, round(crop_height))
    left, top = (width - wide) // 2, (height - high) // 2
    return (left, top, left + wide, top + high)


def _resize_torch(pixels: Pixels, box: Box, size: int) -> Pixels:
    """The box of an RGB image as CHW."""
    import torch  # noqa: PLC0415 only where images are resized by it

    left, top, right, bottom = box
    crop = torch.from_numpy(pixels[top:bottom, left:right]).permute(2, 0, 1).unsqueeze(0)
    small = torch.nn.functional.interpolate(crop, (size, size), mode="bilinear", antialias=True)
    result: Pixels = small[0].numpy()
    return result


def _resize_pillow(pixels: Pixels, box: Box, size: int) -> Pixels:
    """The same of an RGBX image, which Pillow reads in place."""
    from PIL import Image  # noqa: PLC0415 only where images are resized by it

    height, width, _ = pixels.shape
    image = Image.frombuffer("RGBX", (width, height), pixels, "raw", "RGBX", 0, 1)
    small = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return np.asarray(small)[..., :3].transpose(2, 0, 1)


def _decode(data: memoryview | bytes, mode: Literal["RGB", "RGBX"]) -> Pixels:
    """The image, ``[height, width, bands]``. A JPEG's pixels lie in this thread's buffer."""
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 only where images are decoded

    if bytes(data[:3]) == _JPEG_MAGIC:
        pixels = _decode_jpeg(data, mode)
        if pixels is not None:
            return pixels
    try:
        with Image.open(io.BytesIO(data)) as opened:
            return np.array(opened.convert("RGB").convert(mode))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise CorruptSampleError(f"an image of {len(data)} bytes cannot be decoded: {error}") from (
            error
        )


def _decode_jpeg(data: memoryview | bytes, mode: Literal["RGB", "RGBX"]) -> Pixels | None:
    import simplejpeg  # noqa: PLC0415 only where JPEGs are decoded

    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours in ("CMYK", "YCCK") or height * width > IMAGE_PIXELS_MAX:
            return None
        if _buffer.pixels.nbytes < 4 * height * width:
            _buffer.pixels = np.empty(4 * height * width, dtype=np.uint8)
        pixels: Pixels = simplejpeg.decode_jpeg(
            data, colorspace=mode, fastdct=True, fastupsample=True, buffer=_buffer.pixels
        )
    except ValueError:
        return None
    return pixels
