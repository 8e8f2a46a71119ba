from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console
from rich.table import Table

from cclis import progress as module
from cclis.experiment.loop import train
from cclis.methods import make_config
from cclis.progress import QUIET, Progress, Screen
from tests.conftest import QUICK as SMALL

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture
def plain(monkeypatch) -> Progress:
    """A log in which every advance is a line."""
    monkeypatch.setattr(module, "LOG_EVERY_SECONDS", -1.0)
    return Progress(console=Console(file=io.StringIO(), width=30))


@pytest.fixture
def live(monkeypatch) -> Progress:
    monkeypatch.setenv("TERM", "xterm-256color")
    return Progress(console=Console(file=io.StringIO(), force_terminal=True, width=120))


def raw(progress: Progress) -> str:
    return progress.console.file.getvalue()


def text(progress: Progress) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw(progress))


# ------------------------------------------------------------------------------------- plain


def test_a_log_shows_how_far_it_is_and_how_long_it_takes(plain):
    with plain.bar("training", 4) as bar:
        bar.advance()
        bar.advance(2, note="loss 0.5")
    first, second, last = text(plain).splitlines()
    assert re.fullmatch(r"training  1/4  ETA \d+\.\d s", first)
    assert re.fullmatch(r"training  3/4  ETA \d+\.\d s  loss 0\.5", second)
    assert re.fullmatch(r"training  3/4  \d+\.\d s  loss 0\.5", last)
    assert "\x1b" not in raw(plain)


def test_the_eta_is_in_proportion_to_what_is_left(plain, monkeypatch):
    clock = iter([100.0] + [130.0] * 9)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    with plain.bar("training", 100) as bar:
        bar.advance(25)
    assert "ETA 1 min 30 s" in text(plain)


def test_the_eta_of_work_gone_on_with_counts_what_was_done_since(plain, monkeypatch):
    clock = iter([100.0] + [130.0] * 9)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    with plain.bar("training", 100, done=60) as bar:
        bar.advance(10)
    assert "training  70/100  ETA 1 min 30 s" in text(plain)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0.0 s"),
        (1.94, "1.9 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (250.4, "4 min 10 s"),
        (3599.6, "1 h 0 min"),
        (3600 * 3 + 60 * 20 + 59, "3 h 20 min"),
        (86399.7, "1 d 0 h"),
        (86400 * 5 + 3600 * 12 + 3599, "5 d 12 h"),
        (86400 * 400, "400 d 0 h"),
    ],
)
def test_durations_are_said_in_two_units(seconds: float, said: str):
    assert module.duration(seconds) == said


