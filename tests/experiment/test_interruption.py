from __future__ import annotations

import os
import signal
import threading

import pytest

from cclis.experiment.interruption import SIGNALS, Interrupted, Interruption


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
        assert all(signal.getsignal(number) is signal.SIG_DFL for number in SIGNALS)
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
