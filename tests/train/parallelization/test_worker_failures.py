"""Real faults of worker processes: each ends in one error that names the worker and the cause."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError, EnvironmentContractError, WorkerError
from maze.core.utils.worker_pool import EnvWorkerError
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from tests.train.parallelization.toy_envs import counting_env, hierarchical_env, random_walk_env

LONG = ((100, "terminated"),)
MOVES = {"move": np.zeros(4, np.int64)}


def faulty(name: str, at: int) -> Any:
    return partial(counting_env, LONG, (name, at))


def failing_env(fault: Any, **arguments: Any) -> SubprocVectorEnv:
    """Four environments in two workers; the third, in the second worker, has the fault."""
    healthy = partial(counting_env, LONG)
    return SubprocVectorEnv([healthy, healthy, fault, healthy], n_workers=2, **arguments)


def step_until_it_fails(env: SubprocVectorEnv) -> tuple[EnvWorkerError, float]:
    env.reset()
    env.step(MOVES)
    start = time.monotonic()
    with pytest.raises(EnvWorkerError) as caught:
        env.step(MOVES)
    return caught.value, time.monotonic() - start


def assert_all_gone(env: SubprocVectorEnv) -> None:
    assert not any(worker.process.is_alive() for worker in env._pool.workers)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("raise", "raised ValueError: the simulator lost its marbles in environment 2, .* during `step`"),
        ("unpicklable", "raised UnpicklableError: with a lambda inside in environment 2, .* during `step`"),
        ("exit", "raised SystemExit: 3 in environment 2, .* during `step`"),
        ("hard_exit", "exited with code 4 during `step`"),
        ("kill", r"was killed by signal 9 \(SIGKILL\) during `step`"),
    ],
)
def test_a_failing_worker_becomes_one_error_at_once(fault, expected):
    env = failing_env(faulty(fault, 2))
    error, seconds = step_until_it_fails(env)
    assert error.args[0].startswith(f"environment worker 1 (environments 2 to 3, pid {error.pid}) ")
    with pytest.raises(WorkerError, match=expected):
        raise error
    assert (error.worker_index, error.env_indices, error.call) == (1, [2, 3], "step")
    assert seconds < 4.0
    assert_all_gone(env)
    with pytest.raises(WorkerError, match="processes have ended"):
        env.step(MOVES)


def test_the_original_traceback_and_exception_come_along():
    error, _ = step_until_it_fails(failing_env(faulty("raise", 2)))
    assert "in cause_fault" in str(error)
    assert isinstance(error.__cause__, ValueError)


def test_a_worker_killed_from_outside_between_two_calls_is_named():
    env = failing_env(partial(counting_env, LONG))
    env.reset()
    os.kill(env._pool.workers[0].process.pid, signal.SIGKILL)
    with pytest.raises(EnvWorkerError, match=r"environment worker 0 .*signal 9"):
        env.step(MOVES)
    assert_all_gone(env)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_leaves_workers_to_their_parent(signum):
    env = failing_env(partial(counting_env, LONG))
    env.reset()
    for worker in env._pool.workers:
        os.kill(worker.process.pid, signum)
    env.step(MOVES)
    env.close()
    assert_all_gone(env)


GROUP_SCRIPT = """
import os, signal, sys
from functools import partial
import numpy as np
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from tests.train.parallelization.toy_envs import counting_env

os.setpgrp()
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
env = SubprocVectorEnv([partial(counting_env, ((100, "terminated"),))] * 2, start_method="forkserver")
env.reset()
os.killpg(os.getpgrp(), signal.SIGTERM)  # what a job scheduler does
for _ in range(20):
    env.step({"move": np.zeros(2, np.int64)})