def test_lines_of_a_log_have_the_eta_of_the_whole(plain, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with plain.bar("run", 8, "epochs", logged=False, done=2) as run:
        with plain.bar("task 1  training", 2) as bar:
            now[0] = 3600.0
            run.reach(3, "run")
            bar.advance()
        with plain.bar("task 1  scoring", 9) as bar:
            now[0] = 7200.0
            bar.advance()
    # An hour for the first of six epochs; then two hours for one.
    first, _, second, _ = text(plain).splitlines()
    assert first == "task 1  training  1/2  ETA 5 h 0 min"
    assert second == "task 1  scoring  1/9  ETA 10 h 0 min"
    # Once it is over, the next one has its own.
    with plain.bar("another", 2) as bar:
        now[0] += 60
        bar.advance()
    assert "another  1/2  ETA 1 min 0 s" in text(plain)


def test_work_that_did_not_go_on_leaves_no_line(plain):
    with plain.bar("training", 100, done=60):
        pass
    assert text(plain) == ""


def test_a_log_has_few_lines(plain, monkeypatch):
    monkeypatch.setattr(module, "LOG_EVERY_SECONDS", 10.0)
    with plain.bar("training", 1000) as bar:
        for _ in range(1000):
            bar.advance()
    assert len(text(plain).splitlines()) == 1


def test_work_that_never_began_leaves_no_line(plain):
    with plain.bar("scoring", 0):
        pass
    assert text(plain) == ""


def test_nested_bars_are_lines_of_their_own(plain):
    with plain.bar("outer", 1) as outer, plain.bar("inner", 2) as inner:
        inner.advance(2)
        outer.advance()
    lines = text(plain).splitlines()
    assert [line.split()[0] for line in lines] == ["inner", "outer", "inner", "outer"]


def test_bytes_are_megabytes(plain):
    with plain.bar("downloading", 170_052_171, unit="bytes") as bar:
        bar.advance(12_345_678)
    assert "downloading  12.3/170.1 MB  ETA" in text(plain)


def test_lines_are_neither_folded_nor_interpreted(plain):
    long = "a [bold]name[/bold] in brackets, longer than the thirty columns of the console"
    plain.say(long)
    assert text(plain) == f"{long}\n"


# -------------------------------------------------------------------------------------- live


def test_a_terminal_shows_a_bar_while_it_runs(live):
    with live.bar("training [/x]", 4) as bar:
        bar.advance(3, note="loss 0.5")
        live._live.refresh()
        shown = text(live)
    assert "training [/x]" in shown
    assert "3/4" in shown
    assert "loss 0.5" in shown
    assert "ETA" in shown
    # The bar goes when the work is done; only what was said stays.
    assert live._live is None
    assert raw(live).count(HIDE) == raw(live).count(SHOW) == 1


@pytest.mark.parametrize("seconds", [1.0, 100.0])
def test_a_terminal_has_an_eta_for_slow_units_too(live, seconds):
    with live.bar("trials", 9, done=4) as bar:
        now = [0.0]
        live._live.get_time = lambda: now[0]
        for _ in range(3):
            now[0] += seconds
            bar.advance()
        task = live._live.tasks[0]
        assert task.completed == 7
        assert task.time_remaining == 2 * seconds


def test_bytes_are_megabytes_in_a_terminal_too(live):
    with live.bar("steps", 7) as steps, live.bar("downloading", 170_052_171, "bytes") as bar:
        steps.advance(2)
        bar.advance(12_345_678)
        live._live.refresh()
    assert "12.3/170.1 MB" in text(live)
    assert "2/7" in text(live)


def test_nested_bars_share_one_display(live):
    with live.bar("outer", 2) as outer:
        display = live._live
        with live.bar("inner", 3) as inner:
            assert live._live is display
            inner.advance()
            assert [task.description for task in display.tasks] == ["outer", "inner"]
        assert [task.description for task in display.tasks] == ["outer"]
        outer.advance()
        assert display.tasks[0].completed == 1
    assert live._live is None


def test_what_is_said_stays_above_the_bar(live):
    with live.bar("training", 2) as bar:
        live.say("task 1 learned")
        bar.advance()
    assert "task 1 learned" in text(live)


def test_an_exception_closes_the_display(live):
    with pytest.raises(KeyError), live.bar("outer", 2), live.bar("inner", 2):
        raise KeyError
    assert live._live is None
    assert raw(live).rindex(SHOW) > raw(live).rindex(HIDE)
    with live.bar("again", 1) as bar:
        bar.advance()
        live._live.refresh()
    assert "again" in text(live)


def test_an_exception_ends_the_line_of_a_log(plain):
    def work() -> None:
        with plain.bar("training", 2) as bar:
            bar.advance()
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert re.search(r"training  1/2  \d+\.\d s$", text(plain).rstrip())


def test_eighty_columns_are_enough(live):
    live.console.width = 80
    terms = " + ".join(f"a_long_name_of_a_term {value}" for value in range(9))
    with (
        live.bar("run  task 10/20", 12_000, "epochs") as run,
        live.bar("task 10  training", 1_000_000) as bar,
    ):
        run.reach(700, "run  task 11/20")
        bar.advance(999_999, note=f"epoch 3/4 · {terms}\n36,000 img/s")
        live._live.refresh()
        drawn = [line for line in re.split(r"[\r\n]+", text(live)) if line.strip()]
    assert all(len(line) <= 80 for line in drawn)
    # Two bars and the two lines of the note, of which one is cut and none is folded.
    last = [line.strip(" ⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏") for line in drawn[-4:]]
    assert last[0].startswith("run  task 11/20")
    assert "700/12000 epochs" in last[0]
    assert "999999/1000000" in last[1]
    assert last[2].startswith("epoch 3/4")
    assert last[2].endswith("…")
    assert last[3] == "36,000 img/s"
    assert all("ETA" in line for line in last[:2])


def test_work_within_a_bar_is_shown_with_it_and_not_logged(live, plain):
    for progress, shown in ((live, ["trials", "task 1"]), (plain, [])):
        with progress.bar("trials", 2, logged=False):
            inner = progress.within()
            inner.say("task 1 learned")
            with inner.bar("task 1", 3) as bar:
                bar.advance(note="loss 1")
                display = progress._live
                found = [task.description for task in display.tasks] if display else []
                assert found == shown
        assert "task 1 learned" not in text(progress)
    assert text(plain) == ""


def test_a_bar_that_is_not_logged_leaves_a_log_alone(plain):
    with plain.bar("run", 3, logged=False) as bar:
        bar.reach(2, "run  task 2/3")
    assert text(plain) == ""


# ------------------------------------------------------------------------------------- quiet


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_prints_nothing(terminal, monkeypatch, capsys):
    monkeypatch.setattr(module, "LOG_EVERY_SECONDS", -1.0)
    console = Console(file=io.StringIO(), force_terminal=terminal)
    for progress in (Progress(quiet=True, console=console), Progress(quiet=True), QUIET):
        with progress.bar("training", 2) as bar:
            bar.advance(note="loss 1")
        progress.say("done")
    assert console.file.getvalue() == ""
    assert capsys.readouterr() == ("", "")


def test_progress_goes_to_standard_error(capsys):
    progress = Progress()
    progress.say("hello")
    with progress.bar("training", 1) as bar:
        bar.advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hello\n")
    assert "training  1/1" in err


def test_a_run_shows_epochs_terms_speed_and_memory(plain, tmp_path):
    settings = {**SMALL, "tasks": [2, 2], "limit": 20, "memory": 8, "output": str(tmp_path / "run")}
    train(make_config("cclis", settings), plain)
    lines = text(plain).splitlines()
    (first,) = [line for line in lines if re.match(r"task 1  training  \S+  [\d.]+ s  ", line)]
    (second,) = [line for line in lines if re.match(r"task 2  training  \S+  [\d.]+ s  ", line)]
    number, rest = (
        r"\d+\.\d{3}",
        r" · lr \S+ · [\d,]+ img/s · replay {} · \d+\.\d GiB of memory at most",
    )
    assert re.search(rf"  epoch 2/2 · loss {number}{rest.format('0/8')}$", first)
    terms = rf"loss {number} = contrast {number} \+ distill {number}"
    assert re.search(rf"  epoch 2/2 · {terms}{rest.format('8/8')}$", second)
    ends = [line for line in lines if "learned in" in line]
    for number, end in enumerate(ends, 1):
        said = rf"task {number}/2 \(\d, \d\) learned in [\d.]+ s, evaluated in [\d.]+ s, Class-IL"
        assert re.match(said, end)
    assert len(ends) == 2


# --------------------------------------------------------------------- what steers a terminal

STEERING = "a\x1b]0;title\x07\x1b[31m red\x9b2J\rcat\u202e"
ESCAPED = r"a\x1b]0;title\x07\x1b[31m red\x9b2J\rcat\u202e"


def test_what_would_steer_a_terminal_is_escaped(plain, live):
    for progress in (plain, live):
        progress.say(STEERING)
        with progress.bar(STEERING, 4) as bar:
            bar.advance(note=STEERING)
            bar.reach(2, STEERING)
            if progress is live:
                live._live.refresh()
    assert raw(plain).count(ESCAPED) == 7
    assert not set("\x1b\x07\x9b\r\u202e") & set(raw(plain))
    assert raw(live).count(ESCAPED) >= 3
    for part in ("\x1b]", "\x07", "\x1b[31m red", "\x9b", "\rcat", "\u202e"):
        assert part not in raw(live)


def test_what_would_steer_a_terminal_is_escaped_in_results(capsys):
    table = Table(STEERING, title=STEERING)
    table.add_row(STEERING)
    screen = Screen()
    screen.width = 200
    screen.print(table)
    screen.print(STEERING)
    said = capsys.readouterr().out
    assert said.count(ESCAPED) == 4
    assert "\x1b" not in said


def test_other_writing_is_shown_as_it_is(plain):
    for name in ("Straße", "猫", "😀", "a :smile: [b]", r"C:\temp", "two\nlines"):
        plain.say(name)
        assert text(plain).endswith(f"{name}\n")


# ----------------------------------------------------------------------------- lost streams


class Lost(io.StringIO):
    """A stream that can no longer be written to."""

    def __init__(self, error: Exception):
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "EPIPE"), OSError(28, "ENOSPC"), OSError(5, "EIO"), ValueError()]
)
def test_a_lost_stream_ends_nothing(error, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("stderr", "stdout"):
        monkeypatch.setattr(sys, name, Lost(error))
    progress = Progress()
    assert progress.console.is_terminal
    with progress.bar("training", 3) as bar:
        progress.say("task 1 learned")
        progress._live.refresh()
        bar.advance(3)
    Screen().print("done")


def test_characters_that_a_stream_does_not_know_are_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    Screen().print("46.9 ± 0.2")
    assert written.getvalue() == rb"46.9 \xb1 0.2" + b"\n"


def test_where_there_is_no_stream_nothing_is_shown(monkeypatch):
    for name in ("stderr", "stdout"):
        monkeypatch.setattr(sys, name, None)
    Progress().say("hello")
    Screen().print("done")
