import io
import pickle
import random

import numpy as np
import pytest
from PIL import Image

from gpufeed.cachefs.errors import CorruptSampleError, UsageError
from gpufeed.loaders.decode import image_crop, label_from_directory


def picture(width=500, height=375):
    """A smooth gradient: any place tells where it was."""
    x = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    y = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    return Image.fromarray(np.stack([x, y, np.full_like(x, 128)], -1).astype(np.uint8))


def encoded(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return memoryview(buffer.getvalue()).toreadonly()


def sample(data, field="jpg", label=b"7"):
    fields = {"__key__": "n01/x", "__url__": "u", field: data}
    return fields | ({"cls": memoryview(label)} if label is not None else {})


@pytest.mark.parametrize("resizer", ["torch", "pillow"])
@pytest.mark.parametrize(("layout", "shape"), [("CHW", (3, 224, 224)), ("HWC", (224, 224, 3))])
def test_an_image_becomes_a_square_crop_and_its_label(layout, shape, resizer):
    decode = image_crop(224, layout=layout, resizer=resizer)
    random.seed(1)
    image, label = decode(sample(encoded(picture(), quality=90)))
    assert image.shape == shape
    assert image.dtype == np.uint8
    assert label == 7
    if layout == "HWC":
        image = image.transpose(2, 0, 1)
    # A crop of a gradient is a gradient, steeper or not, mirrored or not.
    row = image[0, 100].astype(int)
    assert np.all(np.diff(row) >= -2) or np.all(np.diff(row) <= 2)
    assert abs(int(image[2].mean()) - 128) < 4


def test_the_same_seed_gives_the_same_pixels_and_another_one_others():
    decode = pickle.loads(pickle.dumps(image_crop(64)))
    data = encoded(picture())

    def run(seed):
        random.seed(seed)
        return decode(sample(data))[0].copy()

    assert np.array_equal(run(5), run(5))
    assert not np.array_equal(run(5), run(6))


@pytest.mark.parametrize("resizer", ["torch", "pillow"])
def test_both_resizers_agree_with_plain_pillow(resizer):
    decode = image_crop(224, train=False, label=None, layout="HWC", resizer=resizer)
    image = picture()
    got = decode(sample(encoded(image, quality=95), label=None)).astype(int)
    crop = image.crop((86, 23, 86 + 328, 23 + 328))
    want = np.asarray(crop.resize((224, 224), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(got - want).max() <= 4


@pytest.mark.parametrize(
    ("kind", "field", "mode"),
    [("PNG", "png", "RGB"), ("PNG", "png", "RGBA"), ("PNG", "png", "P"), ("WEBP", "webp", "RGB"),
     ("JPEG", "jpeg", "CMYK"), ("JPEG", "jpg", "L"), ("PNG", "png", "L")],
)  # fmt: skip
def test_other_formats_and_colours_come_out_as_rgb(kind, field, mode):
    decode = image_crop(32, train=False)
    image, _ = decode(sample(encoded(picture(60, 50).convert(mode), kind), field))
    assert image.shape == (3, 32, 32)
    assert image.std() > 0


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1), (8, 2000)])
@pytest.mark.parametrize("resizer", ["torch", "pillow"])
def test_images_of_any_proportion_are_cropped(size, resizer):
    decode = image_crop(16, resizer=resizer)
    for seed in range(20):
        random.seed(seed)
        image, _ = decode(sample(encoded(picture(*size))))
        assert image.shape == (3, 16, 16)


def test_images_of_changing_size_do_not_mix_in_the_reused_buffer():
    decode = image_crop(16, train=False, label=None)
    for size in ((500, 375), (20, 10), (800, 600), (31, 33)):
        flat = Image.new("RGB", size, (size[0] % 256, 10, 20))
        image = decode(sample(encoded(flat, quality=100), label=None))
        assert np.abs(image[0].astype(int) - size[0] % 256).max() <= 2


@pytest.mark.parametrize("data", [b"", b"nonsense", bytes(encoded(picture()))[:2000][:3] + b"x"])
def test_what_is_no_image_is_a_corrupt_sample(data):
    with pytest.raises(CorruptSampleError):
        image_crop()(sample(memoryview(data)))


def test_a_sample_without_an_image_says_what_it_has():
    with pytest.raises(CorruptSampleError, match="the sample has txt, cls"):
        image_crop()(sample(memoryview(b""), field="txt"))


def test_labels_come_from_a_field_a_callable_or_nowhere():
    data = encoded(picture(40, 40))
    assert image_crop(8, label=label_from_directory)(sample(data))[1] == "n01"
    assert image_crop(8, label=None)(sample(data)).shape == (3, 8, 8)
    with pytest.raises(CorruptSampleError):
        label_from_directory({"__key__": "flat", "__url__": "u"})


@pytest.mark.parametrize(
    "options",
    [{"resizer": "cv2"}, {"size": 0}, {"layout": "NHWC"}, {"scale": (0, 1)}, {"ratio": (2, 1)}],
)
def test_bad_options_are_refused(options):
    with pytest.raises(UsageError):
        image_crop(**options)
