"""Wrong arguments: the message names the argument, what was expected, what was found and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maze.api.run_context import RunContext
from maze.api.utils import InvalidSpecificationError, RunContextError
from maze.core.agent.random_policy import RandomPolicy
from maze.core.errors import ConfigError, MazeError
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.perception.models.critics.shared_state_critic_composer import SharedStateCriticComposer
from maze.perception.models.custom_model_composer import CustomModelComposer
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.es.es_runners import ESDevRunner
from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig


def cartpole() -> GymMazeEnv:
    return GymMazeEnv("CartPole-v1")


ES_RUNNER = "maze.train.trainers.es.es_runners.ESDevRunner"
AC_RUNNERS = "maze.train.trainers.common.actor_critic.actor_critic_runners"
SEQUENTIAL = "maze.core.rollout.sequential_rollout_runner.SequentialRolloutRunner"


class OwnAlgorithmConfig(AlgorithmConfig):
    """A configuration without a trainer."""


def model_composer() -> CustomModelComposer:
    env = cartpole()
    return CustomModelComposer(env.action_spaces_dict, env.observation_spaces_dict, env.agent_counts_dict)


def critic_composer() -> SharedStateCriticComposer:
    network = "maze.perception.models.built_in.flatten_concat.FlattenConcatStateValueNet"
    networks = [{"_target_": network, "non_lin": "torch.nn.Tanh", "hidden_units": [2]}]
    spaces = cartpole().observation_spaces_dict
    return SharedStateCriticComposer(
        observation_spaces_dict=spaces, agent_counts_dict={0: 1}, networks=networks, stack_observations=False
    )


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "directory that is a number": (lambda: {"run_dir": 3}, "run_dir: expected a directory, found 3"),
    "unknown environment": (lambda: {"env": "gym_evn"}, "env=gym_evn.*Did you mean `gym_env`"),
    "unknown algorithm": (lambda: {"algorithm": "pppo"}, "algorithm=pppo.*Did you mean `ppo`.*Options.*sac"),
    "unknown model": (lambda: {"model": "vektor_obs"}, "model=vektor_obs.*Did you mean `vector_obs`"),
    "unknown critic": (lambda: {"critic": "template_stat"}, "critic=template_stat.*Did you mean `template_state`"),
    "unknown wrappers": (lambda: {"wrappers": "vektor_obs"}, "wrappers=vektor_obs.*Did you mean `vector_obs`"),
    "unknown runner": (lambda: {"runner": "remote"}, "runner=remote.*Options of runner: dev, local"),
    "unknown experiment": (lambda: {"experiment": "cartpole_pp"}, "experiment=cartpole_pp.*cartpole_ppo"),
    "unknown configuration": (lambda: {"configuration": "conf_trian"}, "^configuration: conf_trian.*conf_train"),
    "unknown launcher": (lambda: {"launcher": "locl", "multirun": True}, "hydra/launcher=locl.*local"),
    "unknown key": (
        lambda: {"algorithm": "ppo", "overrides": {"algorithm.clip_rnge": 0.1}},
        r"algorithm.clip_rnge.*Did you mean `algorithm.clip_range`.*use the key '\+algorithm.clip_rnge'",
    ),
    "unknown key of an object": (
        lambda: {"algorithm": PPOAlgorithmConfig(), "overrides": {"algorithm.clip_rnge": 0.1}},
        "algorithm.clip_rnge.*`algorithm` has no key 'clip_rnge'.*Did you mean `clip_range`",
    ),
    "unknown key for a mapping": (
        lambda: {"overrides": {"model.polcy": {"_target_": "x.y"}}},
        "`model` has no key 'polcy'.*Did you mean `policy`",
    ),
    "value of the wrong type": (
        lambda: {"algorithm": "ppo", "overrides": {"algorithm.lr": "fast"}},
        "algorithm.lr: expected a number of at least 0, found 'fast'",
    ),
    "list without multirun": (
        lambda: {"algorithm": "ppo", "overrides": {"algorithm.lr": [0.1, 0.2]}},
        "algorithm.lr: expected a number.*pass multirun=True",
    ),
    "components without multirun": (lambda: {"env": ["gym_env"]}, "env: expected .* found a list.*multirun=True"),
    "empty list": (lambda: {"overrides": {"algorithm.n_epochs": []}, "multirun": True}, "an empty list"),
    "class for an object": (
        lambda: {"algorithm": PPOAlgorithmConfig},
        r"algorithm: expected .*AlgorithmConfig, found the class PPOAlgorithmConfig.*PPOAlgorithmConfig\(\.\.\.\)",
    ),
    "object of another kind": (lambda: {"policy": model_composer()}, "policy: expected .*BasePolicyComposer, found .*"),
    "number for an environment": (lambda: {"env": 3}, r"env: expected .* found 3 \(int\)"),
    "no mapping of overrides": (lambda: {"overrides": ["algorithm.lr=1"]}, "overrides: expected a mapping"),
    "no text as key": (lambda: {"overrides": {1: 2}}, "overrides: expected a mapping from paths"),
    "argument and override": (
        lambda: {"critic": "template_state", "overrides": {"model.critic": {"_target_": "x.y"}}},
        "critic: given both as an argument and as overrides",
    ),
    "policy twice": (
        lambda: {"policy": {"_target_": "x.y"}, "overrides": {"model.policy": {"_target_": "x.y"}}},
        "policy: given both",
    ),
    "policy beside a model composer": (
        lambda: {"model": model_composer(), "policy": {"_target_": "x.y"}},
        "`model` is a CustomModelComposer, which has no `policy`",
    ),
    "override into a model composer": (
        lambda: {"model": model_composer(), "overrides": {"model.policy.networks.0.hidden_units": [3]}},
        r"overrides\['model.policy.networks.0.hidden_units'\]: `model` is a CustomModelComposer",
    ),
    "new key for a model composer": (
        lambda: {"model": model_composer(), "overrides": {"+model.size": 3}},
        r"overrides\['model.size'\]: `model` is",
    ),
    "override into a composer among the overrides": (
        lambda: {"overrides": {"model": model_composer(), "model.distribution_mapper_config": []}},
        "model.distribution_mapper_config.*`model` is a",
    ),
    "override into a critic composer": (
        lambda: {"critic": critic_composer(), "overrides": {"critic.networks": []}},
        "critic.networks.*`critic` is a",
    ),
    "critic in the overrides beside a model composer": (
        lambda: {"model": model_composer(), "overrides": {"critic": {"_target_": "x.y"}}},
        "critic: the chosen model has its own critic",
    ),
    "training runner for a rollout": (
        lambda: {"policy": "random_policy", "runner": "dev"},
        "runner: the chosen one cannot run this",
    ),
    "runner of another algorithm": (
        lambda: {"algorithm": "a2c", "runner": {"_target_": ES_RUNNER}},
        "runner: ESDevRunner is for ESTrainer, not for algorithm=a2c, which A2C trains.*runner=dev",
    ),
    "runner object of another algorithm": (
        lambda: {"algorithm": "ppo", "runner": ESDevRunner()},
        "runner: ESDevRunner is for ESTrainer, not for algorithm=ppo",
    ),
    "runner of another algorithm among the overrides": (
        lambda: {"algorithm": "es", "overrides": {"runner._target_": f"{AC_RUNNERS}.ACDevRunner"}},
        "runner: ACDevRunner is for ActorCritic, not for algorithm=es",
    ),
    "algorithm object of another runner": (
        lambda: {"algorithm": PPOAlgorithmConfig(), "runner": {"_target_": ES_RUNNER}},
        "runner: ESDevRunner is for ESTrainer, not for algorithm=ppo",
    ),
    "trainer of another algorithm": (
        lambda: {"algorithm": "ppo", "overrides": {"runner.trainer_class": "maze.train.trainers.a2c.a2c_trainer.A2C"}},
        "runner.trainer_class: A2C does not train a PPOAlgorithmConfig",
    ),
    "rollout runner for a run": (
        lambda: {"algorithm": "ppo", "runner": {"_target_": SEQUENTIAL}},
        "runner: expected a training runner, found SequentialRolloutRunner",
    ),
    "configuration of rollouts for a run": (
        lambda: {"configuration": "conf_rollout"},
        "configuration: 'conf_rollout' is not a training configuration.*conf_train",
    ),
    "launcher without multirun": (lambda: {"launcher": "local"}, "launcher: .*multirun=True"),
    "wrapper with an environment": (
        lambda: {"env": cartpole, "wrappers": TimeLimitWrapper.wrap(cartpole(), max_episode_steps=3)},
        "wrappers: an instance of .* contradicts env",
    ),
    "algorithm without a trainer": (
        lambda: {"algorithm": OwnAlgorithmConfig()},
        "algorithm: OwnAlgorithmConfig has no trainer. Set its class attribute `trainer`",
    ),
    "hyperparameters without a class": (lambda: {"algorithm": {"lr": 0.1}}, r"expected `_target_`.*\['lr'\]"),
    "missing input directory": (lambda: {"overrides": {"input_dir": "nowhere"}}, "input_dir: .*nowhere is not a dir"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    arguments, message = WRONG[name]
    with pytest.raises(InvalidSpecificationError, match=message):
        RunContext(**arguments())
    assert not list(tmp_path.iterdir())


UNTRAINED: dict[str, tuple[Callable[[RunContext], Any], str]] = {
    "evaluate": (lambda rc: rc.evaluate(), "^evaluate: expected a trained policy.*train.*run_dir"),
    "policy": (lambda rc: rc.policy, "^policy: expected a trained policy"),
    "compute_action": (lambda rc: rc.compute_action({}), "expected a trained policy"),
    "rollout": (lambda rc: rc.rollout(), "expected a trained policy"),
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_calls_that_need_a_trained_policy_are_refused_before_training(name: str) -> None:
    call, message = UNTRAINED[name]
    with pytest.raises(ConfigError, match=message):
        call(RunContext(algorithm="a2c"))


class Half:
    """Acts, but is no policy: it has no generators to seed."""

    def compute_action(self, *arguments: Any, **named: Any) -> dict[str, int]:
        return {"action": 0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rc: rc.train(n_epochs=1.5), "n_epochs: expected a whole number"),
        (lambda rc: rc.evaluate(n_episodes=0), "n_episodes: expected a whole number of at least 1, found 0"),
        (lambda rc: rc.evaluate(n_episodes=2.5), "n_episodes: expected a whole number of at least 1, found 2.5"),
        (lambda rc: rc.evaluate(n_episode=2), "evaluate: n_episode: unknown argument. Did you mean `n_episodes`"),
        (lambda rc: rc.evaluate(deterministic="no"), "deterministic: expected true or false, found 'no'"),
        (lambda rc: rc.rollout(deterministic="no"), "runner.deterministic: expected true or false, found 'no'"),
        (lambda rc: rc.evaluate(eval_env=cartpole()), r"eval_env: .*expected a vector environment, or LogStatsWrapper"),
        (lambda rc: rc.evaluate(policy=RandomPolicy), r"policy: found the class RandomPolicy, expected RandomPolicy\("),
        (lambda rc: rc.evaluate(policy="random"), "policy: found 'random'.*, expected an object such as Random"),
        (lambda rc: rc.evaluate(policy=Half()), "policy: found .*Half.*, expected an object such as RandomPolicy"),
        (lambda rc: rc.compare(n_episodes=2, minimize=3), "runner.minimize: expected a name, or a list .*, found 3"),
        (
            lambda rc: rc.compare(n_episodes=2, minimize="steps", maximize=["steps"]),
            "runner.minimize and runner.maximize both name steps",
        ),
        (lambda rc: rc.rollout(record_pages="yes"), "runner.record_pages: expected a whole number .*, found 'yes'"),
        (lambda rc: rc.rollout(max_steps=3), "runner.max_steps.*unknown key.*max_episode_steps"),
        (lambda rc: rc.rollout(runner="dev"), "runner: the chosen one cannot run this"),
    ],
)
def test_wrong_arguments_of_calls_are_named(call: Callable[[RunContext], Any], message: str) -> None:
    overrides = {"env.name": "CartPole-v1", "algorithm.epoch_length": 1, "algorithm.n_rollout_steps": 2}
    rc = RunContext(algorithm="a2c", overrides={**overrides, "runner.concurrency": 1}, silent=True)
    rc.train(n_epochs=1)
    with pytest.raises(ConfigError, match=message):
        call(rc)


OBSERVATIONS: dict[str, tuple[Any, Any, str]] = {
    "array": (np.zeros(4), None, r"sub-step 0: expected .* the keys \['observation'\], found ndarray"),
    "nothing": (None, None, "found NoneType"),
    "other key": ({"obs": np.zeros(4)}, None, r"keys \['observation'\], found \['obs'\]"),
    "other shape": ({"observation": np.zeros(5)}, None, r"`observation`: expected shape \(4,\).* found shape \(5,\)"),
    "text": ({"observation": "left"}, None, r"`observation`: expected shape \(4,\)"),
    "number as actor": ({"observation": np.zeros(4)}, 1, r"actor_id: expected ActorID\(.* found 1"),
}


def test_observations_that_do_not_fit_the_policy_are_described() -> None:
    overrides = {"env.name": "CartPole-v1", "algorithm.epoch_length": 1, "algorithm.n_rollout_steps": 2}
    rc = RunContext(algorithm="a2c", overrides={**overrides, "runner.concurrency": 1}, silent=True)
    rc.train(n_epochs=1)
    assert rc.compute_action({"observation": [0.0] * 4})["action"] in (0, 1)
    for observation, actor, message in OBSERVATIONS.values():
        with pytest.raises(MazeError, match=message):
            rc.compute_action(observation, actor_id=actor)


def test_a_policy_for_rollouts_cannot_be_trained() -> None:
    rc = RunContext(policy="random_policy")
    with pytest.raises(InvalidSpecificationError, match=r"policy='random_policy'.*only rolled out"):
        rc.train()


def test_a_failing_construction_leaves_no_directory(tmp_path: Path) -> None:
    rc = RunContext(algorithm="a2c", overrides={"env.name": "CartPol-v1"}, silent=True)
    with pytest.raises(ConfigError, match="CartPole"):
        rc.train(n_epochs=1)
    assert not list(tmp_path.rglob("*.yaml"))
    assert rc.run_dir is None


def test_a_run_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    rc = RunContext(run_dir="taken", algorithm="a2c", silent=True)
    with pytest.raises(RunContextError, match=r"run_dir: .*taken is a file"):
        rc.train(n_epochs=1)
