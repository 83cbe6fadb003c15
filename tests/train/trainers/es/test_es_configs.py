"""Hyperparameters: documented defaults, and what is refused."""

import dataclasses

import pytest

from maze.core.errors import ConfigError
from maze.train.trainers.es.es_algorithm_config import ESAlgorithmConfig
from tests.configs import composed

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


def test_documented_fields_come_first_in_order():
    fields = [field.name for field in dataclasses.fields(ESAlgorithmConfig) if not field.kw_only]
    assert fields == list(DOCUMENTED)


def test_evolution_strategies_are_the_default_of_the_command_line():
    cfg = composed("conf_train", "env.name=CartPole-v0")
    documented = {
        "_target_": "maze.train.trainers.es.ESDevRunner",
        "n_eval_rollouts": 10,
        "shared_noise_table_size": 100_000_000,
    }
    assert documented.items() <= cfg.runner.items()


def test_the_runner_of_processes_takes_their_numbers():
    assert {"n_train_workers", "n_eval_workers", "start_method"} <= set(composed("conf_train", "runner=local").runner)


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
