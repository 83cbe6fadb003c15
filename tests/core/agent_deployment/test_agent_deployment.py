"""Deployment of an agent: documented examples, episodes, candidates, errors, threads and restored environments."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from maze.core.agent.dummy_cartpole_policy import DummyCartPolePolicy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.agent_deployment.external_core_env import DeploymentError, EpisodeOverError
from maze.core.agent_deployment.maze_action_candidates import ActionCandidates, MazeActionCandidates
from maze.core.env.base_env import is_truncated
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, ConfigError, EnvironmentContractError, MazeError, NonFiniteError
from maze.core.events.event_record import EventRecord
from maze.core.log_events.log_events_writer_registry import LogEventsWriterRegistry
from maze.core.log_stats.log_stats import LogStatsLevel, StatsContext
from maze.core.utils.config_utils import read_hydra_config
from maze.core.wrappers.discretize_actions_wrapper import DiscretizeActionsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.wrapper import Wrapper
from maze.test.shared_test_utils.dummy_env.agents.dummy_policy import DummyGreedyPolicy
from maze.test.shared_test_utils.helper_functions import build_dummy_maze_env
from tests.core.agent_deployment.recorded import RepeatActionWrapper, deployment_threads, named, torch_policy_for

STATE = np.zeros(4, np.float32)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(deployment_threads())
    yield
    assert not set(deployment_threads()) - before


def cartpole(policy: Any = None, **arguments: Any) -> AgentDeployment:
    return AgentDeployment(policy or DummyCartPolePolicy(), GymMazeEnv("CartPole-v1"), **arguments)


# -- as documented ---------------------------------------------------------------------------------------------------


def test_the_documented_example_runs() -> None:
    env = GymMazeEnv("CartPole-v1")
    policy = RandomPolicy(action_spaces_dict=env.action_spaces_dict)
    policy.seed(1)
    agent_deployment = AgentDeployment(policy=policy, env=env)
    external_env = gym.make("CartPole-v1")
    maze_state, _ = external_env.reset(seed=1)
    reward, done, info = 0, False, {}
    for _ in range(10):
        maze_action = agent_deployment.act(maze_state, reward, done, info)
        maze_state, reward, done, _, info = external_env.step(maze_action)
    agent_deployment.close(maze_state, reward, done, info)
    assert agent_deployment.get_stats_value(BaseEnvEvents.reward, name="mean") == 10


def test_a_deployment_is_built_from_objects_configurations_or_both() -> None:
    cfg = read_hydra_config(config_module="maze.conf", config_name="conf_rollout", env="gym_env")
    cfg.env.name = "CartPole-v1"
    objects = {"policy": DummyCartPolePolicy(), "env": GymMazeEnv("CartPole-v1"), "wrappers": None}
    configs = {"policy": cfg.policy, "env": cfg.env, "wrappers": cfg.wrappers}
    for policy in (objects, configs):
        for env in (objects, configs):
            with AgentDeployment(policy=policy["policy"], env=env["env"], wrappers=env["wrappers"]) as deployment:
                assert deployment.act(STATE, 0, False, {}) in (0, 1)


def test_the_documented_dummy_classes_exist() -> None:
    with AgentDeployment(policy=DummyGreedyPolicy(), env=build_dummy_maze_env()) as deployment:
        assert [deployment.act({"step": 0, "target": number}, 0, False, {}) for number in (2, 0, 1)] == [2, 0, 1]


# -- episodes --------------------------------------------------------------------------------------------------------


def run_episode(deployment: AgentDeployment, n_steps: int, done: bool = True) -> None:
    for step in range(n_steps):
        deployment.act(STATE, 1.0 if step else None, False, {})
    deployment.finish_episode(STATE, 1.0, done, {})


def test_episodes_follow_one_another_in_one_deployment() -> None:
    with cartpole() as deployment:
        for n_steps in (3, 5, 1):
            run_episode(deployment, n_steps)
            assert deployment.last_episode_stats
            assert deployment.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPISODE, "count") == n_steps
        assert deployment.n_episodes == 3
        assert deployment.get_stats_value(BaseEnvEvents.reward, name="mean") == 3.0
        assert deployment.get_stats_value(BaseEnvEvents.reward, name="max") == 5.0


def test_statistics_cover_the_latest_episodes() -> None:
    with cartpole(stats_window=2) as deployment:
        for n_steps in (9, 3, 5):
            run_episode(deployment, n_steps)
        assert deployment.n_episodes == 3
        assert deployment.get_stats_value(BaseEnvEvents.reward, name="max") == 5.0
        assert deployment.get_stats_value(BaseEnvEvents.reward, name="total_episode_count") == 2


def test_after_close_the_environment_holds_the_statistics() -> None:
    deployment = cartpole()
    run_episode(deployment, 3)
    deployment.act(STATE, 0, False, {})
    deployment.close(STATE, 1.0, True, {})
    for name, value in (("episode_count", 2), ("max", 3.0), ("min", 1.0)):
        assert deployment.get_stats_value(BaseEnvEvents.reward, name=name) == value
        assert deployment.env.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPOCH, name=name) == value


def test_an_episode_without_a_last_state_counts_as_far_as_it_is_known() -> None:
    with cartpole() as deployment:
        for reward in (None, 1.0, 1.0):
            deployment.act(STATE, reward, False, {})
        deployment.finish_episode()
        assert deployment.get_stats_value(BaseEnvEvents.reward, name="mean") == 2.0
        run_episode(deployment, 4)
        assert deployment.n_episodes == 2


def test_closing_completes_the_running_episode() -> None:
    deployment = cartpole()
    deployment.act(STATE, 0, False, {})
    deployment.close(STATE, 1.0, False, {})
    deployment.close()
    assert deployment.n_episodes == 1
    with pytest.raises(DeploymentError, match=r"act: this deployment is closed\. Create another one"):
        deployment.act(STATE, 0, False, {})
    with pytest.raises(DeploymentError, match="finish_episode: this deployment is closed"):
        deployment.finish_episode()


class LastStep(Wrapper[Any]):
    """Remembers the last step's result."""

    def step(self, action: Any) -> Any:
        self.result = self.env.step(action)
        return self.result

    def get_observation_and_action_dicts(self, *arguments: Any) -> Any:
        return self.env.get_observation_and_action_dicts(*arguments)


