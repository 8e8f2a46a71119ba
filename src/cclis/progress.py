"""What is shown: results, and progress as live bars in a terminal or plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Literal, cast

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

from cclis.errors import InputError, visible

LOG_EVERY_SECONDS = 10.0
REFRESHES_A_SECOND = 4
PACE_OVER_SECONDS = 3600.0
"""Period over which a terminal averages the pace: some units, such as a trial, take minutes."""

Unit = Literal["steps", "epochs", "bytes"]


class Expendable:
    """A stream that may get lost, as when a pipe is closed or a disk is full: nothing ends for it.

    Attributes:
        lost: Why something could not be written, if so.
    """

    def __init__(self, stream: IO[str] | None):
        # Rich's live display puts one of its own in the place of a standard stream.
        self._stream: Any = getattr(stream, "rich_proxied_file", stream)
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        """Write text, if that is possible; returns its length."""
        with self._tolerant():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:  # a terminal that knows fewer characters
                known = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
                self._stream.write(known)
        return len(text)

    def flush(self) -> None:
        """Pass on what was written, if that is possible."""
        with self._tolerant():
            self._stream.flush()

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.lost = error
        except (AttributeError, ValueError):
            pass  # there is no stream, or it was closed

    def insist(self) -> None:
        """Raise an InputError if something could not be written that somebody is waiting for."""
        self.flush()
        if self.lost is not None and not isinstance(self.lost, BrokenPipeError):
            raise InputError(f"cannot write the output: {self.lost.strerror}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Screen(Console):
    """Where text is shown as it is, whatever brackets and control characters it has."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False):
        stream = cast("IO[str]", Expendable(sys.stderr if stderr else sys.stdout))
        super().__init__(file=stream, quiet=quiet, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text with control characters escaped."""
        return super().render_str(visible(text), **options)


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
    """Bars, and below them the note of the newest one; long lines are cut off."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars and the note."""
        yield self.make_tasks_table(self.tasks)
        notes = [task.fields["note"] for task in self.tasks if task.fields["note"]]
        for line in notes[-1].splitlines() if notes else ():
            yield Text(f"  {line}", style="dim", no_wrap=True, overflow="ellipsis")


class Bar:
    """Progress of one piece of work of known length."""

    def __init__(
        self,
        description: str,
        total: int,
        unit: Unit,
        console: Console,
        live: RichProgress | None,
        logged: bool,
        done: float,
        whole: Bar | None = None,
    ):
        self._logs, self._whole = logged, whole
        self._description, self._total, self._unit = visible(description), total, unit
        self._console, self._live = console, live
        self._started = self._logged = time.monotonic()
        self._before: float = done
        self._done: float = done
        self._note = ""
        self._id = None
        if live is not None:
            self._id = live.add_task(
                self._description, total=total, completed=int(done), amount=self._amount, note=""
            )

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        """Count `amount` more units as done.

        Args:
            amount: Number of units.
            note: One or two lines to show, such as the current loss.
        """
        self._done += amount
        self._note = self._note if note is None else visible(note)
        if self._live is not None and self._id is not None:
            self._live.update(self._id, completed=self._done, amount=self._amount, note=self._note)
        elif self._logs and time.monotonic() - self._logged > LOG_EVERY_SECONDS:
            self._logged = time.monotonic()
            left = (self._whole or self).seconds_left
            self._log("" if left is None else f"ETA {duration(left)}")

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the end at the pace so far; None before anything was done."""
        if self._done <= self._before:
            return None
        # Units that were done before took none of this time.
        pace = (time.monotonic() - self._started) / (self._done - self._before)
        return pace * (self._total - self._done)

    def reach(self, done: float, description: str) -> None:
        """Set the number of units done in all, parts included, and a new description."""
        self._description = visible(description)
        if self._live is not None and self._id is not None:
            self._live.update(self._id, description=self._description)
        self.advance(done - self._done)

    @property
    def _amount(self) -> str:
        if self._unit == "bytes":
            return f"{self._done / 1e6:.1f}/{self._total / 1e6:.1f} MB"
        return f"{int(self._done)}/{self._total}{' epochs' if self._unit == 'epochs' else ''}"

    def _log(self, when: str) -> None:
        note = " · ".join(self._note.splitlines())
        text = "  ".join([self._description, self._amount, when, note]).rstrip()
        print_line(self._console, text)

    def finish(self) -> None:
        """Remove the live bar, or write the last line of the log."""
        if self._live is not None and self._id is not None:
            self._live.remove_task(self._id)
        elif self._done > self._before and self._logs:
            self._log(duration(time.monotonic() - self._started))


class Progress:
    """Where bars are shown. `Progress(quiet=True)` shows nothing."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None):
        if console is None or quiet:
            console = Screen(stderr=True, quiet=quiet)
        self.console = console
        self._live: RichProgress | None = None
        self._whole: Bar | None = None

    @contextmanager
    def bar(
        self,
        description: str,
        total: int,
        unit: Unit = "steps",
        *,
        logged: bool = True,
        done: float = 0,
    ) -> Iterator[Bar]:
        """Show a bar while the block runs; nested bars are shown below each other.

        Args:
            description: What is being done.
            total: Number of units.
            unit: What is counted.
            logged: Whether to write lines to a log; otherwise only a terminal shows the bar.
            done: Number of units that were done before, in resumed work.
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
        whole = self._whole
        bar = Bar(description, total, unit, self.console, self._live, logged, done, whole)
        # What the outermost bar counts is the whole run, which a log's lines have the ETA of.
        self._whole = whole or bar
        try:
            yield bar
        finally:
            self._whole = whole
            bar.finish()
            if outermost and self._live is not None:
                self._live.stop()
                self._live = None

    def within(self) -> Progress:
        """Progress of work inside a bar: shown in a terminal, but not in a log."""
        progress = Progress(quiet=True)
        progress._live = self._live
        return progress

    def say(self, text: str) -> None:
        """Print a line that stays."""
        print_line(self.console, text)


def duration(seconds: float) -> str:
    """Seconds as people say them, in two units: 5 d 12 h, 3 h 20 min, 4 min 10 s, 1.9 s."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    units = {"d": whole // 86400, "h": whole // 3600 % 24, "min": whole // 60 % 60, "s": whole % 60}
    first = next(place for place, count in enumerate(units.values()) if count)
    return " ".join(f"{count} {unit}" for unit, count in [*units.items()][first : first + 2])


def print_line(console: Console, text: str) -> None:
    """Print a line that is not wrapped, because tools read logs line by line."""
    console.print(visible(text), highlight=False, markup=False, emoji=False, soft_wrap=True)


QUIET = Progress(quiet=True)
