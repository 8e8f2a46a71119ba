"""How long work is shown: live bars in a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

LOG_EVERY_SECONDS = 10.0


def _columns() -> list[ProgressColumn]:
    return [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    ]


class Bar:
    """One piece of work of known length."""

    def __init__(self, description: str, total: int, console: Console, live: RichProgress | None):
        self._description, self._total = description, total
        self._console, self._live = console, live
        self._started = self._logged = time.monotonic()
        self._done = 0
        self._note = ""
        self._id = live.add_task(description, total=total, note="") if live else None

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        """Record `amount` more units done; `note` is a short text such as the current loss."""
        self._done += amount
        self._note = self._note if note is None else note
        if self._live is not None and self._id is not None:
            self._live.update(self._id, advance=amount, note=self._note)
        elif time.monotonic() - self._logged > LOG_EVERY_SECONDS:
            self._logged = time.monotonic()
            elapsed = self._logged - self._started
            left = elapsed / max(self._done, 1) * (self._total - self._done)
            self._log(f"{self._done}/{self._total}", f"ETA {left:.0f} s")

    def _log(self, *parts: str) -> None:
        text = "  ".join([self._description, *parts, self._note]).rstrip()
        self._console.print(text, highlight=False, markup=False)

    def finish(self) -> None:
        """Remove the live bar, or write the closing line of the log."""
        if self._live is not None and self._id is not None:
            self._live.remove_task(self._id)
        elif self._done:
            self._log(f"{self._done}/{self._total}", f"{time.monotonic() - self._started:.1f} s")


class Progress:
    """Where bars are drawn. `Progress(quiet=True)` draws nothing."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None):
        self.console = console or Console(stderr=True, quiet=quiet)
        self._quiet = quiet
        self._live: RichProgress | None = None

    @contextmanager
    def bar(self, description: str, total: int) -> Iterator[Bar]:
        """Show `description` while the block runs; nested bars stand under each other."""
        outermost = self._live is None and self.console.is_terminal and not self._quiet
        if outermost:
            self._live = RichProgress(*_columns(), console=self.console, transient=True)
            self._live.start()
        bar = Bar(description, total, self.console, self._live)
        try:
            yield bar
        finally:
            bar.finish()
            if outermost and self._live is not None:
                self._live.stop()
                self._live = None

    def say(self, text: str) -> None:
        """One line that stays."""
        self.console.print(text, highlight=False, markup=False)


QUIET = Progress(quiet=True)
