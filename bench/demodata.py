"""Demo data: textured JPEGs made from a seed, as tar shards and as loose objects.

The images have what JPEG decoders work on: broad-band texture, gradients, edges and colour, of
about 110 kB and 500x375 each. A byte of them depends on (`VERSION`, seed, index) and on the JPEG
library alone, never on how many processes made them.

On disk, under ``<work dir>/demodata-v<VERSION>-s<seed>-n<samples>/``::

    objects/<BUCKET>/tars/train-000000.tar    WebDataset layout: <key>.jpg, <key>.cls
    objects/<BUCKET>/loose/<class>/<key>.jpg  the same images, one object each
    manifest.json                             size, CRC-64 and BLAKE2b of each image

A directory without the ``.partial`` suffix is complete: it is renamed as the last step.

Processes: `shard_indices` cuts the work; ``python -m gpufeed.bench.demodata SPEC`` makes one part
of it and reports a JSON line a shard. The parent writes the manifest (`finish`).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg

from gpufeed.cachefs.checksum import crc64
from gpufeed.cachefs.errors import IntegrityError, UsageError

VERSION = 1
BUCKET = "gpufeed-demo"
CLASS_COUNT = 10
# 300 images of 110 kB, each with two tar headers and padding, make about 32 MiB.
SAMPLES_PER_SHARD = 300
SAMPLES_MAX = 1_000_000
QUALITY = 95

_FIELD_SIDE = 1024
_FIELD_COUNT = 6
_SIZES = ((375, 500), (375, 500), (375, 500), (500, 375), (333, 500), (400, 500))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """What to make. The same spec always makes the same bytes."""

    seed: int = 7
    sample_count: int = 6000
    samples_per_shard: int = SAMPLES_PER_SHARD

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            UsageError: out of range.
        """
        if not 1 <= self.sample_count <= SAMPLES_MAX:
            raise UsageError(
                f"{self.sample_count} samples of demo data; it must be 1 to {SAMPLES_MAX}"
            )
        if self.samples_per_shard < 1:
            raise UsageError("samples_per_shard must be at least 1")

    @property
    def shard_count(self) -> int:
        """How many tar shards hold the samples."""
        return -(-self.sample_count // self.samples_per_shard)

    @property
    def directory_name(self) -> str:
        """Name of the directory for this spec; it holds everything that changes the bytes."""
        name = f"demodata-v{VERSION}-s{self.seed}-n{self.sample_count}"
        if self.samples_per_shard != SAMPLES_PER_SHARD:
            name += f"-p{self.samples_per_shard}"
        return name


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One image as the manifest knows it. `crc64` is CRC-64/XZ of the JPEG."""

    index: int
    label: int
    size_bytes: int
    crc64: int
    blake2b: str


@dataclass(frozen=True, slots=True)
class DemoData:
    """A complete data set on disk."""

    root: Path
    spec: DataSpec
    samples: tuple[SampleRecord, ...]

    @property
    def objects_dir(self) -> Path:
        """The directory that an object store serves: one folder a bucket."""
        return self.root / "objects"

    @property
    def tar_keys(self) -> list[str]:
        """Object keys of the tar shards, in order."""
        return [tar_key(shard) for shard in range(self.spec.shard_count)]

    @property
    def tar_pattern(self) -> str:
        """The same as one brace pattern."""
        return f"tars/train-{{000000..{self.spec.shard_count - 1:06d}}}.tar"

    @property
    def loose_keys(self) -> list[str]:
        """Object keys of the loose images, by sample index."""
        return [loose_key(record.index, record.label) for record in self.samples]

    @property
    def image_bytes(self) -> int:
        """All JPEG bytes."""
        return sum(record.size_bytes for record in self.samples)

    def path_of(self, key: str) -> Path:
        """Where an object of the demo bucket lies on disk."""
        return self.objects_dir / BUCKET / key


def sample_key(index: int) -> str:
    """The key of a sample: ``00000042``."""
    return f"{index:08d}"


def tar_key(shard: int) -> str:
    """Object key of a tar shard."""
    return f"tars/train-{shard:06d}.tar"


def loose_key(index: int, label: int) -> str:
    """Object key of a loose image."""
    return f"loose/{label}/{sample_key(index)}.jpg"


class ImageMaker:
    """Draws the images of one seed. Costs about 3 ms an image, and 0.7 s once for the texture."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rng = np.random.default_rng([seed, 0])
        self._fields = np.stack([_texture(rng, number) for number in range(_FIELD_COUNT)])

    def label(self, index: int) -> int:
        """The class of image `index`."""
        return int(np.random.default_rng([self._seed, 2, index]).integers(CLASS_COUNT))

    def jpeg(self, index: int) -> bytes:
        """Image `index`, encoded."""
        pixels = self._draw(np.random.default_rng([self._seed, 1, index]))
        return bytes(
            simplejpeg.encode_jpeg(pixels, quality=QUALITY, colorsubsampling="420", fastdct=True)
        )

    def _draw(self, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
        height, width = _SIZES[rng.integers(len(_SIZES))]
        luma = self._crop(rng, height, width, int(rng.integers(8, 46)))
        chroma = self._crop(rng, height, width, int(rng.integers(4, 20)))
        base, rise, run = (rng.integers(low, high, 3) for low, high in ((60, 190), *_SLOPES))
        column = np.linspace(-32, 32, height).astype(np.int16)[:, None]
        row = np.linspace(-32, 32, width).astype(np.int16)[None]
        pixels = np.empty((height, width, 3), np.uint8)
        for channel in range(3):
            plane = luma + ((column * np.int16(rise[channel]) >> 6) + np.int16(base[channel]))
            plane += row * np.int16(run[channel]) >> 6
            if channel == 0:
                plane -= chroma
            elif channel == 2:
                plane += chroma
            np.clip(plane, 0, 255, out=plane)
            pixels[:, :, channel] = plane
        for _ in range(rng.integers(2, 6)):
            _draw_shape(rng, pixels)
        return pixels

    def _crop(
        self, rng: np.random.Generator, height: int, width: int, gain: int
    ) -> npt.NDArray[np.int16]:
        """A piece of texture, scaled by gain/64. 255 * 46 stays within 16 bits."""
        top = rng.integers(_FIELD_SIDE - height)
        left = rng.integers(_FIELD_SIDE - width)
        field = self._fields[rng.integers(_FIELD_COUNT), top : top + height, left : left + width]
        piece: npt.NDArray[np.int16] = field * np.int16(gain)
        piece >>= 6
        return piece[::-1] if rng.integers(2) else piece


_SLOPES = ((-50, 50), (-50, 50))


def _draw_shape(rng: np.random.Generator, pixels: npt.NDArray[np.uint8]) -> None:
    """Blend a disc or a square of one colour into the picture, in place."""
    height, width, _ = pixels.shape
    y, x, radius = (int(rng.integers(a, b)) for a, b in ((0, height), (0, width), (20, 110)))
    top, bottom = max(y - radius, 0), min(y + radius, height)
    left, right = max(x - radius, 0), min(x + radius, width)
    patch = pixels[top:bottom, left:right]
    mixed = (patch >> 1) + (rng.integers(0, 256, 3).astype(np.uint8) >> 1)
    if rng.integers(2):
        inside = (np.arange(top, bottom) - y)[:, None] ** 2 + (np.arange(left, right) - x)[
            None
        ] ** 2 < radius * radius
        np.copyto(patch, mixed, where=inside[:, :, None])
    else:
        patch[:] = mixed


def _texture(rng: np.random.Generator, number: int) -> npt.NDArray[np.int16]:
    """One square of noise: octaves of value noise, finer in low numbers, plus sensor grain."""
    slope = 0.25 + 0.08 * number
    field = np.zeros((_FIELD_SIDE, _FIELD_SIDE), np.float32)
    for cell in (4, 8, 16, 32, 64, 128):
        field += _octave(rng, cell) * np.float32((cell / 128) ** slope)
    field /= field.std()
    grain = rng.standard_normal((_FIELD_SIDE, _FIELD_SIDE), dtype=np.float32)
    grain[:, 1:] = (grain[:, 1:] + grain[:, :-1]) * np.float32(0.7)
    field = field * np.float32(0.85) + grain * np.float32(0.45)
    return np.clip(field * 80, -255, 255).astype(np.int16)


def _octave(rng: np.random.Generator, cell: int) -> npt.NDArray[np.float32]:
    """Smooth noise with one random value every `cell` pixels."""
    nodes = _FIELD_SIDE // cell + 2
    grid = rng.standard_normal((nodes, nodes), dtype=np.float32)
    at = np.arange(_FIELD_SIDE, dtype=np.float32) / np.float32(cell)
    low = at.astype(np.int64)
    part = at - low
    part = (part * part * (3 - 2 * part)).astype(np.float32)
    rows = grid[low] * (1 - part)[:, None] + grid[low + 1] * part[:, None]
    smooth: npt.NDArray[np.float32] = rows[:, low] * (1 - part) + rows[:, low + 1] * part
    return smooth


def make_shard(
    maker: ImageMaker, spec: DataSpec, shard: int, objects_dir: Path
) -> list[SampleRecord]:
    """Write one tar shard and its images as loose files; the directories exist already."""
    first = shard * spec.samples_per_shard
    last = min(first + spec.samples_per_shard, spec.sample_count)
    bucket = objects_dir / BUCKET
    records = []
    with tarfile.open(bucket / tar_key(shard), "w", format=tarfile.USTAR_FORMAT) as tar:
        for index in range(first, last):
            label, jpeg = maker.label(index), maker.jpeg(index)
            _add(tar, f"{sample_key(index)}.jpg", jpeg)
            _add(tar, f"{sample_key(index)}.cls", str(label).encode())
            (bucket / loose_key(index, label)).write_bytes(jpeg)
            digest = hashlib.blake2b(jpeg, digest_size=16).hexdigest()
            records.append(SampleRecord(index, label, len(jpeg), crc64(jpeg), digest))
    return records


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    member.mode = 0o644
    tar.addfile(member, io.BytesIO(data))


def make_directories(objects_dir: Path) -> None:
    """Make the empty folders that `make_shard` writes into."""
    (objects_dir / BUCKET / "tars").mkdir(parents=True)
    for label in range(CLASS_COUNT):
        (objects_dir / BUCKET / "loose" / str(label)).mkdir(parents=True)


def shard_indices(spec: DataSpec, part: int, parts: int) -> range:
    """The shards that process `part` of `parts` makes."""
    return range(part, spec.shard_count, parts)


def finish(partial: Path, final: Path, spec: DataSpec, records: list[SampleRecord]) -> DemoData:
    """Write the manifest, flush, and give the directory its final name."""
    ordered = tuple(sorted(records, key=lambda record: record.index))
    if [record.index for record in ordered] != list(range(spec.sample_count)):
        raise IntegrityError(f"demo data: {len(ordered)} of {spec.sample_count} samples were made")
    manifest = {
        "version": VERSION,
        "spec": asdict(spec),
        "samples": [list(_row(record)) for record in ordered],
    }
    (partial / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    # Written back now, so that it does not happen in the middle of a measurement.
    os.sync()
    partial.rename(final)
    return DemoData(final, spec, ordered)


def _row(record: SampleRecord) -> tuple[int, int, int, str, str]:
    # JSON readers may round integers above 2**53: the CRC travels as hex digits.
    return (
        record.index,
        record.label,
        record.size_bytes,
        f"{record.crc64:016x}",
        record.blake2b,
    )


def load(root: Path) -> DemoData:
    """Read the manifest of a complete data set.

    Raises:
        IntegrityError: missing or unreadable; remove the directory and make it again.
    """
    try:
        manifest: dict[str, Any] = json.loads((root / "manifest.json").read_text("utf-8"))
        samples = tuple(
            SampleRecord(index, label, size_bytes, int(crc, 16), digest)
            for index, label, size_bytes, crc, digest in manifest["samples"]
        )
        spec = DataSpec(**manifest["spec"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"demo data in {root} cannot be read ({error}); remove that directory and run again"
        ) from error
    return DemoData(root, spec, samples)


def main(argv: list[str]) -> int:
    """Make one part: ``[spec as JSON, objects directory, part, parts]``."""
    spec = DataSpec(**json.loads(argv[0]))
    objects_dir, part, parts = Path(argv[1]), int(argv[2]), int(argv[3])
    maker = ImageMaker(spec.seed)
    for shard in shard_indices(spec, part, parts):
        records = make_shard(maker, spec, shard, objects_dir)
        rows = [list(_row(record)) for record in records]
        print(json.dumps({"type": "shard", "shard": shard, "samples": rows}), flush=True)
    return 0


def records_from(message: dict[str, Any]) -> list[SampleRecord]:
    """The records of a ``shard`` message of `main`."""
    return [
        SampleRecord(index, label, size_bytes, int(crc, 16), digest)
        for index, label, size_bytes, crc, digest in message["samples"]
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
