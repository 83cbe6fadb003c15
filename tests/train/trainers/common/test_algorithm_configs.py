"""Hyperparameters: documented names, order and defaults, what is composed, and what is refused."""

import dataclasses

import pytest
from omegaconf import OmegaConf

from maze.cli.hydra_setup import SHIPPED_ALGORITHMS
from maze.core.errors import ConfigError
from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.common.config_classes import algorithm_class
from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig
from tests.configs import composed

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


@pytest.mark.parametrize(("name", "path"), SHIPPED_ALGORITHMS.items())
def test_an_algorithm_is_composed_of_the_defaults_of_its_dataclass(name, path):
    values = OmegaConf.to_container(composed("conf_train", f"algorithm={name}").algorithm)
    config_class = algorithm_class(values)
    assert values.pop("_target_") == path
    assert values == dataclasses.asdict(config_class())


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
        ({"n_epochs": -1}, "algorithm.n_epochs: expected a whole number of at least 0, found -1"),
        ({"n_epochs": 1.5}, "algorithm.n_epochs"),
        ({"n_epochs": True}, "algorithm.n_epochs"),
        ({"epoch_length": 0}, "algorithm.epoch_length"),
        ({"n_rollout_steps": "many"}, "algorithm.n_rollout_steps"),
        ({"lr": -0.1}, "algorithm.lr: expected a number of at least 0, found -0.1"),
        ({"optimizer_eps": 0.0}, "algorithm.optimizer_eps: expected a number above 0, found 0.0"),
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


@pytest.mark.parametrize("name", ["a2c", "ppo"])
@pytest.mark.parametrize("kind", ["dev", "local"])
def test_a_runner_has_the_documented_arguments(name, kind):
    runner = composed("conf_train", f"algorithm={name}", f"runner={kind}").runner
    documented = {
        "_target_": "maze.train.trainers.common.actor_critic.actor_critic_runners."
        + {"dev": "ACDevRunner", "local": "ACLocalRunner"}[kind],
        "trainer_class": f"maze.train.trainers.{name}.{name}_trainer.{name.upper()}",
        "concurrency": 0,
        "eval_concurrency": 0,
        "eval_repeats": None,
        "critic_burn_in_epochs": None,
    }
    assert documented.items() <= runner.items()
