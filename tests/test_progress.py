from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from cclis import progress as module
from cclis.experiment.loop import train
from cclis.methods import make_config
from cclis.progress import QUIET, Progress
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
