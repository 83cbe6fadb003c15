"""Each fault of an environment ends a run with one message that names the place, or causes a warning.

PPO is tested with every fault in the process, and with every fault that a worker process reports in its own way. The
other ways of collecting are tested with faults of each kind, and every further fault with one of them, in turn.
"""

from __future__ import annotations

import copy
import functools
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torch import nn

from maze.core.agent.policy import Policy
from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.env import faults
from maze.core.errors import ConfigError, EnvironmentContractError, MazeError, NonFiniteError, WorkerError
from maze.core.log_stats.log_stats import StatsContext
from maze.core.rollout import batched_acting
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.trajectory_recording.datasets.in_memory_dataset import InMemoryDataset
from maze.core.utils.checkpoint import load_state
from maze.core.utils.factory import Factory
from maze.core.utils.seeding import MazeSeeding
from maze.distributions.distribution_mapper import DistributionMapper
from maze.runner import Runner
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.common.evaluators import rollout_evaluator
from tests.train.faulty_envs import FaultyCoreEnv, FaultyEnv

AC = ("critic=flatten_concat_shared", "algorithm.n_rollout_steps=20", "algorithm.epoch_length=1")
EVALUATION = ("algorithm.rollout_evaluator.n_episodes=1",)
SMALL = ("model.policy.networks=[{hidden_units:[4]}]",)
TRAININGS = {
    "a2c": ("algorithm=a2c", *AC, *EVALUATION, "runner.concurrency=2", "runner.eval_concurrency=1"),
    "ppo": ("algorithm=ppo", *AC, *EVALUATION, "runner.concurrency=2", "runner.eval_concurrency=1"),
    "impala": (
        *("algorithm=impala", *AC, *EVALUATION, "algorithm.num_actors=2", "algorithm.actors_batch_size=2"),
        "runner.eval_concurrency=1",
    ),
    "sac": (
        *("algorithm=sac", *EVALUATION, "critic=flatten_concat_state_action", "algorithm.epoch_length=10"),
        *("algorithm.num_actors=2", "algorithm.rollouts_per_iteration=2", "algorithm.n_rollout_steps=2"),
        *("algorithm.batch_size=4", "algorithm.replay_buffer_size=60", "algorithm.initial_buffer_size=20"),
        *("runner.eval_concurrency=1", "algorithm.n_epochs=1"),
    ),
    "sacfd": (
        *("algorithm=sacfd", *EVALUATION, "critic=flatten_concat_state_action", "algorithm.epoch_length=10"),
        *("algorithm.num_actors=2", "algorithm.rollouts_per_iteration=2", "algorithm.n_rollout_steps=2"),
        *("algorithm.batch_size=4", "algorithm.replay_buffer_size=60", "algorithm.initial_buffer_size=20"),
        *("runner.eval_concurrency=1", "algorithm.n_epochs=1"),
    ),
    "bc": ("algorithm=bc", "algorithm.device=cpu", "algorithm.batch_size=8", "algorithm.n_eval_episodes=2"),
    "dqn": (
        *("algorithm=dqn", *EVALUATION, "critic=flatten_concat_shared", "algorithm.epoch_length=10"),
        *("algorithm.num_actors=2", "algorithm.rollouts_per_iteration=2", "algorithm.n_rollout_steps=2"),
        *("algorithm.batch_size=4", "algorithm.replay_buffer_size=60", "algorithm.initial_buffer_size=20"),
        *("runner.eval_concurrency=1", "algorithm.n_epochs=1"),
    ),
    "es": ("algorithm=es", "algorithm.n_rollouts_per_update=2", "runner.n_eval_rollouts=1"),
}


@functools.cache
def composed(name: str, runner: str) -> Any:
    with initialize_config_module("maze.conf", version_base="1.3"):
        if name == "rollouts":
            runner = "sequential" if runner == "dev" else "parallel"
            return compose("conf_rollout", overrides=[f"runner={runner}", "runner.n_episodes=2"])
        overrides = ["model=flatten_concat", f"runner={runner}", "algorithm.n_epochs=1", *TRAININGS[name]]
        return compose("conf_train", overrides=overrides)


