"""Hyperparameters: documented defaults, the YAML files, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module

import maze.conf
from maze.core.errors import ConfigError
from maze.train.trainers.common.config_classes import algorithm_class
from maze.train.trainers.es.es_algorithm_config import ESAlgorithmConfig

CONF = Path(maze.conf.__file__).parent
DOCUMENTED = {
    "n_epochs": 0,
    "n_rollouts_per_update": 10,
    "n_timesteps_per_update": 0,
    "max_steps": 0,
    "optimizer": {"_target_": "maze.train.trainers.es.optimizers.adam.Adam", "step_size": 0.01},
    "l2_penalty": 0.005,
    "noise_stddev": 0.02,
    "policy_wrapper": None,
}


def test_yaml_states_exactly_the_dataclass_defaults():
    values = yaml.safe_load((CONF / "algorithm" / "es.yaml").read_text())
    assert algorithm_class({"_target_": values.pop("_target_")}) is ESAlgorithmConfig
    assert list(values.items()) == list(dataclasses.asdict(ESAlgorithmConfig()).items())
    assert values == {**DOCUMENTED, "patience": 0, "objective": None, "maximize": True, "constraints": []}


def test_documented_fields_come_first_in_order():
    fields = [field.name for field in dataclasses.fields(ESAlgorithmConfig) if not field.kw_only]
    assert fields == list(DOCUMENTED)


def test_runner_files_state_the_documented_defaults():
    dev = yaml.safe_load((CONF / "algorithm_runner" / "es-dev.yaml").read_text())
    documented = {
        "_target_": "maze.train.trainers.es.ESDevRunner",
        "n_eval_rollouts": 10,
        "shared_noise_table_size": 100_000_000,
    }
    assert documented.items() <= dev.items()
    local = yaml.safe_load((CONF / "algorithm_runner" / "es-local.yaml").read_text())
    assert local["_target_"] == "maze.train.trainers.es.ESLocalRunner"
    assert {"n_train_workers", "n_eval_workers", "start_method"} <= set(local)


def test_evolution_strategies_are_the_default_of_the_command_line():
    with initialize_config_module("maze.conf", version_base="1.3"):
        cfg = compose("conf_train", overrides=["env.name=CartPole-v0"])
    assert cfg.runner._target_ == "maze.train.trainers.es.ESDevRunner"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"noise_stddev": 0.0}, "algorithm.noise_stddev: expected a number above 0"),
        ({"l2_penalty": -1.0}, "algorithm.l2_penalty"),
        ({"max_steps": -1}, "algorithm.max_steps"),
        ({"n_rollouts_per_update": 1.5}, "algorithm.n_rollouts_per_update"),
    ],
)
def test_invalid_values_are_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        ESAlgorithmConfig(**values)
