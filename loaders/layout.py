"""How one decoded sample lies in the rows of a batch slot.

A `Layout` is found once, from the first sample: a tree of dicts, lists, tuples and namedtuples,
whose leaves are **columns** (arrays, tensors, numbers: fixed shape and dtype, one row of a slot's
column each) or **objects** (strings and bytes: carried beside the slot). A later sample either fits
it exactly, and is written in place, or travels as a pickle and its batch is collated on the heap;
so what is in a slot is always what torch's `default_collate` would have stacked.

Pure but for `write_row`, which writes the caller's arrays. torch is never imported: a tensor can
only turn up where torch is loaded already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpufeed.cachefs.units import round_up

ColumnKind = Literal["array", "tensor", "int", "float", "bool", "number"]
NodeKind = Literal["column", "object", "dict", "list", "tuple", "named"]

COLUMN_ALIGN_BYTES = 64
COLUMNS_MAX = 1024
DEPTH_MAX = 32

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_SCALARS: dict[type, tuple[ColumnKind, str]] = {
    int: ("int", "int64"),
    float: ("float", "float64"),
    bool: ("bool", "bool"),
}


@dataclass(frozen=True, slots=True)
class Column:
    """One leaf of the samples, and where its rows begin in a slot."""

    kind: ColumnKind
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int

    def view(self, slot: npt.NDArray[np.uint8], rows: int) -> npt.NDArray[Any]:
        """The column of a slot's bytes, ``[rows, *shape]``."""
        dtype = np.dtype(self.dtype)
        size = rows * int(np.prod(self.shape, dtype=np.int64)) * dtype.itemsize
        part = slot[self.offset_bytes : self.offset_bytes + size]
        return part.view(dtype).reshape(rows, *self.shape)


