"""The contenders: each turns a `ContenderSpec` into epochs of batches, by one way of loading.

``before``: ``loose-http`` and ``loose-ossfs`` (one request an image), ``webdataset-direct`` (tars
streamed). ``ceiling``: the same images as local files in the page cache. ``after``: ``gpufeed``
over the tars and ``gpufeed-loose`` over the same loose objects, through a running daemon.

All decode, crop and collate with `gpufeed.bench.transform`, in the same number of worker
processes, into uint8 batches of the same size. A contender is made cheaply; `epoch` opens the
loader on its first call, so that opening is inside the measured time, and `prepare` does what is
not to be measured (imports).

Contenders live in a process of their own (`gpufeed.bench.contender`).
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gpufeed.bench import demodata
from gpufeed.bench.measure import Batch
from gpufeed.bench.readers import FileReader, HttpReader, OssfsReader
from gpufeed.bench.sharedmemory import RecordProcess
from gpufeed.bench.transform import DemoDecode, collate
from gpufeed.cachefs.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderSpec:
    """All that a contender's process is told. Travels as JSON.

    Attributes:
        name: which contender.
        phases: one epoch each; ``cold`` or ``warm``, as the report names them.
        data_root: directory of the demo data.
        sample_count: samples of one epoch; fewer than the data set has for the slow ones.
        batch_size: rows of a batch.
        workers: decode processes.
        step_s: the accelerator's step for a full batch, seconds.
        compute: ``sleep`` or ``cuda``.
        seed: of the order.
        origin: endpoint, key, secret and region, named as ossfs names them.
        daemon_socket: socket of the running daemon, for gpufeed's contenders.
        daemon_pid: counted in their CPU time.
        pids_path: file for the process ids of those who share memory by name.
        bench_pid: the process above all of the run's processes; what the machine does besides
            them is reported as somebody else's.
    """

    name: str
    phases: tuple[str, ...]
    data_root: str
    sample_count: int
    batch_size: int
    workers: int
    step_s: float
    compute: str = "sleep"
    seed: int = 0
    origin: Mapping[str, str] = field(default_factory=dict)
    daemon_socket: str = ""
    daemon_pid: int = 0
    pids_path: str = ""
    bench_pid: int = 0


class Contender(Protocol):
    """One way of loading."""

    def prepare(self) -> None:
        """Import what is needed; not measured."""
        ...

    def epoch(self) -> Iterator[Batch]:
        """The next epoch's batches; the first call opens the loader."""
        ...

    def close(self) -> None:
        """End workers and sessions."""
        ...


class _TorchContender:
    """Shared by all that run on torch's own DataLoader."""

    def __init__(self, spec: ContenderSpec, data: demodata.DemoData) -> None:
        self.spec = spec
        self.data = data
        self._loader: Any = None

    def prepare(self) -> None:
        """See `Contender`."""
        import torch.multiprocessing  # noqa: PLC0415 imported here so that no epoch pays for it
        import torch.utils.data  # noqa: PLC0415 likewise

        # By default the trainer asks the busy worker for a descriptor of each batch, which costs
        # it about a millisecond a step here; by name it need not.
        sharing: Any = torch.multiprocessing
        sharing.set_sharing_strategy("file_system")
        RecordProcess(self.spec.pids_path)(0)

    def _open(self) -> Any:
        raise NotImplementedError

    def epoch(self) -> Iterator[Batch]:
        """See `Contender`."""
        if self._loader is None:
            self._loader = self._open()
        return _batches(iter(self._loader))

    def close(self) -> None:
        """See `Contender`."""
        self._loader = None

    def _map_style(self, read: Callable[[str], bytes]) -> Any:
        from torch.utils.data import DataLoader  # noqa: PLC0415 imported by `prepare`

        images: Any = _LooseImages(chosen_keys(self.data, self.spec), read)
        return DataLoader(
            images,
            batch_size=self.spec.batch_size,
            shuffle=True,
            num_workers=self.spec.workers,
            persistent_workers=self.spec.workers > 0,
            collate_fn=collate,
            worker_init_fn=RecordProcess(self.spec.pids_path),
        )


class LooseHttp(_TorchContender):
    """One GET an image, over one kept-alive connection a worker."""

    def _open(self) -> Any:
        return self._map_style(HttpReader(self.spec.origin, demodata.BUCKET))


class LooseOssfs(_TorchContender):
    """One GET an image through ossfs, one file system a worker."""

    def prepare(self) -> None:
        """See `Contender`."""
        _TorchContender.prepare(self)
        import ossfs  # noqa: F401, PLC0415 imported here so that no epoch pays for it

    def _open(self) -> Any:
        return self._map_style(OssfsReader(self.spec.origin, demodata.BUCKET))


class Ceiling(_TorchContender):
    """The same images as local files: what the CPUs allow when storage costs nothing."""

    def prepare(self) -> None:
        """Import, and read every file once so that the page cache has them."""
        _TorchContender.prepare(self)
        for key in chosen_keys(self.data, self.spec):
            self.data.path_of(key).read_bytes()

    def _open(self) -> Any:
        return self._map_style(FileReader(self.data.objects_dir / demodata.BUCKET))


