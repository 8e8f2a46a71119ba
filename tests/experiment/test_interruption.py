from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from cclis.experiment.interruption import SIGNALS, Interrupted, Interruption

STOPPING = [number for number in SIGNALS if number != signal.SIGHUP]


@pytest.fixture(autouse=True)
def _hangups_end_it() -> Iterator[None]:
    """Also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_handlers_of_before_are_back_afterwards() -> None:
    def mine(*_: object) -> None: ...

    before = {number: signal.signal(number, mine) for number in SIGNALS}
    try:
        with Interruption():
            assert all(signal.getsignal(number) is not mine for number in SIGNALS)
        assert all(signal.getsignal(number) is mine for number in SIGNALS)
        with pytest.raises(Interrupted), Interruption():
            os.kill(os.getpid(), signal.SIGTERM)
        assert all(signal.getsignal(number) is mine for number in SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_waits_for_a_safe_place_where_told_to() -> None:
    with Interruption() as stop:
        stop.waits = True
        stop.check()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.asked
        # From now on the system's own handlers are there: a second signal ends at once.
        assert all(signal.getsignal(number) is signal.SIG_DFL for number in STOPPING)
        with pytest.raises(Interrupted, match="SIGUSR1"):
            stop.check()


def test_other_threads_are_left_alone() -> None:
    found = []

    def work() -> None:
        with Interruption() as stop:
            found.append(stop.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_terminal_may_hang_up_more_than_once() -> None:
    with Interruption() as stop:
        stop.waits = True
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(Interrupted, match="SIGHUP"):
            stop.check()


def test_a_terminal_may_hang_up_while_another_signal_is_waited_for() -> None:
    with Interruption() as stop:
        stop.waits = True
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(Interrupted, match="SIGINT"):
            stop.check()


def test_hangups_that_were_ignored_stay_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interruption() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.asked
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