env.close()
print(*received)
"""


def test_a_signal_to_the_whole_group_ends_neither_workers_nor_the_server_they_come_from():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", GROUP_SCRIPT]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (finished.stdout.strip(), finished.returncode) == ("SIGTERM", 0), finished.stderr


def test_processes_of_others_that_come_from_the_server_end_as_usual():
    env = SubprocVectorEnv([counting_env], start_method="forkserver")
    process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    process.start()
    time.sleep(0.2)
    process.terminate()
    process.join(5.0)
    assert process.exitcode == -signal.SIGTERM
    env.close()


def test_close_returns_in_time_when_a_worker_has_stopped_reading():
    env = failing_env(partial(counting_env, LONG))
    env.reset()
    worker = env._pool.workers[1]
    os.kill(worker.process.pid, signal.SIGSTOP)
    os.set_blocking(worker.channel.fd, False)
    with suppress(BlockingIOError):
        while True:
            os.write(worker.channel.fd, bytes(4096))
    os.set_blocking(worker.channel.fd, True)
    start = time.monotonic()
    env.close()
    assert time.monotonic() - start < 5.0
    assert_all_gone(env)


class ClosingEnv(gym.Env):
    """Leaves a file when it is closed, and may fail in its third step."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, file, fails):
        self.file, self.fails, self.n_steps = file, fails, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.n_steps += 1
        if self.fails and self.n_steps == 3:
            raise ValueError("the simulator lost its marbles")
        return np.zeros(2, np.float32), 1.0, False, False, {}

    def close(self):
        self.file.touch()
        if self.file.name == "1":
            raise RuntimeError("and it cannot even be closed")


def closing_env(file, fails):
    return GymMazeEnv(env=ClosingEnv(file, fails))


def step_three_times(env):
    for _ in range(3):
        env.step({"action": np.zeros(4, np.int64)})


def test_all_environments_of_a_failed_worker_are_closed(tmp_path):
    factories = [partial(closing_env, tmp_path / str(index), index == 2) for index in range(4)]
    env = SubprocVectorEnv(factories, n_workers=1, start_method="fork")
    env.reset()
    with pytest.raises(WorkerError, match="lost its marbles in environment 2"):
        step_three_times(env)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def test_a_hanging_worker_is_named_when_the_time_is_up():
    env = failing_env(faulty("hang", 2), timeout=1.0)
    error, seconds = step_until_it_fails(env)
    assert "worker 1" in str(error)
    assert "did not answer within 1 seconds during `step`" in str(error)
    assert 0.9 < seconds < 6.0
    assert_all_gone(env)


def test_failing_reset_is_distinguished_from_a_failing_step():
    with pytest.raises(EnvWorkerError, match=r"the reset went wrong in environment 2.* during `reset`"):
        failing_env(faulty("reset", 0)).reset()


def test_failing_reset_within_a_step_is_reported():
    env = SubprocVectorEnv([partial(counting_env, ((1, "terminated"),), ("reset", 1))])
    env.reset()
    with pytest.raises(EnvWorkerError, match=r"the reset went wrong in environment 0.* during `step`"):
        env.step({"move": np.array([0])})


def test_failing_factory_is_reported_with_its_index():
    def broken() -> MazeEnv[Any]:
        raise FileNotFoundError("level.map")

    with pytest.raises(
        EnvWorkerError, match=r"FileNotFoundError: level\.map in environment 2 during `building"
    ) as caught:
        failing_env(broken)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_different_spaces_in_different_workers_are_refused():
    with pytest.raises(EnvironmentContractError, match=r"environment 1: .*observation_spaces_dict"):
        SubprocVectorEnv([counting_env, random_walk_env], n_workers=2)


def test_close_returns_in_time_with_a_hanging_and_a_dead_worker_and_may_be_repeated():
    env = failing_env(faulty("hang", 1))
    env.reset()
    for worker in env._pool.workers:
        worker.channel.send(b"S")
    os.kill(env._pool.workers[0].process.pid, signal.SIGKILL)
    start = time.monotonic()
    env.close()
    assert time.monotonic() - start < 5.0
    assert_all_gone(env)
    env.close()