@pytest.mark.parametrize(
    ("done", "info", "truncated"),
    [(True, {}, False), (False, {}, True), (True, {"TimeLimit.truncated": True}, True)],
)
def test_an_episode_that_is_not_over_when_it_is_finished_was_cut_off(
    done: bool, info: dict[str, Any], truncated: bool
) -> None:
    env = LastStep(GymMazeEnv("CartPole-v1"))
    given = dict(info)
    with AgentDeployment(DummyCartPolePolicy(), env) as deployment:
        deployment.act(STATE, 0, False, {})
        deployment.finish_episode(STATE, 1.0, done, given)
        assert env.result[2] is True
        assert is_truncated(*env.result[2:]) is truncated
    assert given == info  # what belongs to the caller stays as it is


def test_a_wrapper_that_ends_the_episode_is_reported_and_the_next_episode_can_start() -> None:
    env = TimeLimitWrapper.wrap(GymMazeEnv("CartPole-v1"), max_episode_steps=3)
    with AgentDeployment(DummyCartPolePolicy(), env) as deployment:
        for _ in range(2):
            for step in range(3):
                deployment.act(STATE, float(step), False, {})
            with pytest.raises(EpisodeOverError, match=r"ended the episode after 3 actions.*TimeLimitWrapper"):
                deployment.act(STATE, 3.0, False, {})
            deployment.finish_episode()  # does no harm
        assert deployment.n_episodes == 2
        assert deployment.get_stats_value(BaseEnvEvents.reward, name="mean") == 6.0


def test_an_episode_may_end_while_an_action_is_being_repeated() -> None:
    env = RepeatActionWrapper(GymMazeEnv("CartPole-v1"), 3)
    with AgentDeployment(DummyCartPolePolicy(), env) as deployment:
        for n_actions in (1, 2, 3, 4):
            run_episode(deployment, n_actions)
            assert deployment.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPISODE, "sum") == n_actions


def test_actors_share_a_reward_array() -> None:
    with cartpole() as deployment:
        deployment.act(STATE, None, False, {})
        deployment.act(STATE, np.array([1.0, 2.0]), False, {})
        assert deployment.env.get_actor_rewards().tolist() == [1.0, 2.0]
        deployment.finish_episode()
        assert deployment.get_stats_value(BaseEnvEvents.reward, name="mean") == 3.0