class WebdatasetDirect(_TorchContender):
    """Tars streamed over HTTP by webdataset, shards shuffled and split over the workers."""

    def prepare(self) -> None:
        """See `Contender`."""
        _TorchContender.prepare(self)
        import webdataset  # noqa: F401, PLC0415 imported here so that no epoch pays for it

    def _open(self) -> Any:
        import webdataset  # noqa: PLC0415 imported by `prepare`

        reader = HttpReader(self.spec.origin, demodata.BUCKET)
        urls = [reader.url(key) for key in self.data.tar_keys]
        dataset = webdataset.WebDataset(
            urls, shardshuffle=len(urls), seed=self.spec.seed, detshuffle=True, empty_check=False
        )
        dataset = dataset.map(DemoDecode())
        dataset = dataset.batched(self.spec.batch_size, collation_fn=collate, partial=True)
        return webdataset.WebLoader(
            dataset,
            batch_size=None,
            num_workers=self.spec.workers,
            persistent_workers=self.spec.workers > 0,
            worker_init_fn=RecordProcess(self.spec.pids_path),
        )


class Gpufeed:
    """gpufeed's loader over a running daemon: tar shards, or the loose objects."""

    def __init__(self, spec: ContenderSpec, data: demodata.DemoData) -> None:
        self.spec = spec
        self.data = data
        self._loader: Any = None

    def prepare(self) -> None:
        """See `Contender`."""
        import torch  # noqa: F401, PLC0415 imported here so that no epoch pays for it

        from gpufeed.loaders import DataLoader, ShardDataset  # noqa: F401, PLC0415 likewise

    def _url(self) -> str:
        path = "loose/" if self.spec.name == "gpufeed-loose" else self.data.tar_pattern
        return f"oss://{demodata.BUCKET}/{path}"

    def epoch(self) -> Iterator[Batch]:
        """See `Contender`."""
        if self._loader is None:
            from gpufeed.loaders import DataLoader, ShardDataset  # noqa: PLC0415 see `prepare`

            dataset = ShardDataset(
                self._url(),
                decode=DemoDecode(),
                shuffle="shards",
                seed=self.spec.seed,
                storage_options=dict(self.spec.origin),
                daemon=self.spec.daemon_socket,
            )
            self._loader = DataLoader(
                dataset, batch_size=self.spec.batch_size, num_workers=self.spec.workers
            )
        return _batches(iter(self._loader))

    def close(self) -> None:
        """See `Contender`."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None


def _batches(loader: Iterator[Any]) -> Iterator[Batch]:
    """The loader's batches as the measuring loop knows them; holds none of them."""
    for batch in loader:
        yield Batch(
            batch["image"],
            np.array(batch["index"], np.int64).view(np.uint64),
            np.array(batch["checksum"], np.int64).view(np.uint64),
        )
        del batch


class _LooseImages:
    """Map-style dataset: one read an image."""

    def __init__(self, keys: Sequence[str], read: Callable[[str], bytes]) -> None:
        self._keys = keys
        self._read = read
        self._decode = DemoDecode()

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, position: int) -> dict[str, Any]:
        key = self._keys[position]
        return self._decode({"__key__": key.removesuffix(".jpg"), "jpg": self._read(key)})


def chosen_keys(data: demodata.DemoData, spec: ContenderSpec) -> list[str]:
    """The loose keys of this contender's epoch: all, or a seeded choice of them."""
    keys = data.loose_keys
    return [keys[index] for index in chosen_indices(data, spec)]


def chosen_indices(data: demodata.DemoData, spec: ContenderSpec) -> list[int]:
    """The sample numbers of this contender's epoch, ascending."""
    everything = range(len(data.samples))
    if spec.sample_count >= len(data.samples):
        return list(everything)
    return sorted(random.Random(spec.seed).sample(everything, spec.sample_count))


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of a contender without running it.

    Attributes:
        make: its class.
        phases: the epochs it runs.
        modules: what must be installed.
        slow: run on fewer samples.
        needs_daemon: a daemon is started for it.
        needs_origin: it reads from object storage.
        summary: one line for the report.
    """

    make: Callable[[ContenderSpec, demodata.DemoData], Contender]
    phases: tuple[str, ...]
    modules: tuple[str, ...]
    summary: str
    slow: bool = False
    needs_daemon: bool = False
    needs_origin: bool = True


KINDS: Mapping[str, Kind] = {
    "loose-http": Kind(
        LooseHttp,
        ("cold",),
        ("torch",),
        "torch DataLoader, one HTTP GET an image",
        slow=True,
    ),
    "loose-ossfs": Kind(
        LooseOssfs,
        ("cold",),
        ("torch", "ossfs"),
        "torch DataLoader, one ossfs read an image",
        slow=True,
    ),
    "webdataset-direct": Kind(
        WebdatasetDirect,
        ("cold",),
        ("torch", "webdataset"),
        "webdataset streams tars over HTTP",
    ),
    "ceiling": Kind(
        Ceiling,
        ("warm",),
        ("torch",),
        "torch DataLoader over local files in the page cache",
        needs_origin=False,
    ),
    "gpufeed": Kind(
        Gpufeed,
        ("cold", "warm"),
        ("torch",),
        "gpufeed over the tars",
        needs_daemon=True,
    ),
    "gpufeed-loose": Kind(
        Gpufeed,
        ("cold", "warm"),
        ("torch",),
        "gpufeed over the loose objects",
        needs_daemon=True,
    ),
}


def kind_of(name: str) -> Kind:
    """Look a contender up.

    Raises:
        UsageError: no such contender.
    """
    if name not in KINDS:
        raise UsageError(f"no contender {name!r}; there are {', '.join(KINDS)}")
    return KINDS[name]


def missing_modules(name: str) -> list[str]:
    """The modules that a contender needs and this environment lacks."""
    return [module for module in kind_of(name).modules if importlib.util.find_spec(module) is None]