def test_a_stopped_worker_does_not_hold_up_close():
    env = failing_env(partial(counting_env, LONG))
    env.reset()
    os.kill(env._pool.workers[1].process.pid, signal.SIGSTOP)
    start = time.monotonic()
    env.close()
    assert time.monotonic() - start < 5.0
    assert_all_gone(env)


def test_an_interrupted_call_leaves_no_answers_behind_for_the_next():
    env = failing_env(faulty("hang", 1))
    env.reset()
    previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            env.step(MOVES)
    finally:
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(WorkerError, match="interrupted"):
        env.step(MOVES)
    assert_all_gone(env)


def test_workers_go_when_the_vector_environment_is_forgotten():
    env = SubprocVectorEnv([counting_env])
    processes = [worker.process for worker in env._pool.workers]
    del env
    for process in processes:
        process.join(3.0)
        assert not process.is_alive()


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_every_start_method_works(start_method):
    env = SubprocVectorEnv([counting_env] * 2, n_workers=2, start_method=start_method)
    env.reset()
    observations, *_ = env.step({"move": np.array([0, 0])})
    np.testing.assert_array_equal(observations["count"], [[1, 0], [1, 0]])
    env.close()


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match=r"start_method: expected one of .* 'thread'"):
        SubprocVectorEnv([counting_env], start_method="thread")
    with pytest.raises(ConfigError, match="n_workers"):
        SubprocVectorEnv([counting_env], n_workers=0)
    with pytest.raises(ConfigError, match="0 factories"):
        SubprocVectorEnv([])


def test_non_empty_infos_arrive_even_if_they_need_cloudpickle():
    class Info:
        pass

    def env_with_info() -> MazeEnv[Any]:
        env = hierarchical_env()
        core_step = env.core_env.step

        def step(action: Any) -> Any:
            state, reward, done, info = core_step(action)
            return state, reward, done, {**info, "object": Info(), "function": lambda: 5}

        env.core_env.step = step  # type: ignore[method-assign]
        env.env = env.core_env  # binds the step again
        return env

    env = SubprocVectorEnv([env_with_info])
    env.reset()
    actions = {"walk": {"direction": np.array([0])}, "grasp": {"force": np.zeros((1, 2), np.float32)}}
    *_, infos = env.step(actions)
    assert type(infos[0]["object"]).__name__ == "Info"
    assert infos[0]["function"]() == 5
    env.close()


def test_workers_do_not_import_torch_nor_the_script_and_need_no_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, sys, os
            print("imported")
            import numpy as np
            from tests.train.parallelization.toy_envs import counting_env
            from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv

            def local_env():
                assert "torch" not in sys.modules
                return counting_env()

            env = SubprocVectorEnv([local_env] * 2)
            env.reset()
            print(env.step({"move": np.zeros(2)})[1].tolist())
            # no close: leaving has to work all the same
            """
        )
    )
    result = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["imported", "[1.0, 1.0]"]
    assert result.stderr == ""


PARENT = """
import sys
import numpy as np
from functools import partial
from tests.train.parallelization.toy_envs import counting_env
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv

if __name__ == "__main__":
    fault = ("hang", 1) if sys.argv[1] == "hanging" else None
    start_method = "fork" if sys.argv[1] == "forked" else None
    env = SubprocVectorEnv(
        [partial(counting_env, ((100, "terminated"),), fault)] * 2, n_workers=2, start_method=start_method
    )
    env.reset()
    print(*[worker.process.pid for worker in env._pool.workers], flush=True)
    if fault:
        env.step({"move": np.zeros(2)})
    sys.stdin.read()
"""


@pytest.mark.parametrize("case", ["idle", "hanging", "forked"])
def test_workers_leave_when_their_parent_is_killed(case, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), case],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    deadline = time.monotonic() + 5.0
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone, the latter between opening and reading
        return False