@dataclass(frozen=True, slots=True)
class Node:
    """One place of the tree. `number` is the leaf's; `names` the keys of a dict."""

    kind: NodeKind
    number: int = 0
    children: tuple[Node, ...] = ()
    names: tuple[Any, ...] = ()
    cls: type | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The tree, its columns and the size of a slot of `rows` samples."""

    root: Node
    columns: tuple[Column, ...]
    object_count: int
    rows: int
    slot_bytes: int

    def views(self, slot: npt.NDArray[np.uint8]) -> list[npt.NDArray[Any]]:
        """All columns of a slot."""
        return [column.view(slot, self.rows) for column in self.columns]

    def write_row(
        self, sample: Any, columns: Sequence[npt.NDArray[Any]], row: int
    ) -> list[Any] | None:
        """Write a sample into row `row`. Returns its objects, or None when it does not fit."""
        objects: list[Any] = []
        return objects if self._write(self.root, sample, (columns, row, objects)) else None

    def _write(self, node: Node, value: Any, target: tuple[Any, int, list[Any]]) -> bool:
        kind = node.kind
        if kind == "column":
            columns, row, _ = target
            column = self.columns[node.number]
            stored = _fitting(column, value)
            if stored is None:
                return False
            columns[node.number][row] = stored
            return True
        if kind == "object":
            target[2].append(value)
            return type(value) in (str, bytes)
        parts: Any = value
        if type(value) is not node.cls or len(parts) != len(node.children):
            return False
        if kind == "dict":
            if any(name not in parts for name in node.names):
                return False
            parts = [parts[name] for name in node.names]
        return all(
            self._write(child, part, target)
            for child, part in zip(node.children, parts, strict=True)
        )

    def build(self, leaf: Callable[[Column | None, int], Any], *, collated: bool) -> Any:
        """The tree again, with ``leaf(column or None for an object, number)`` at its leaves.

        `collated` makes tuples lists, as torch's `default_collate` does.
        """
        return self._build(self.root, leaf, collated)

    def _build(self, node: Node, leaf: Callable[[Column | None, int], Any], collated: bool) -> Any:
        if node.kind == "column":
            return leaf(self.columns[node.number], node.number)
        if node.kind == "object":
            return leaf(None, node.number)
        parts = [self._build(child, leaf, collated) for child in node.children]
        if collated and node.kind != "dict":
            # torch transposes sequences by zip, and passes strings on as the tuples that it makes.
            parts = [
                tuple(part) if child.kind == "object" else part
                for child, part in zip(node.children, parts, strict=True)
            ]
        if node.kind == "dict":
            return dict(zip(node.names, parts, strict=True))
        if node.kind == "named":
            assert node.cls is not None
            return node.cls(*parts)
        return parts if collated or node.kind == "list" else tuple(parts)

    def read_row(
        self, columns: Sequence[npt.NDArray[Any]], objects: Sequence[Any], row: int
    ) -> Any:
        """The sample that `write_row` wrote, as copies of its own types."""

        def leaf(column: Column | None, number: int) -> Any:
            if column is None:
                return objects[number]
            value = columns[number][row]
            if column.kind in ("int", "float", "bool"):
                return value.item()
            if column.kind == "number":
                return value
            array = np.array(value)
            return sys.modules["torch"].from_numpy(array) if column.kind == "tensor" else array

        return self.build(leaf, collated=False)


def find_layout(sample: Any, rows: int) -> Layout | None:
    """The layout of samples like this one; None when some part of it has no fixed place."""
    finder = _Finder(rows)
    root = finder.node(sample, 0)
    if root is None or not finder.columns or len(finder.columns) > COLUMNS_MAX:
        return None
    return Layout(root, tuple(finder.columns), finder.object_count, rows, max(finder.end_bytes, 1))


class _Finder:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.columns: list[Column] = []
        self.object_count = 0
        self.end_bytes = 0

    def node(self, value: Any, depth: int) -> Node | None:
        """The tree of `value`, None when it has no layout."""
        cls = type(value)
        if cls in (str, bytes):
            self.object_count += 1
            return Node("object", self.object_count - 1)
        if cls is dict or cls is list or isinstance(value, tuple):
            return self._container(value, depth)
        leaf = _leaf(value)
        if leaf is None:
            return None
        kind, dtype, shape = leaf
        column = Column(kind, dtype, shape, round_up(self.end_bytes, COLUMN_ALIGN_BYTES))
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.end_bytes = column.offset_bytes + self.rows * size
        self.columns.append(column)
        return Node("column", len(self.columns) - 1)

    def _container(self, value: Any, depth: int) -> Node | None:
        cls = type(value)
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        if depth >= DEPTH_MAX or (isinstance(value, tuple) and cls is not tuple and not named):
            return None
        parts = list(value.values()) if cls is dict else list(value)
        children = [self.node(part, depth + 1) for part in parts]
        if not children or any(child is None for child in children):
            return None
        kind: NodeKind = "named" if named else "dict" if cls is dict else "list"
        if cls is tuple:
            kind = "tuple"
        names = tuple(value) if cls is dict else ()
        return Node(kind, 0, tuple(c for c in children if c is not None), names, cls)


def _leaf(value: Any) -> tuple[ColumnKind, str, tuple[int, ...]] | None:
    cls = type(value)
    if cls in _SCALARS:
        kind, dtype = _SCALARS[cls]
        return kind, dtype, ()
    array = _tensor_as_array(value)
    if array is not None:
        return "tensor", array.dtype.str, array.shape
    if cls is np.ndarray and _plain(value.dtype):
        return "array", value.dtype.str, value.shape
    if isinstance(value, np.generic) and _plain(value.dtype):
        return "number", value.dtype.str, ()
    return None


def _plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" and dtype.isnative and dtype.itemsize <= 16


def _tensor_as_array(value: Any) -> npt.NDArray[Any] | None:
    """A plain CPU tensor's memory as an array; None for anything else."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        return None
    if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad:
        return None
    try:
        array: npt.NDArray[Any] = value.numpy()
    except (TypeError, RuntimeError):  # a dtype that numpy lacks, or a lazily conjugated view
        return None
    return array


def _fitting(column: Column, value: Any) -> Any | None:
    kind, cls = column.kind, type(value)
    if kind == "array":
        fits = cls is np.ndarray and value.shape == column.shape and value.dtype == column.dtype
        return value if fits else None
    if kind == "int":
        return value if cls is int and _INT64_MIN <= value <= _INT64_MAX else None
    if kind in ("float", "bool"):
        return value if cls is (float if kind == "float" else bool) else None
    if kind == "number":
        return value if isinstance(value, np.generic) and value.dtype == column.dtype else None
    array = _tensor_as_array(value)
    if array is None or array.shape != column.shape or array.dtype != column.dtype:
        return None
    return array
