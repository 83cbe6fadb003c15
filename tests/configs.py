"""Configurations as `maze-run` composes them."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf


def composed(root: str, *overrides: str) -> DictConfig:
    """Compose a root configuration of Maze with overrides, Hydra's own part included."""
    with initialize_config_module("maze.conf", version_base="1.3", job_name="maze_cli"):
        return compose(root, overrides=list(overrides), return_hydra_config=True)


def cartpole_training(algorithm: str, **values: Any) -> DictConfig:
    """Compose a short training run on CartPole with fixed seeds.

    :param values: Values by their path, with `__` in place of dots.
    """
    choices = ["critic=flatten_concat_shared", f"algorithm={algorithm}", "env.name=CartPole-v1", "verbose=2"]
    cfg = composed("conf_train", *choices)
    del cfg.hydra
    cfg.seeding = {"env_base_seed": 1, "agent_base_seed": 2, "cudnn_determinism_flag": False}
    small = {"n_epochs": 1, "epoch_length": 2, "n_rollout_steps": 8, "rollout_evaluator.n_episodes": 2}
    for key, value in {**{f"algorithm.{key}": value for key, value in small.items()}, **values}.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    return cfg
