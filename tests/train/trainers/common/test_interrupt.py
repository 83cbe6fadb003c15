"""Signals during a run: noted once, handlers restored."""

import os
import signal

import pytest

from maze.train.utils.run_process import InterruptGuard, TrainingInterrupted


def send(signum):
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_recorded_and_handlers_are_restored(signum, status):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    received = []
    with InterruptGuard(received.append) as guard:
        assert not guard.requested
        send(signum)
        send(signal.SIGTERM)  # a process manager may repeat itself
        assert guard.requested
        assert guard.signum == signum
    assert received == [signal.Signals(signum).name]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert TrainingInterrupted(signum).exit_status == status


def test_second_sigint_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with InterruptGuard():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_exception_of_an_interrupted_run_is_no_ordinary_exception():
    assert issubclass(TrainingInterrupted, KeyboardInterrupt)
    assert not issubclass(TrainingInterrupted, Exception)