@functools.cache
def demonstrations() -> InMemoryDataset:
    """Steps of the environment without a fault."""
    env = FaultyEnv("none")
    env.seed(1)
    policy = RandomPolicy(env.action_spaces_dict)
    policy.seed(1)
    generator = RolloutGenerator(env, terminate_on_done=True, record_next_observations=True)
    return InMemoryDataset([generator.rollout(policy, None) for _ in range(3)])


FAILED = "raised "
LOST = rf"{FAILED}RuntimeError: lost its marbles"
PLACES = {
    "es": r"an episode .*seeded with \d+.*(after \d+ steps|environment step \d+)",
    "rollouts": r"episode seeded with \d+.*after \d+ steps of its episode",
}
PLACE = r"environment \d.*after \d+ steps of its episode, \d+ ticks after it was seeded with \d+"
NUMBER = rf"{PLACE}|environment \d, (tick \d+ of \d+|the end of the rollout) .*\d+ ticks after it was seeded with \d+"
MISFIT = r"sub-step 0.*"

ENDS: dict[str, str] = {
    "raise in step": LOST,
    "out of memory": f"{FAILED}MemoryError",
    "recursion": f"{FAILED}RecursionError: maximum recursion depth exceeded",
    "generator exit": f"{FAILED}GeneratorExit",
    "stop iteration": f"{FAILED}StopIteration: 3",
    "assertion": f"{FAILED}AssertionError",
    "warning as error": f"{FAILED}DeprecationWarning: use something else",
    "odd exception": f"{FAILED}OddError: 1 and 2",
    "unpicklable exception": f"{FAILED}UnpicklableError: holds a lambda",
    "silent exception": f"{FAILED}SilentError: <its message cannot be shown: ValueError>",
    "exit": f"{FAILED}SystemExit: 3",
    "hang": f"{FAILED}TimeoutError: `step` takes longer than the limit of 0.4 s",
    "hang in reset": f"{FAILED}TimeoutError: `reset` takes longer than the limit of 0.4 s",
    "raise in reset": LOST,
    "raise in actor_id": LOST,
    "raise in observation conversion": LOST,
    "raise in action conversion": LOST,
    "three values": r"FaultyCoreEnv.step: expected \(state, reward, done, info\), found \(\w+, float, bool\)",
    "reward none": r"FaultyCoreEnv.step\(\) must return one number as the reward, found None",
    "reward text": r"FaultyCoreEnv.step\(\) must return one number as the reward, found 'much'",
    "reward digits": r"FaultyCoreEnv.step\(\) must return one number as the reward, found '3'",
    "reward array": r"FaultyCoreEnv.step\(\) must return one number as the reward, found array",
    "observation none": "sub-step 0: .*NoneType|sub-step 0: .*None",
    "observation list": "sub-step 0: .*(list|dictionary)",
    "observation shape": r"sub-step 0.*`position`: expected.*\(3,\).*\(5,\)",
    "observation text": "sub-step 0.*`position`: expected.*float32.*<U1",
    "missing key": r"sub-step 0: .*keys.*'mask'",
    "other key": r"sub-step 0: .*keys.*'mask', 'p",
    "empty mask": r"sub-step 0.*(no valid action|allows no action)",
}
"""What the message says, after the place: environment, sub-step, step and seed."""
NOT_FINITE: dict[str, str] = {
    "reward nan": "reward.* is nan",
    "reward inf": "reward.* is inf",
    "observation nan": r"observation `position`.*(index \[1\]|sub-step 0).* is (NaN|nan)",
    "observation inf": r"observation `position`.*(index \[2\]|sub-step 0).* is inf",
    "observation value none": "observation `position`.*( is (NaN or None|nan)|expected shape)",
}
BEFORE_ANY_STEP: dict[str, str] = {
    "raise in factory": f"environment.*{LOST}",
    "raise in seed": f"environment.*{LOST}|{LOST} in environment",
    "changing spaces": "environment.*: all environments of a run need the same `observation_spaces_dict`",
}
GOES_ON: dict[str, str] = {
    "warn": "something is odd",
    "print": "",
    "observation outside": "",  # values are held against their spaces on the first steps, and by `check_env`
    "raise in close": "`close` raised RuntimeError: lost its marbles",
    "exit in close": "`close` raised SystemExit",
}
DIES: dict[str, str] = {
    "hard exit": "exited with code 4",
    "killed": r"was killed by signal 9 \(SIGKILL\)",
    "crash": r"was killed by signal 11 \(SIGSEGV\)",
}
"""Only in worker processes: the process of the run cannot report its own end."""