def test_event_logs_go_to_the_writers_of_the_caller() -> None:
    logs: list[Any] = []
    writer: Any = type("Writer", (), {"write": lambda self, log: logs.append(log)})()
    with StatsContext(), cartpole() as deployment:
        LogEventsWriterRegistry.register_writer(writer)
        run_episode(deployment, 3)
    assert [len(log.step_event_logs) for log in logs] == [3]


# -- candidates ------------------------------------------------------------------------------------------------------


def test_candidates_come_with_their_probabilities_best_first() -> None:
    env = GymMazeEnv("CartPole-v1")
    policy = torch_policy_for(env)
    with AgentDeployment(policy, env, num_candidates=2) as deployment:
        for _ in range(3):
            candidates = deployment.act(STATE, 1.0, False, {})
            assert isinstance(candidates, MazeActionCandidates)
            expected = policy.compute_top_action_candidates({"observation": STATE}, 2, None, None)
            assert candidates.candidates == [int(action["action"]) for action in expected[0]]
            assert candidates.probabilities == expected[1]
            assert candidates.probabilities[0] >= candidates.probabilities[1]
        deployment.finish_episode(STATE, 1.0, True, {})
        counted = deployment.last_episode_stats
        assert any(
            "DiscreteActionEvents" in name and value == [candidates.candidates[0]] * 3
            for name, value in named(counted).items()
        )


def test_action_wrappers_convert_each_candidate() -> None:
    config = {"action": {"num_actions": 5, "low": None, "high": None}}
    env = DiscretizeActionsWrapper(GymMazeEnv("Pendulum-v1"), config)
    policy = torch_policy_for(env)
    with AgentDeployment(policy, env, num_candidates=10) as deployment:
        candidates = deployment.act(np.zeros(3, np.float32), 0, False, {})
        assert sorted(float(action[0]) for action in candidates.candidates) == [-2.0, -1.0, 0.0, 1.0, 2.0]
        assert sum(candidates.probabilities) == pytest.approx(1.0)
    assert env.action({"action": 0})["action"] == pytest.approx(-2.0)  # single actions again


def test_candidates_that_a_wrapper_loses_are_an_error() -> None:
    class Copying(LastStep):
        def step(self, action: Any) -> Any:
            return self.env.step(dict(action))

    with (
        AgentDeployment(DummyCartPolePolicy(), Copying(GymMazeEnv("CartPole-v1")), num_candidates=2) as deployment,
        pytest.raises(EnvironmentContractError, match=r"Use num_candidates=1, or derive the wrapper"),
    ):
        deployment.act(STATE, 0, False, {})


def test_candidates_need_as_many_probabilities() -> None:
    with pytest.raises(EnvironmentContractError, match="found 2 actions and 1 probabilities"):
        ActionCandidates(([{"action": 0}, {"action": 1}], [1.0]))


@pytest.mark.parametrize("number", [0, -1, 1.5, "two", True, None])
def test_an_invalid_number_of_candidates_is_refused(number: Any) -> None:
    with pytest.raises(ConfigError, match="num_candidates: expected a whole number of at least 1"):
        cartpole(num_candidates=number)


# -- wrong use -------------------------------------------------------------------------------------------------------


def test_acting_after_the_end_of_the_episode_is_refused_without_effect() -> None:
    with cartpole() as deployment:
        deployment.act(STATE, 0, False, {})
        with pytest.raises(DeploymentError, match=r"finish_episode\(maze_state, reward, done, info\)"):
            deployment.act(STATE, 1.0, True, {})
        deployment.finish_episode(STATE, 1.0, True, {})
        run_episode(deployment, 2)
        assert deployment.n_episodes == 2


WRONG_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"reward": None}, EnvironmentContractError, "after 1 actions of the episode: `reward` must be a number"),
    ({"reward": "1"}, EnvironmentContractError, "`reward` must be a number"),
    ({"reward": float("nan")}, NonFiniteError, "after 1 actions of the episode: `reward` is nan"),
    ({"info": [1]}, EnvironmentContractError, "`info` must be a mapping or None"),
    ({"events": ["cut"]}, EnvironmentContractError, r"`events` must hold EventRecords, .*'cut'"),
    ({"actor_id": 1}, EnvironmentContractError, "`actor_id` must be ActorID"),
    ({"actor_id": ActorID("cut", 0)}, EnvironmentContractError, r"one of the step keys \[0\], found .*'cut'"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG_ARGUMENTS, ids=lambda value: str(value)[:30])
