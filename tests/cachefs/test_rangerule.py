"""When single ranges become a fill of the whole: a table."""

from __future__ import annotations

import pytest

from gpufeed.cachefs.rangerule import SEQUENTIAL_EXTENTS_MIN, Touched


@pytest.mark.parametrize(
    ("count", "touches", "due_at"),
    [
        (1, [0], 0),
        (2, [1, 0], 1),
        (100, list(range(50)), SEQUENTIAL_EXTENTS_MIN - 1),
        (100, [99, 98, 0, 50, 51], None),
        (100, [1, 2, 3, 4, 5, 6], None),
        (100, [0, 0, 0, 0, 0, 0], None),
        (8, [7, 5, 3, 1, 7, 5], None),
        (8, [7, 5, 3, 1, 6], 4),
    ],
)  # fmt: skip
def test_the_whole_is_due(count: int, touches: list[int], due_at: int | None) -> None:
    touched = Touched(count)

    due = [touched.note(extent) for extent in touches]

    assert due == [due_at is not None and i >= due_at for i in range(len(touches))]
