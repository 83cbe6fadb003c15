"""Configurations of training runs: dataclasses that carry values and check them."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, cast

from maze.core.errors import ConfigError
from maze.core.utils.config_utils import CheckedConfig
from maze.core.utils.factory import TARGET_KEY, Factory

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.perception.models.model_composer import CriticKind
    from maze.runner import Runner


@dataclass
class AlgorithmConfig(CheckedConfig, ABC):
    """Hyperparameters and properties of an algorithm.

    An algorithm is this class and a trainer; both may be in any package, and nothing has to be registered:
    `algorithm._target_` names the configuration's class, which names the rest. The author writes

    * the hyperparameters as fields with defaults and docstrings, checked in `__post_init__`;
    * `trainer` and, unless there is none, `critic`, and `distributions` where a policy's logits mean something else;
    * a trainer, which says how it is built (:meth:`~maze.train.trainers.common.trainer.Trainer.build`).

    Runners and placements, the command line, `RunContext`, model selection, checkpoints and sweeps come by themselves.
    The attributes below the fields are understood where a configuration makes fields of them.
    """

    section = "algorithm"

    name: ClassVar[str] = ""
    """Name of the algorithm in messages and directories. Default: the name of the class without
    `AlgorithmConfig` or `Config`, in small letters."""

    critic: ClassVar[CriticKind | None] = None
    """The kind of critic that is learned besides the policy; `None`: none."""

    trainer: ClassVar[str | type[Any]] = ""
    """The class of the trainer, derived from :class:`~maze.train.trainers.common.trainer.Trainer`. Its path as text
    keeps the configuration cheap to import."""

    distributions: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Distributions that policies of this algorithm have unless the model configures others: entries of a
    `distribution_mapper_config`, which go before those of the model."""

    n_epochs: int = 0
    """Number of epochs to train; 0 trains until early stopping ends the run, and 1,000 epochs at most."""

    # Options of the life cycle of a run. An algorithm makes fields of those that it offers.
    epoch_length = 1
    patience = 0
    device = "cpu"
    critic_burn_in_epochs = 0
    kl_to_initial_coef = 0.0
    kl_to_initial_decay = 1.0
    rollout_evaluator = cast(Any, None)

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.removesuffix("Config").removesuffix("Algorithm").lower()

    def __post_init__(self) -> None:
        self.require_integer("n_epochs", "patience", "critic_burn_in_epochs", minimum=0)
        self.require_integer("epoch_length", minimum=1)
        self.require_number("kl_to_initial_coef", 0.0)
        self.require_number("kl_to_initial_decay", 0.0, 1.0)
        for field in fields(self):
            if field.type in ("bool", "bool | None"):
                self.require_choice(field.name, (True, False, None) if "None" in field.type else (True, False))
        if not isinstance(self.device, str):
            raise ConfigError(f"algorithm.device: expected a name such as `cpu` or `cuda`, found {self.device!r}.")


class ReplayConfig(AlgorithmConfig):
    """Hyperparameters of an algorithm with a replay buffer. Subclasses make fields of these attributes."""

    n_rollout_steps: int
    """Number of environment steps of a rollout."""
    rollouts_per_iteration: int
    """Number of rollouts collected before each update, all environments together."""
    num_batches_per_iter: int
    """Number of batches to learn from in each update."""
    num_actors: int
    """Number of environments that rollouts are collected in, by turns."""
    batch_size: int
    """Number of items in a batch."""
    split_rollouts_into_transitions: bool
    """Whether the items of the replay buffer are single transitions instead of rollouts."""
    replay_buffer_size: int
    """Most items that are kept; the oldest ones make room."""
    initial_buffer_size: int
    """Number of items collected by the initial sampling policy before learning."""
    initial_sampling_policy: Any
    """The policy that collects them, or its configuration."""
    collect_ahead: bool | None
    """Whether rollouts are collected while the networks learn from those before; `None`: if that is done in worker
    processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_integer(
            *("n_rollout_steps", "rollouts_per_iteration", "num_batches_per_iter", "num_actors", "batch_size"),
            *("replay_buffer_size", "initial_buffer_size"),
            minimum=1,
        )
        if self.initial_buffer_size > self.replay_buffer_size:
            raise ConfigError(
                f"algorithm.initial_buffer_size: {self.initial_buffer_size} transitions do not fit into a replay "
                f"buffer of {self.replay_buffer_size} (`algorithm.replay_buffer_size`)."
            )


def algorithm_class(algorithm: Any) -> type[AlgorithmConfig] | None:
    """Return the class of an algorithm's configuration; `None` for a mapping without `_target_`.

    :param algorithm: The `algorithm` part of a configuration, or an object.
    """
    if isinstance(algorithm, AlgorithmConfig):
        return type(algorithm)
    target = algorithm.get(TARGET_KEY) if isinstance(algorithm, Mapping) else None
    return None if target is None else Factory(AlgorithmConfig).type_from_name(target, config_path="algorithm._target_")


@dataclass
class ModelConfig:
    """The model part of a training configuration."""

    policies: dict[Any, Any]
    """How policies are built."""
    critics: dict[Any, Any] | None
    """How critics are built; `None` for algorithms without."""
    distribution_mapper: dict[Any, Any]
    """Which probability distributions belong to which action spaces."""


@dataclass
class TrainConfig:
    """The parts of a training configuration."""

    env: DictConfig
    """How the environment is built."""
    model: ModelConfig
    """How policies and critics are built."""
    algorithm: AlgorithmConfig
    """Hyperparameters of the trainer."""
    runner: Runner
    """The runner."""
