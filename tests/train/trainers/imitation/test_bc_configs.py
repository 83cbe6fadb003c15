"""Hyperparameters: documented defaults, and what is refused."""

import pytest

from maze.core.errors import ConfigError
from maze.train.trainers.imitation.bc_algorithm_config import BCAlgorithmConfig
from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig
from tests.configs import composed

DOCUMENTED = {
    "n_epochs": 1000,
    "optimizer": {"_target_": "torch.optim.Adam", "lr": 0.001},
    "device": "cuda",
    "batch_size": 100,
    "eval_every_k_iterations": 500,
    "validation_percentage": 20,
    "n_eval_episodes": 8,
    "entropy_coef": 0.0,
}


@pytest.mark.parametrize(("name", "n_workers"), [("dev", 1), ("local", 5)])
def test_runners_have_the_documented_defaults(name, n_workers):
    values = composed("conf_train", "algorithm=bc", f"runner={name}").runner
    assert values["_target_"] == f"maze.train.trainers.imitation.bc_runners.BC{name.capitalize()}Runner"
    assert values["eval_concurrency"] == 0
    datasets = "maze.core.trajectory_recording.datasets"
    assert values["dataset"] == {
        "_target_": f"{datasets}.in_memory_dataset.InMemoryDataset",
        "input_data": "trajectory_data",
        "dir_or_file": None,
        "n_workers": n_workers,
        "deserialize_in_main_thread": False,
        "trajectory_processor": {"_target_": f"{datasets}.trajectory_processor.IdentityTrajectoryProcessor"},
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"validation_percentage": 100}, "algorithm.validation_percentage: expected .* below 100"),
        ({"batch_size": 0}, "algorithm.batch_size"),
        ({"eval_every_k_iterations": 0}, "algorithm.eval_every_k_iterations"),
        ({"device": None}, "algorithm.device"),
        (
            {"validation_split": "step"},
            "algorithm.validation_split: expected one of auto, episodes, steps, found 'step'",
        ),
    ],
)
def test_invalid_values_are_refused_by_name(values, message):
    with pytest.raises(ConfigError, match=message):
        BCAlgorithmConfig(**values)


def test_the_documented_command_for_fine_tuning_composes():
    cfg = composed(
        "conf_train",
        *("env.name=LunarLander-v3", "model=vector_obs", "critic=template_state", "wrappers=vector_obs"),
        *("algorithm=ppo", "runner.eval_repeats=100", "runner.critic_burn_in_epochs=10", "input_dir=outputs/cloned"),
    )
    assert (cfg.runner.eval_repeats, cfg.runner.critic_burn_in_epochs) == (100, 10)


@pytest.mark.parametrize(("algorithm", "config_class"), [("ppo", PPOAlgorithmConfig), ("sac", SACAlgorithmConfig)])
def test_experiments_for_fine_tuning_let_the_critic_learn_first_and_hold_the_policy(algorithm, config_class):
    cfg = composed("conf_train", f"+experiment=lunar_lander_fine_tune_{algorithm}", "input_dir=outputs/cloned")
    config = config_class.from_config(cfg.algorithm)
    burn_in = cfg.runner.get("critic_burn_in_epochs") or config.critic_burn_in_epochs
    assert 0 < burn_in < config.n_epochs
    assert config.kl_to_initial_coef > 0
    assert (
        cfg.model == composed("conf_train", "algorithm=bc", "model=vector_obs", f"critic={critic_of(algorithm)}").model
    )


def critic_of(algorithm):
    return "template_state_action" if algorithm == "sac" else "template_state"
