"""Hyperparameters: documented names, order and defaults, the YAML files, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import maze.conf
from maze.core.errors import ConfigError
from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.common.config_classes import algorithm_class
from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig

CONF = Path(maze.conf.__file__).parent
CONFIG_CLASSES = {"a2c": A2CAlgorithmConfig, "ppo": PPOAlgorithmConfig}
EVALUATOR = {
    "_target_": "maze.train.trainers.common.evaluators.rollout_evaluator.RolloutEvaluator",
    "deterministic": True,
    "n_episodes": 8,
}
COMMON = {
    "n_epochs": 0,
    "epoch_length": 25,
    "patience": 15,
    "critic_burn_in_epochs": 0,
    "n_rollout_steps": 100,
    "lr": 0.0005,
    "gamma": 0.98,
    "gae_lambda": 1.0,
    "policy_loss_coef": 1.0,
    "value_loss_coef": 0.5,
    "entropy_coef": 0.00025,
    "max_grad_norm": 0.0,
    "device": "cpu",
}
DOCUMENTED = {
    "a2c": {**COMMON, "rollout_evaluator": EVALUATOR},
    "ppo": {
        **COMMON,
        "lr": 0.00025,
        "batch_size": 100,
        "n_optimization_epochs": 4,
        "clip_range": 0.2,
        "rollout_evaluator": EVALUATOR,
    },
}


@pytest.mark.parametrize(("name", "config_class"), CONFIG_CLASSES.items())
def test_yaml_states_exactly_the_dataclass_defaults(name, config_class):
    with (CONF / "algorithm" / f"{name}.yaml").open() as file:
        values = yaml.safe_load(file)
    assert algorithm_class({"_target_": values.pop("_target_")}) is config_class
    assert values == dataclasses.asdict(config_class())


@pytest.mark.parametrize("name", CONFIG_CLASSES)
def test_yaml_goes_to_the_algorithm_part_of_the_configuration(name):
    assert (CONF / "algorithm" / f"{name}.yaml").read_text().startswith("# @package algorithm\n")


@pytest.mark.parametrize("name", CONFIG_CLASSES)
def test_documented_fields_come_first_in_order_and_with_their_defaults(name):
    config_class = CONFIG_CLASSES[name]
    assert list(dataclasses.asdict(config_class(*DOCUMENTED[name].values())).items()) == list(
        dataclasses.asdict(config_class()).items()
    )
    fields = [field.name for field in dataclasses.fields(config_class) if not field.kw_only]
    assert fields == list(DOCUMENTED[name])


@pytest.mark.parametrize("config_class", CONFIG_CLASSES.values())
def test_configuration_is_built_from_a_composed_mapping(config_class):
    config = config_class.from_config(OmegaConf.create({"lr": 0.1, "n_epochs": 3}))
    assert (config.lr, config.n_epochs, config.gamma) == (0.1, 3, 0.98)
    assert config_class.from_config(config) is config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_epochs": -1}, "algorithm.n_epochs: expected a whole number of at least 0, got -1"),
        ({"n_epochs": 1.5}, "algorithm.n_epochs"),
        ({"n_epochs": True}, "algorithm.n_epochs"),
        ({"epoch_length": 0}, "algorithm.epoch_length"),
        ({"n_rollout_steps": "many"}, "algorithm.n_rollout_steps"),
        ({"lr": -0.1}, "algorithm.lr: expected a number of at least 0, got -0.1"),
        ({"optimizer_eps": 0.0}, "algorithm.optimizer_eps: expected a number above 0, got 0.0"),
        ({"kl_to_initial_coef": -1.0}, "algorithm.kl_to_initial_coef"),
        ({"kl_to_initial_decay": 1.1}, "algorithm.kl_to_initial_decay"),
        ({"lr": "fast"}, "algorithm.lr"),
        ({"lr": float("nan")}, "algorithm.lr"),
        ({"gamma": 1.01}, "algorithm.gamma: expected a number of at least 0 and at most 1"),
        ({"gae_lambda": -0.1}, "algorithm.gae_lambda"),
        ({"max_grad_norm": -1}, "algorithm.max_grad_norm"),
        ({"lr_schedule": "linaer"}, "algorithm.lr_schedule: expected one of constant, linear, cosine"),
        ({"advantage_normalization": "no"}, "algorithm.advantage_normalization"),
        ({"device": None}, "algorithm.device"),
    ],
)
def test_invalid_values_are_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        A2CAlgorithmConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"clip_range": 0.0},
        {"clip_range": 1.0},
        {"batch_size": 0},
        {"n_optimization_epochs": 0},
        {"target_kl": -0.1},
        {"value_clip_range": 0.0},
    ],
)
def test_invalid_values_of_ppo_are_refused_by_name(values):
    with pytest.raises(ConfigError, match=f"algorithm.{next(iter(values))}"):
        PPOAlgorithmConfig(**values)


def test_an_unknown_field_is_refused_with_the_right_one():
    with pytest.raises(ConfigError, match=r"algorithm\.gama: .* Did you mean `algorithm\.gamma`\?"):
        A2CAlgorithmConfig.from_config({"gama": 0.9})
    with pytest.raises(ConfigError, match=r"algorithm\.clip_range: A2CAlgorithmConfig has no such field"):
        A2CAlgorithmConfig.from_config({"clip_range": 0.2})


@pytest.mark.parametrize("name", ["a2c-dev", "a2c-local", "ppo-dev", "ppo-local"])
def test_runner_files_name_runner_and_trainer(name):
    text = (CONF / "algorithm_runner" / f"{name}.yaml").read_text()
    algorithm, runner = name.split("-")
    assert text.startswith("# @package runner\n")
    assert yaml.safe_load(text) == {
        "_target_": "maze.train.trainers.common.actor_critic.actor_critic_runners."
        + {"dev": "ACDevRunner", "local": "ACLocalRunner"}[runner],
        "trainer_class": f"maze.train.trainers.{algorithm}.{algorithm}_trainer.{algorithm.upper()}",
        "concurrency": 0,
        "eval_concurrency": 0,
        "eval_repeats": None,
        "critic_burn_in_epochs": None,
    }
