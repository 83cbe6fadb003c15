"""Functions in processes of their own, time limits and travelling exceptions."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from maze.api.run_context import RunContext
from maze.core.errors import WorkerError
from maze.utils.bcolors import BColors
from maze.utils.exception_report import ExceptionReport
from maze.utils.process import Process, one_numpy_thread
from maze.utils.timeout import Timeout


class TwoArgumentsError(Exception):
    """Can be pickled, but not restored: its constructor wants what `args` does not hold."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def add(a, b=1):
    return a + b


def much():
    return b"x" * 5_000_000


def fail_with_value_error():
    raise ValueError("wrong value")


def fail_unpicklably():
    raise TwoArgumentsError("salt", "pepper")


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(7)


def started(target, *args, **kwargs):
    process = Process(target=target, args=args, kwargs=kwargs)
    process.start()
    return process


def test_results_of_any_size_are_returned():
    assert started(add, 1, b=2).result() == 3
    process = started(much)
    assert len(process.result()) == 5_000_000
    assert process.exception() is None
    assert process.exitcode == 0


def test_an_exception_is_raised_again_with_the_traceback_of_the_process():
    process = started(fail_with_value_error)
    with pytest.raises(ValueError, match="wrong value") as error:
        process.result()
    assert "in fail_with_value_error" in str(error.value.__cause__)
    assert isinstance(process.exception(), ValueError)


def test_type_and_text_of_an_unpicklable_exception_survive():
    exception = started(fail_unpicklably).exception()
    assert isinstance(exception, RuntimeError)
    assert "TwoArgumentsError: salt and pepper" in str(exception)


def test_an_unpicklable_result_is_an_exception_and_no_hang():
    assert started(threading.Lock).exception() is not None


@pytest.mark.parametrize(
    ("target", "message"), [(kill_itself, r"killed by signal 9 \(SIGKILL\)"), (leave, "exited with code 7")]
)
def test_a_dead_process_raises_an_error_with_its_exit_status(target, message):
    with pytest.raises(WorkerError, match=message):
        started(target).result()


def test_an_exception_report_survives_pickling_and_keeps_the_traceback():
    try:
        fail_unpicklably()
    except TwoArgumentsError as exception:
        report = pickle.loads(pickle.dumps(ExceptionReport(exception)))
    assert report.text == "TwoArgumentsError: salt and pepper"
    assert "in fail_unpicklably" in str(report)


def test_a_time_limit_ends_the_block():
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="too slow"), Timeout(seconds=0.05, error_message="too slow"):
        time.sleep(5)
    assert time.monotonic() - begin < 2


def test_a_block_within_its_limit_leaves_timer_and_handler_as_they_were():
    handler, (remaining, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    with Timeout(seconds=5):
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 5
    assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(remaining, abs=1)
    assert signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.parametrize(("outer", "inner", "first"), [(0.05, 5, "outer"), (5, 0.05, "inner")])
def test_the_shortest_of_nested_time_limits_applies(outer, inner, first):
    with pytest.raises(TimeoutError, match=first), Timeout(outer, "outer"), Timeout(inner, "inner"):
        time.sleep(4)


def test_outer_time_limit_continues_after_an_inner_one():
    def run():
        with Timeout(0.1, "outer"):
            with Timeout(0.05, "inner"):
                pass
            time.sleep(4)

    with pytest.raises(TimeoutError, match="outer"):
        run()


def test_a_time_limit_outside_the_main_thread_is_a_clear_error():
    errors = []

    def run():
        try:
            with Timeout(1):
                pass
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


def test_coloured_text_resets_the_colour_at_its_end(capsys):
    BColors.print_colored("careful", BColors.WARNING)
    assert capsys.readouterr().out == "\033[93mcareful\033[0m\n"


def openblas_threads():
    return [each["num_threads"] for each in threadpool_info() if each["internal_api"] == "openblas"]


class ThreadCounter(gym.Env):
    """Its observation is the number of threads with which NumPy multiplies matrices; more than one fail."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.step(0)[0], {}

    def step(self, action):
        assert openblas_threads() == [1] * len(openblas_threads())
        return np.ones(1, np.float32), 0.0, False, True, {}


@pytest.fixture
def two_numpy_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with threadpool_limits(2, user_api="blas"):
        if 2 not in openblas_threads():
            pytest.skip("NumPy is built without OpenBLAS")
        yield


@pytest.mark.parametrize("runner", ["dev", "local"])
def test_runs_multiply_matrices_with_one_thread(two_numpy_threads, runner, tmp_path):
    overrides = {"runner.concurrency": 2, "algorithm.epoch_length": 1, "algorithm.rollout_evaluator": None}
    with RunContext(
        ThreadCounter, tmp_path, runner=runner, algorithm="a2c", model="auto", overrides=overrides, silent=True
    ) as rc:
        rc.train(n_epochs=1)
    assert 2 in openblas_threads()


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_environment_variables_decide_how_many_threads_multiply(two_numpy_threads, variable, monkeypatch):
    monkeypatch.setenv(variable, "2")
    with one_numpy_thread():
        assert 2 in openblas_threads()
