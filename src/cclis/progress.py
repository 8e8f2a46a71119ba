"""How long work is shown: live bars in a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

LOG_EVERY_SECONDS = 10.0
REFRESHES_A_SECOND = 4
PACE_OVER_SECONDS = 3600.0
"""How far back a terminal looks for the pace: some units, such as a trial, take minutes."""

Unit = Literal["steps", "epochs", "bytes"]


def _columns() -> list[ProgressColumn]:
    return [
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None, table_column=Column(max_width=24)),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    ]


class Display(RichProgress):
    """The bars, and under them what the newest of them says, each line cut at the edge."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn."""
        yield self.make_tasks_table(self.tasks)
        notes = [task.fields["note"] for task in self.tasks if task.fields["note"]]
        for line in notes[-1].splitlines() if notes else ():
            yield Text(f"  {line}", style="dim", no_wrap=True, overflow="ellipsis")


class Bar:
    """One piece of work of known length."""

    def __init__(
        self,
        description: str,
        total: int,
        unit: Unit,
        console: Console,
        live: RichProgress | None,
        logged: bool,
        done: int,
    ):
        self._logs = logged
        self._description, self._total, self._unit = description, total, unit
        self._console, self._live = console, live
        self._started = self._logged = time.monotonic()
        self._before = self._done = done
        self._note = ""
        self._id = None
        if live is not None:
            self._id = live.add_task(
                description, total=total, completed=done, amount=self._amount, note=""
            )

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        """Record `amount` more units done; `note` is a line or two such as the current loss."""
        self._done += amount
        self._note = self._note if note is None else note
        if self._live is not None and self._id is not None:
            self._live.update(self._id, advance=amount, amount=self._amount, note=self._note)
        elif self._logs and time.monotonic() - self._logged > LOG_EVERY_SECONDS:
            self._logged = time.monotonic()
            elapsed = self._logged - self._started
            # What was done before took none of this time.
            pace = elapsed / max(self._done - self._before, 1)
            self._log(f"ETA {pace * (self._total - self._done):.0f} s")

    def reach(self, done: int, description: str) -> None:
        """Record how many units are done in all, and what is being done now."""
        self._description = description
        if self._live is not None and self._id is not None:
            self._live.update(self._id, description=description)
        self.advance(done - self._done)

    @property
    def _amount(self) -> str:
        if self._unit == "bytes":
            return f"{self._done / 1e6:.1f}/{self._total / 1e6:.1f} MB"
        return f"{self._done}/{self._total}{' epochs' if self._unit == 'epochs' else ''}"

    def _log(self, when: str) -> None:
        note = " · ".join(self._note.splitlines())
        text = "  ".join([self._description, self._amount, when, note]).rstrip()
        _print(self._console, text)

    def finish(self) -> None:
        """Remove the live bar, or write the closing line of the log."""
        if self._live is not None and self._id is not None:
            self._live.remove_task(self._id)
        elif self._done > self._before and self._logs:
            self._log(f"{time.monotonic() - self._started:.1f} s")


class Progress:
    """Where bars are drawn. `Progress(quiet=True)` draws nothing."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None):
        if console is None or quiet:
            console = Console(stderr=True, quiet=quiet)
        self.console = console
        self._live: RichProgress | None = None

    @contextmanager
    def bar(
        self,
        description: str,
        total: int,
        unit: Unit = "steps",
        *,
        logged: bool = True,
        done: int = 0,
    ) -> Iterator[Bar]:
        """Show `description` while the block runs; nested bars stand under each other.

        Args:
            description: What is being done.
            total: How many units there are.
            unit: What is counted.
            logged: Whether a log has lines of it; otherwise only a terminal shows it.
            done: How many units were done before, of work that is gone on with.
        """
        outermost = self._live is None and self.console.is_terminal and not self.console.quiet
        if outermost:
            self._live = Display(
                *_columns(),
                console=self.console,
                transient=True,
                refresh_per_second=REFRESHES_A_SECOND,
                speed_estimate_period=PACE_OVER_SECONDS,
            )
            self._live.start()
        bar = Bar(description, total, unit, self.console, self._live, logged, done)
        try:
            yield bar
        finally:
            bar.finish()
            if outermost and self._live is not None:
                self._live.stop()
                self._live = None

    def within(self) -> Progress:
        """For work inside a bar: it is shown with it in a terminal, and not at all in a log."""
        progress = Progress(quiet=True)
        progress._live = self._live
        return progress

    def say(self, text: str) -> None:
        """One line that stays."""
        _print(self.console, text)


def _print(console: Console, text: str) -> None:
    # A log is read by tools as well: its lines are not folded to a width.
    console.print(text, highlight=False, markup=False, soft_wrap=True)


QUIET = Progress(quiet=True)
