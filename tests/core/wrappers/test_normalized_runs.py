"""Statistics travel with a run: from the training to its continuation, to rollouts and into checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

import maze.conf
from maze.core.errors import CheckpointError
from maze.core.log_stats.log_stats import StatsContext
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.utils.checkpoint import load_state
from maze.core.utils.config_utils import EnvFactory
from maze.core.wrappers.observation_normalization.normalization_strategies.base import load_statistics
from maze.train.trainers.a2c.a2c_trainer import A2C
from maze.train.trainers.common.actor_critic.actor_critic_runners import ACDevRunner
from tests.configs import cartpole_training

CONF = Path(maze.conf.__file__).parent


def read(name):
    return yaml.safe_load((CONF / f"{name}.yaml").read_text())


ENV = {**read("env/gym_env"), "name": "CartPole-v1"}
VECTOR_OBS = read("wrappers/vector_obs")
RETURNS = {"ReturnNormalizationRewardWrapper": {"gamma": 0.9, "epsilon": 1e-8}}


@pytest.fixture
def train(tmp_path, monkeypatch):
    runners = []

    def run(directory, wrappers=VECTOR_OBS, input_dir="", seed=1, n_epochs=1):
        (tmp_path / directory).mkdir()
        monkeypatch.chdir(tmp_path / directory)
        cfg = cartpole_training("a2c", algorithm__n_epochs=n_epochs, algorithm__epoch_length=1)
        cfg.wrappers, cfg.input_dir = wrappers, str(input_dir)
        cfg.seeding.env_base_seed = seed
        cfg.algorithm.rollout_evaluator.n_episodes = 1
        runner = ACDevRunner(trainer_class=A2C, concurrency=2, eval_concurrency=1, normalization_samples=100)
        runners.append(runner)
        with StatsContext():
            runner.setup(cfg)
            runner.run()
        return runner

    yield run
    for runner in runners:
        runner.close()


def mean_of(path):
    return load_statistics(path)["observation"]["mean"].tolist()


def test_a_run_keeps_its_statistics_and_a_resumed_one_takes_them_over(train, tmp_path):
    runner = train("first")
    mean = mean_of(tmp_path / "first" / "statistics.pkl")
    for vector_env in (runner.trainer.rollout_generator.env, runner.trainer.evaluator.eval_env):
        for env in vector_env.envs:
            assert env.get_statistics()["observation"]["mean"].tolist() == mean
    train("other", seed=9)
    assert mean_of(tmp_path / "other" / "statistics.pkl") != mean
    train("second", seed=9, input_dir=tmp_path / "first")
    assert mean_of(tmp_path / "second" / "statistics.pkl") == mean


def test_rollouts_observe_as_in_training_or_report_what_is_missing(train, tmp_path, monkeypatch):
    runner = train("first")
    policy = {
        "_target_": "maze.core.agent.serialized_torch_policy.SerializedTorchPolicy",
        "model": OmegaConf.to_container(runner.cfg.model, resolve=True),
        "state_dict_file": "state_dict.pt",
        "spaces_dict_file": "spaces_config.pkl",
        "device": "cpu",
    }
    directory = str(tmp_path / "first")

    def rollout_env(wrappers=VECTOR_OBS):
        return RolloutRunner.init_env_and_agent(ENV, wrappers, 10, policy, directory, 5, 6)[0]

    training_env = runner.env_factory()
    training_env.seed(5)
    expected = training_env.reset()["observation"]
    monkeypatch.chdir(tmp_path)
    ((name, arguments),) = VECTOR_OBS.items()
    by_default = {name: {key: value for key, value in arguments.items() if key != "statistics_dump"}}
    for wrappers in (VECTOR_OBS, by_default):
        np.testing.assert_array_equal(rollout_env(wrappers).reset()["observation"], expected)
    with pytest.warns(UserWarning, match="holds normalization statistics"):
        rollout_env(wrappers={})
    shutil.move(f"{directory}/statistics.pkl", tmp_path / "elsewhere.pkl")
    with pytest.raises(CheckpointError, match=r"statistics.pkl.*input_dir"):
        rollout_env().reset()


def test_a_run_is_not_resumed_without_the_normalization_statistics_of_its_model(train, tmp_path):
    train("first", wrappers={})
    with pytest.raises(CheckpointError, match=r"first/statistics.pkl"):
        train("second", input_dir=tmp_path / "first")


def learned(state):
    """What the wrappers of each environment have learned."""
    return [of_env["wrappers"] for of_env in state["environments"]]


def test_reward_normalization_statistics_are_in_the_checkpoint_and_evaluation_does_not_update_them(train, tmp_path):
    runner = train("first", wrappers=RETURNS)
    saved = load_state(tmp_path / "first" / "latest.pt")["parts"]["rollouts"]
    assert [state[0]["count"] for state in learned(saved)] == [8, 8]
    assert [state[0]["count"] for state in learned(runner.trainer.evaluator.eval_env.state_dict())] == [0]
    other = train("second", wrappers=RETURNS, n_epochs=2)
    other.trainer.load_state(tmp_path / "first" / "latest.pt")
    assert learned(other.trainer.rollout_generator.env.state_dict()) == learned(saved)


@pytest.mark.parametrize("name", ["vector_obs", "pixel_obs"])
def test_prepared_configurations_build_their_wrappers(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image_env = {"_target_": "tests.core.wrappers.zoo_env.image_env"}
    env = EnvFactory(ENV if name == "vector_obs" else image_env, read(f"wrappers/{name}"))()
    if name == "pixel_obs":
        observation = env.reset()["observation-rgb2gray-resize_img"]
        assert observation.shape == (3, 96, 96)
        assert observation.min() >= 0.0
        assert 0.3 < observation.max() <= 1.0