class Outcome(NamedTuple):
    error: BaseException | None
    warned: str


IGNORED = {
    *(("rollouts", fault) for fault in ("reward nan", "reward inf")),
    ("rollouts", "empty mask"),  # the random policy does not read it
    *(("rollouts", fault) for fault in ("raise in factory", "changing spaces")),  # makes one environment only
    *(("bc", fault) for fault in ("reward nan", "reward inf", "observation inf")),  # it evaluates and learns of none
}
"""Values that are not read."""


class Looking(Policy):
    """Acts by what it sees, as far as that is possible at all."""

    def needs_state(self) -> bool:
        return False

    def seed(self, seed: int | None) -> None:
        pass

    def compute_action(self, observation: Any, *args: Any, **kwargs: Any) -> Any:
        total = np.float32(observation["mask"].sum() + (np.asarray(observation["position"]) * np.ones(3)).sum())
        if not np.isfinite(total):
            raise NonFiniteError(f"the sum is {total}.")
        return {"move": int(total) % 2}

    def compute_top_action_candidates(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def run(name: str, runner: str, fault: str, **options: Any) -> Outcome:
    """Runs something with an environment that has a fault.

    :return: What was raised, and what was warned of.
    """
    cfg = copy.deepcopy(composed(name, runner))
    target = f"{FaultyEnv.__module__}.{FaultyEnv.__qualname__}"
    OmegaConf.update(cfg, "env", {"_target_": target, "fault": fault}, merge=False, force_add=True)
    for cell in ("seeding.env_base_seed", "seeding.agent_base_seed"):
        OmegaConf.update(cfg, cell, 11)
    for key, value in options.items():
        OmegaConf.update(cfg, f"runner.{key}", value)
    FaultyCoreEnv.n_made = 0
    error: BaseException | None = None
    with warnings.catch_warnings(record=True) as caught, StatsContext():
        warnings.simplefilter("always")
        built = None
        try:
            built = Factory(Runner).instantiate(cfg.runner)
            if name == "rollouts":
                built.maze_seeding = MazeSeeding(11, 11, False)
                built.run_with(env=OmegaConf.to_container(cfg.env), wrappers={}, agent=Looking())
            else:
                if name == "bc":
                    built.dataset = demonstrations()
                if name == "sacfd":
                    built.initial_demonstration_trajectories = demonstrations()
                built.setup(cfg)
                built.run()
        except BaseException as raised:
            error = raised
        finally:
            if hasattr(built, "close"):
                built.close()
    return Outcome(error, "\n".join(str(warning.message) for warning in caught))


def check(name: str, runner: str, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    monkeypatch.chdir(tmp_path)
    error, warned = run(name, runner, fault, env_timeout=0.4)
    message = str(error).replace("\n", " ")
    place = PLACES.get(name, PLACE)
    if fault == "interrupt" and runner == "dev":
        assert isinstance(error, KeyboardInterrupt)  # not distinguishable from that of the user
    elif (name, fault) in IGNORED:
        assert error is None or runner == "local"
    elif fault in GOES_ON:
        assert error is None
        assert runner == "local" or re.search(GOES_ON[fault], warned + caplog.text)
    else:
        assert isinstance(error, MazeError), repr(error)
        what = {**ENDS, **NOT_FINITE, **BEFORE_ANY_STEP, **DIES, "interrupt": "KeyboardInterrupt"}[fault]
        assert re.search(what, message), message
        if fault in ENDS or fault in NOT_FINITE:
            assert re.search(NUMBER if fault in NOT_FINITE and name not in PLACES else place, message), message
            assert "Traceback" not in message or runner == "local"
        assert message.count("sub-step 0") <= 2 or runner == "local"


KINDS = [*ENDS, *NOT_FINITE, *BEFORE_ANY_STEP, *GOES_ON, "interrupt"]
OF_PROCESSES = (
    "raise in step",
    "exit",
    "unpicklable exception",
    "hang",
    "interrupt",
    "observation nan",
    "observation shape",
)


ONE_OF_EACH = ("raise in step", "hang", "observation nan", "raise in factory")
IN_PROCESS = [
    *(("ppo", fault) for fault in KINDS),
    *((name, fault) for name in ("impala", "sac", "es", "rollouts") for fault in ONE_OF_EACH),
]
IN_PROCESSES = [
    *(("ppo", fault) for fault in (*OF_PROCESSES, *BEFORE_ANY_STEP, *DIES, "print")),
    *(("rollouts", fault) for fault in ("raise in step", "killed")),
]


@pytest.mark.parametrize(("name", "fault"), IN_PROCESS)
def test_environment_faults_end_a_run_in_process_with_their_place(
    name: str, fault: str, monkeypatch: Any, tmp_path: Path, caplog: Any
) -> None:
    check(name, "dev", fault, monkeypatch, tmp_path, caplog)


@pytest.mark.parametrize(("name", "fault"), IN_PROCESSES)
def test_environment_faults_end_a_run_in_worker_processes_with_their_place(
    name: str, fault: str, monkeypatch: Any, tmp_path: Path, caplog: Any
) -> None:
    check(name, "local", fault, monkeypatch, tmp_path, caplog)


@pytest.mark.parametrize("name", TRAININGS)
def test_long_work_is_announced_before_the_third_step(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(run(name, "dev", "raise in step").error, MazeError)
    work = (
        r"-> ((epoch 1: )?collecting [\d,]+ (environment steps|episodes)|evaluating the initial|epoch 1: \d+ updates)"
    )
    assert re.search(rf"^{work}.* \.\.\.$", capsys.readouterr().out, re.MULTILINE)


COLLECTING = ("impala", "sac", "bc", "es", "rollouts")
"""One algorithm of each way of collecting besides `ppo`."""
OF_EACH_KIND = {
    *("raise in step", "stop iteration", "silent exception", "exit", "hang", "hang in reset", "raise in reset"),
    *("raise in action conversion", "three values", "reward none", "observation shape", "missing key", "empty mask"),
    *("reward nan", "observation inf", "warn", "exit in close", "interrupt", *BEFORE_ANY_STEP),
}
FURTHER = [fault for fault in KINDS if fault not in OF_EACH_KIND]
IN_WORKERS = ("es", "impala", "sac")
REPORTED_BY_WORKERS = [
    fault for fault in (*OF_PROCESSES[1:], *BEFORE_ANY_STEP, *DIES) if fault not in ("hang", "interrupt", "killed")
]
IN_TURN = {(COLLECTING[index % len(COLLECTING)], fault) for index, fault in enumerate(FURTHER)}
REST = [
    *(
        (name, "dev", fault)
        for name in COLLECTING
        for fault in KINDS
        if (fault in OF_EACH_KIND or (name, fault) in IN_TURN) and (name, fault) not in IN_PROCESS
    ),
    *((name, "dev", fault) for name in TRAININGS if name not in (*COLLECTING, "ppo") for fault in ONE_OF_EACH),
    *((name, "local", fault) for name in IN_WORKERS for fault in ("raise in step", "hang", "interrupt", "killed")),
    *((IN_WORKERS[index % 3], "local", fault) for index, fault in enumerate(REPORTED_BY_WORKERS)),
    *(
        (name, "local", fault)
        for index, fault in enumerate((*KINDS, *DIES))
        for name in (("ppo", "rollouts") if fault in (*OF_PROCESSES, *DIES) else (("ppo", "rollouts")[index % 2],))
        if (name, fault) not in IN_PROCESSES
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "runner", "fault"), REST)
def test_an_environment_fault_ends_the_run_with_its_place_for_every_algorithm_and_runner(
    name: str, runner: str, fault: str, monkeypatch: Any, tmp_path: Path, caplog: Any
) -> None:
    check(name, runner, fault, monkeypatch, tmp_path, caplog)


# -- what the table does not show ---------------------------------------------------------------------------------


class Masked(nn.Module):
    """Permits what the observation says."""

    def forward(self, observation: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"move": torch.where(observation["mask"] > 0, 0.0, torch.finfo(torch.float32).min)}


@pytest.mark.parametrize("vector_env", [SequentialVectorEnv, SubprocVectorEnv])
def test_a_mask_without_a_permitted_action_names_its_environment(vector_env: Any) -> None:
    healthy = functools.partial(FaultyEnv, "")
    env = vector_env([healthy, functools.partial(FaultyEnv, "empty mask"), healthy])
    try:
        env.seed([1, 2, 3])
        policy = TorchPolicy(
            networks={0: Masked()}, distribution_mapper=DistributionMapper(env.action_spaces_dict[0], {}), device="cpu"
        )
        generator = RolloutGenerator(env)
        place = "environment 1, sub-step 0, after 12 steps of its episode, 12 ticks after it was seeded with 2"
        with pytest.raises(EnvironmentContractError, match=f"{place}: .*`move` has no valid action"):
            generator.collect(policy, generator.allocate(20))
    finally:
        env.close()


def test_a_failure_names_the_file_of_the_last_saved_epoch(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ("algorithm.n_epochs=3", "algorithm.n_rollout_steps=8", "algorithm.rollout_evaluator=null")
    monkeypatch.setitem(TRAININGS, "longer", (*TRAININGS["a2c"], *overrides))
    error, _ = run("longer", "dev", "raise in step")
    assert "The run up to epoch 1 is saved in `latest.pt`" in str(error)
    assert load_state("latest.pt")["epoch"] == 1


def test_an_endless_episode_is_reported_and_stopped(monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(batched_acting, "LONG_EPISODE", 50)
    monkeypatch.setattr(faults, "LONG_EPISODE", 50)
    monkeypatch.setattr(faults, "ENDLESS_EPISODE", 200)
    env = SequentialVectorEnv([functools.partial(FaultyEnv, fault) for fault in ("", "never done")])
    policy = TorchPolicy(
        networks={0: Masked()}, distribution_mapper=DistributionMapper(env.action_spaces_dict[0], {}), device="cpu"
    )
    message = "evaluation environment 1: the episode has not ended after 200 steps.*max_episode_steps"
    with pytest.raises(EnvironmentContractError, match=message):
        rollout_evaluator.RolloutEvaluator(eval_env=env, n_episodes=2, model_selection=None).evaluate(policy)
    (warning,) = caplog.messages
    assert "evaluation environment 1: the episode has not ended after 50 steps" in warning


@pytest.mark.parametrize("seconds", [0, -1, True, "long", float("inf")])
def test_a_time_limit_is_a_positive_number(seconds: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ppo", "rollouts"):
        error, _ = run(name, "dev", "", env_timeout=seconds)
        assert isinstance(error, ConfigError)
        assert str(error).startswith("runner.env_timeout: expected a number above 0")


@pytest.mark.long
def test_a_worker_whose_environment_never_returns_to_python_is_ended(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("maze.core.utils.worker_pool._HANG_SECONDS", 1.0)
    error, _ = run("ppo", "local", "native hang", env_timeout=0.2)
    assert isinstance(error, WorkerError)
    assert "environment worker 0 (environment 0, pid" in str(error)
    assert "did not return from native code within 1 seconds after `runner.env_timeout` during `step`" in str(error)
    assert "Raise `timeout` (`runner.env_timeout` of a run)" in str(error)
