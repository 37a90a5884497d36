"""Showing what a run is doing: bars on a terminal, one line a stage elsewhere.

Bars are drawn by whoever calls `update`; there is no drawing thread. All of it goes to standard
error: standard output is for the table.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Progress(Protocol):
    """What the runner tells its user."""

    def stage(self, title: str, total: int | None = None) -> None:
        """Begin a stage; the one before it is over."""
        ...

    def update(self, done: int, note: str = "") -> None:
        """Say how far the stage is."""
        ...

    def say(self, text: str) -> None:
        """Print one line that stays."""
        ...


class Silent:
    """Shows nothing; for tests and for calls from programs."""

    def stage(self, title: str, total: int | None = None) -> None:
        """See `Progress`."""

    def update(self, done: int, note: str = "") -> None:
        """See `Progress`."""

    def say(self, text: str) -> None:
        """See `Progress`."""


class Terminal:
    """Bars by rich; a context manager."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415 only where something is shown
        from rich.progress import (  # noqa: PLC0415 likewise
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        self._task: Any = None

    def __enter__(self) -> Terminal:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def stage(self, title: str, total: int | None = None) -> None:
        """See `Progress`."""
        if not self._console.is_terminal:
            self.say(f"{title} ...")
            return
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(title, total=total, note="")
        self._bars.refresh()

    def update(self, done: int, note: str = "") -> None:
        """See `Progress`."""
        if self._task is not None:
            self._bars.update(self._task, completed=done, note=note, refresh=True)

    def say(self, text: str) -> None:
        """See `Progress`."""
        self._console.print(text, markup=False, soft_wrap=not self._console.is_terminal)


def table_console(piped_width: int) -> Console:
    """Standard output for a table. Piped or redirected there is no window to fold to."""
    from rich.console import Console  # noqa: PLC0415 only where something is shown

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, piped_width))
    return console
