"""Algorithms as options of the group `algorithm`: shipped ones, and the user's own by their configuration class.

Hyperparameters and their defaults are stated once, in the dataclass of the algorithm, and registered from there in
Hydra's `ConfigStore`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from maze.core.errors import ConfigError

if TYPE_CHECKING:
    from maze.train.trainers.common.config_classes import AlgorithmConfig

TARGET = "algorithm._target_"
_TRAINERS = "maze.train.trainers"
_DATASETS = "maze.core.trajectory_recording.datasets"

SHIPPED_ALGORITHMS = {
    "a2c": f"{_TRAINERS}.a2c.a2c_algorithm_config.A2CAlgorithmConfig",
    "bc": f"{_TRAINERS}.imitation.bc_algorithm_config.BCAlgorithmConfig",
    "cql": f"{_TRAINERS}.offline.offline_algorithm_configs.CQLConfig",
    "dcl": f"{_TRAINERS}.labelling.labelling_configs.DCLConfig",
    "dqn": f"{_TRAINERS}.dqn.dqn_algorithm_config.DQNAlgorithmConfig",
    "es": f"{_TRAINERS}.es.es_algorithm_config.ESAlgorithmConfig",
    "impala": f"{_TRAINERS}.impala.impala_algorithm_config.ImpalaAlgorithmConfig",
    "iql": f"{_TRAINERS}.offline.offline_algorithm_configs.IQLConfig",
    "ppo": f"{_TRAINERS}.ppo.ppo_algorithm_config.PPOAlgorithmConfig",
    "ppo_auto": f"{_TRAINERS}.ppo.ppo_algorithm_config.PPOAutoAlgorithmConfig",
    "sac": f"{_TRAINERS}.sac.sac_algorithm_config.SACAlgorithmConfig",
    "sacfd": f"{_TRAINERS}.sac.sac_algorithm_config.SACAlgorithmConfig",
    "self_labelling": f"{_TRAINERS}.labelling.labelling_configs.SelfLabellingConfig",
    "td3_bc": f"{_TRAINERS}.offline.offline_algorithm_configs.TD3BCConfig",
}
"""Path of the configuration class of each shipped algorithm, by name."""


@functools.cache  # Hydra calls it for each composition
def register_algorithms() -> None:
    """Register the shipped algorithms, and arguments of their runners, as options of Hydra's configuration groups."""
    for name, path in SHIPPED_ALGORITHMS.items():
        module, _, class_name = path.rpartition(".")
        _store("algorithm", name, {"_target_": path, **_defaults(getattr(importlib.import_module(module), class_name))})
        for kind in ("dev", "local", "ray"):
            if runner := _runner_of(name, kind):
                _store("algorithm_runner", f"{name}-{kind}", runner, package="runner")


def option_of(config_class: type[AlgorithmConfig]) -> str:
    """Return the option of the group `algorithm` with the defaults of a class; register it if there is none.

    :param config_class: Configuration class of an algorithm.
    """
    path = f"{config_class.__module__}.{config_class.__qualname__}"
    for name, target in SHIPPED_ALGORITHMS.items():
        if target == path:
            return name
    name = config_class.name
    if name in SHIPPED_ALGORITHMS:
        raise ConfigError(
            f"algorithm: {config_class.__name__}.name is {name!r}, the name of another algorithm. Rename it."
        )
    _store("algorithm", name, {"_target_": path, **_defaults(config_class)})
    return name


def with_own_algorithm(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command; add `algorithm=` if only `algorithm._target_` names the user's algorithm.

    :param arguments: Overrides and flags.
    """
    targets = [text.partition("=")[2] for text in arguments if text.lstrip("+").startswith(f"{TARGET}=")]
    if not targets or "," in targets[-1]:
        return list(arguments)
    from maze.core.utils.factory import Factory
    from maze.train.trainers.common.config_classes import AlgorithmConfig

    option = option_of(Factory(AlgorithmConfig).type_from_name(targets[-1].strip("'\""), config_path=TARGET))
    is_chosen = any(text.startswith("algorithm=") for text in arguments)
    return list(arguments) if is_chosen else [*arguments, f"algorithm={option}"]


def _store(group: str, name: str, node: dict[str, Any], package: str = "") -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group=group, name=name, node=node, package=package or group, provider="maze")


def _runner_of(algorithm: str, kind: str) -> dict[str, Any]:
    """Return the arguments of an algorithm's runner besides those in `runner/<kind>`; empty: none.

    :param algorithm: Name of a shipped algorithm.
    :param kind: `dev`, `local` or `ray`.
    """
    arguments: dict[str, Any]
    prefix = {"dev": "Dev", "local": "Local", "ray": ""}[kind]
    if algorithm in ("a2c", "ppo", "ppo_auto"):
        runner = f"common.actor_critic.actor_critic_runners.AC{prefix}Runner"
        name = algorithm.removesuffix("_auto")
        trainer = f"{_TRAINERS}.{name}.{name}_trainer.{name.upper()}"
        arguments = {"trainer_class": trainer, "eval_repeats": None, "critic_burn_in_epochs": None}
    elif algorithm == "bc":
        runner = f"imitation.bc_runners.BC{prefix}Runner"
        arguments = {"dataset": {**_dataset(kind, "Identity"), "dir_or_file": None}}
    elif algorithm in ("cql", "iql", "td3_bc"):
        runner = "offline.offline_trainers.OfflineRunner"
        arguments = {"dataset": {**_dataset(kind, "IdentityWithNextObservation"), "dir_or_file": None}}
    elif algorithm == "es":
        runner = f"es.ES{prefix or 'Master'}Runner"
        arguments = {"n_eval_rollouts": 10, "shared_noise_table_size": 100_000_000}
        if kind == "local":
            arguments |= {"n_train_workers": 0, "n_eval_workers": 0, "start_method": None}
    elif algorithm == "impala":
        runner = f"impala.impala_runners.Impala{prefix}Runner"
        arguments = {"start_method": "forkserver"} if kind == "local" else {}
    elif algorithm in ("sac", "sacfd"):
        runner = f"sac.sac_runners.SAC{prefix}Runner"
        demonstrations = _dataset(kind, "IdentityWithNextObservation") if algorithm == "sacfd" else None
        arguments = {"initial_demonstration_trajectories": demonstrations}
    else:
        return {}
    return {"_target_": f"{_TRAINERS}.{runner}", **arguments}


def _dataset(kind: str, processor: str) -> dict[str, Any]:
    """Return the configuration of the data set with recorded trajectories."""
    return {
        "_target_": f"{_DATASETS}.in_memory_dataset.InMemoryDataset",
        "input_data": "trajectory_data",
        "n_workers": 1 if kind == "dev" else 5,
        "deserialize_in_main_thread": False,
        "trajectory_processor": {"_target_": f"{_DATASETS}.trajectory_processor.{processor}TrajectoryProcessor"},
    }


def _defaults(config_class: type[AlgorithmConfig]) -> dict[str, Any]:
    """Return the default of each field; `???`: no default, `None`: a default that no configuration can state."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        value: Any = "???"
        if field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException:
            value = None
        values[field.name] = value
    return values