def test_wrong_arguments_are_refused_before_anything_happens(
    wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    with cartpole() as deployment:
        deployment.act(STATE, 0, False, {})
        with pytest.raises(error, match=message):
            deployment.act(**{"maze_state": STATE, "reward": 1.0, "done": False, "info": {}, **wrong})
        deployment.act(STATE, 1.0, False, None)
        deployment.finish_episode(STATE, 1.0, True, {})
        assert deployment.get_stats_value(BaseEnvEvents.reward, name="mean") == 2.0


WRONG_STATES: list[tuple[Any, type[Exception], str]] = [
    (None, EnvironmentContractError, r"cannot convert a state of type NoneType .*shape \(\), expected \(4,\)"),
    ((STATE, {}), EnvironmentContractError, "Expected a state as the simulation"),
    ({"step": 1}, EnvironmentContractError, r"expected values of dtype float32, .*found \{'step': 1\}"),
    (np.zeros(3), EnvironmentContractError, r"`observation` has the shape \(3,\), expected \(4,\)"),
    (np.array([0, np.inf, 0, 0]), NonFiniteError, "observation `observation` is not finite"),
]


@pytest.mark.parametrize("n_before", [0, 5])
@pytest.mark.parametrize(("state", "error", "message"), WRONG_STATES, ids=lambda value: str(value)[:30])
def test_a_wrong_state_is_named(state: Any, error: type[Exception], message: str, n_before: int) -> None:
    with cartpole() as deployment:
        for _ in range(n_before):
            deployment.act(STATE, 1.0, False, {})
        with pytest.raises(error, match=rf"(?s)(?=.*GymMazeEnv.*, sub-step 0|CartPole-v1).*{message}"):
            deployment.act(state, 1.0, False, {})
        assert not deployment_threads()
        with pytest.raises(DeploymentError, match=r"the episode failed before .* Call finish_episode\(\)"):
            deployment.act(STATE, 1.0, False, {})
        deployment.finish_episode()
        run_episode(deployment, 2)
        assert deployment.get_stats_value(BaseEnvEvents.reward, LogStatsLevel.EPISODE, "count") == 2


def test_an_environment_serves_one_deployment_at_a_time() -> None:
    env = GymMazeEnv("CartPole-v1")
    with AgentDeployment(DummyCartPolePolicy(), env) as first:
        first.act(STATE, 0, False, {})
        second = AgentDeployment(DummyCartPolePolicy(), env)
        with pytest.raises(DeploymentError, match="is in use by another deployment"):
            second.act(STATE, 0, False, {})
        first.act(STATE, 1.0, False, {})
    assert second.act(STATE, 0, False, {}) in (0, 1)
    second.close()


def test_attributes_of_the_simulation_are_refused() -> None:
    class Peeking(LastStep):
        def step(self, action: Any) -> Any:
            return self.env.core_env.inventory

    with (
        AgentDeployment(DummyCartPolePolicy(), Peeking(GymMazeEnv("CartPole-v1"))) as deployment,
        pytest.raises(AttributeError, match="inventory"),
    ):
        deployment.act(STATE, 0, False, {})


# -- failures, threads, interruptions --------------------------------------------------------------------------------


class Breaking(DummyCartPolePolicy):
    """Breaks at its third action."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.n_actions = 0

    def compute_action(self, *arguments: Any, **options: Any) -> Any:
        self.n_actions += 1
        if self.n_actions == 3:
            raise self.error
        return super().compute_action(*arguments, **options)


@pytest.mark.parametrize("error", [ValueError("the network broke"), ConfigError("wrong"), KeyboardInterrupt()])
def test_an_exception_inside_reaches_the_caller_with_its_traceback(error: BaseException) -> None:
    env = GymMazeEnv("CartPole-v1")
    simulation = env.core_env
    deployment = AgentDeployment(Breaking(error), env)
    deployment.act(STATE, 0, False, {})
    deployment.act(STATE, 1.0, False, {})
    with pytest.raises(type(error)) as caught:
        deployment.act(STATE, 1.0, False, {})
    assert caught.value is error
    assert "in compute_action" in "".join(traceback.format_exception(caught.value))
    assert not deployment_threads()
    assert env.core_env is simulation
    deployment.close()


def test_an_exception_of_a_wrapper_while_the_episode_is_finished_reaches_the_caller() -> None:
    class BreaksAtTheSecondReset(LastStep):
        n_resets = 0

        def reset(self) -> Any:
            self.n_resets += 1
            if self.n_resets == 2:
                raise RuntimeError("cannot write")
            return self.env.reset()

    for way in ("finish_episode", "close"):
        deployment = AgentDeployment(DummyCartPolePolicy(), BreaksAtTheSecondReset(GymMazeEnv("CartPole-v1")))
        deployment.act(STATE, 0, False, {})
        with pytest.raises(RuntimeError, match="cannot write"):
            getattr(deployment, way)(STATE, 1.0, True, {})
        assert not deployment_threads()
        deployment.close()


def test_an_exception_of_the_caller_leaves_nothing_behind() -> None:
    env = GymMazeEnv("CartPole-v1")
    simulation = env.core_env

    def fail() -> None:
        with AgentDeployment(DummyCartPolePolicy(), env) as deployment:
            deployment.act(STATE, 0, False, {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert env.core_env is simulation


def test_a_deployment_without_references_ends() -> None:
    env = GymMazeEnv("CartPole-v1")
    simulation = env.core_env
    deployment = AgentDeployment(DummyCartPolePolicy(), env)
    deployment.act(STATE, 0, False, {})
    assert len(deployment_threads()) == 1
    del deployment
    gc.collect()
    assert not deployment_threads()
    assert env.core_env is simulation
    assert env.context.event_service.on_clear == []


def test_the_thread_starts_with_the_first_state() -> None:
    with cartpole() as deployment:
        assert not deployment_threads()
        deployment.act(STATE, 0, False, {})
        assert [thread.daemon for thread in deployment_threads()] == [True]


class Slow(DummyCartPolePolicy):
    """Takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.is_acting, self.go_on = threading.Event(), threading.Event()

    def compute_action(self, *arguments: Any, **options: Any) -> Any:
        self.is_acting.set()
        assert self.go_on.wait(10)
        return super().compute_action(*arguments, **options)


def test_two_threads_cannot_act_at_once_and_closing_waits() -> None:
    policy = Slow()
    deployment = cartpole(policy)
    actions: list[Any] = []
    other = threading.Thread(target=lambda: actions.append(deployment.act(STATE, 0, False, {})))
    other.start()
    assert policy.is_acting.wait(10)
    with pytest.raises(DeploymentError, match="act: another thread is using this deployment"):
        deployment.act(STATE, 0, False, {})
    threading.Timer(0.05, policy.go_on.set).start()
    deployment.close()
    other.join()
    assert len(actions) == 1


def test_closing_during_a_long_action_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maze.core.agent_deployment.agent_deployment.END_TIMEOUT", 0.05)
    policy = Slow()
    deployment = cartpole(policy)
    other = threading.Thread(target=deployment.act, args=(STATE, 0, False, {}))
    other.start()
    assert policy.is_acting.wait(10)
    with pytest.raises(DeploymentError, match=r"close: another thread is still in act\(\.\.\.\) after 0\.05 s"):
        deployment.close()
    policy.go_on.set()
    other.join()
    deployment.close()


def test_an_interruption_of_the_caller_ends_the_deployment() -> None:
    import _thread

    class Interrupting(DummyCartPolePolicy):
        def compute_action(self, *arguments: Any, **options: Any) -> Any:
            _thread.interrupt_main()
            time.sleep(0.1)
            return super().compute_action(*arguments, **options)

    deployment = cartpole(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        deployment.act(STATE, 0, False, {})
    start = time.monotonic()
    deployment.close()
    assert time.monotonic() - start < 5


def test_a_process_ends_although_a_deployment_was_not_closed(tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(
        "from maze.core.agent_deployment.agent_deployment import AgentDeployment\n"
        "from maze.test.shared_test_utils.dummy_env.agents.dummy_policy import DummyGreedyPolicy\n"
        "from maze.test.shared_test_utils.helper_functions import build_dummy_maze_env\n"
        "deployment = AgentDeployment(DummyGreedyPolicy(), build_dummy_maze_env())\n"
        "print(deployment.act({'step': 0, 'target': 2}, 0, False, {}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "2\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_the_process_cannot_use_the_deployment() -> None:
    with cartpole() as deployment:
        deployment.act(STATE, 0, False, {})
        pid = os.fork()
        if pid == 0:
            try:
                deployment.act(STATE, 1.0, False, {})
            except DeploymentError as error:
                os._exit(42 if "cannot be used in its fork" in str(error) else 1)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
        deployment.act(STATE, 1.0, False, {})


@pytest.mark.long
def test_a_thousand_episodes_and_deployments_leave_nothing_behind() -> None:
    import tracemalloc

    def files() -> int:
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    env = GymMazeEnv("CartPole-v1")
    deployment = cartpole(stats_window=50)
    tracemalloc.start()
    try:
        sizes = []
        for n_episodes in (200, 1000):  # the first ones fill windows and caches
            for _ in range(n_episodes):
                run_episode(deployment, 10)
            for _ in range(n_episodes // 10):
                with AgentDeployment(DummyCartPolePolicy(), env) as other:
                    run_episode(other, 2)
            gc.collect()
            sizes.append((tracemalloc.get_traced_memory()[0], files(), len(deployment_threads())))
    finally:
        tracemalloc.stop()
    deployment.close()
    assert sizes[1][0] - sizes[0][0] < 100_000
    assert sizes[1][1:] == sizes[0][1:] == (sizes[0][1], 1)


# -- trained agents --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run with estimated normalization statistics."""
    from maze.maze_cli import main

    run = tmp_path_factory.mktemp("training") / "run"
    short = ["algorithm.n_epochs=1", "algorithm.epoch_length=1", "algorithm.n_rollout_steps=4"]
    short += ["runner.concurrency=2", "algorithm.rollout_evaluator.n_episodes=1", "runner.normalization_samples=50"]
    choices = ["env.name=CartPole-v1", "wrappers=vector_obs", "algorithm=a2c"]
    here = Path.cwd()
    os.chdir(run.parent)
    try:
        assert main(["-cn", "conf_train", *choices, *short, f"hydra.run.dir={run}"]) == 0
    finally:
        os.chdir(here)
    return run


def test_a_training_run_is_deployed_with_its_statistics(trained: Path) -> None:
    with AgentDeployment.from_run(trained, deterministic=True) as deployment:
        env, policy = deployment.env, deployment.policy
        statistics = env.get_statistics()["observation"]
        states = np.random.default_rng(0).uniform(-0.4, 0.4, size=(20, 4)).astype(np.float32)
        for state in states:
            action = deployment.act(state, 1.0, False, {})
            normalized = (state - statistics["mean"]) / statistics["std"]
            expected = policy.compute_action({"observation": normalized.astype(np.float32)}, deterministic=True)
            assert action == expected["action"]


@pytest.mark.parametrize("name", ["state_dict.pt", "spaces_config.pkl", ".hydra/config.yaml"])
def test_missing_files_of_a_run_are_named(trained: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    with pytest.raises(CheckpointError, match=f"is not the directory of a training run: there is no {name}"):
        AgentDeployment.from_run(tmp_path / "run")


def test_a_run_without_its_statistics_is_named(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "statistics.pkl").unlink()
    with pytest.raises(MazeError, match=r"statistics\.pkl"):
        AgentDeployment.from_run(tmp_path / "run")


def test_a_stored_configuration_runs_no_foreign_code(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    config = tmp_path / "run" / ".hydra" / "config.yaml"
    config.write_text(
        config.read_text().replace(
            "maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env", "tensorboard.program.TensorBoard"
        )
    )
    with pytest.raises(CheckpointError, match=r"names tensorboard\.program\.TensorBoard.*trusted_packages=\['tens"):
        AgentDeployment.from_run(tmp_path / "run")


def test_events_are_counted_as_reported() -> None:
    with cartpole() as deployment:
        event = EventRecord(BaseEnvEvents, BaseEnvEvents.kpi, {"name": "waste", "value": 0.5})
        deployment.act(STATE, 0, False, {}, events=[event])
        deployment.finish_episode(STATE, 1.0, True, {})
        assert any(name.startswith("BaseEnvEvents.kpi") for name in named(deployment.stats))
