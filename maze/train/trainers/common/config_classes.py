"""Configurations of training runs: dataclasses that carry values and check them."""

from __future__ import annotations

import re
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


@dataclass(frozen=True)
class Risk:
    """The objective `mean_weight * mean + (1 - mean_weight) * CVaR` of returns.

    CVaR (conditional value at risk, expected shortfall) is the mean of the worst share `level` of the returns
    (Rockafellar and Uryasev 2000).
    """

    level: float
    mean_weight: float = 0.0

    @classmethod
    def parse(cls, text: Any) -> Risk:
        """Read `cvar:<level>` or `<weight>*mean+<weight>*cvar:<level>`.

        >>> Risk.parse("0.25*mean + 0.75*cvar:0.1")
        Risk(level=0.1, mean_weight=0.25)

        :raises ConfigError: The text is something else, or the weights do not add up to 1.
        """
        number = r"(\d*\.?\d+)"
        match = re.fullmatch(rf"(?:{number}\*mean\+{number}\*)?cvar:{number}", re.sub(r"\s", "", str(text)))
        weight, of_tail, level = (float(part or 0.0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
        is_mixture = match is not None and match[1] is not None
        if not 0.0 < level <= 1.0 or (is_mixture and abs(weight + of_tail - 1.0) > 1e-6):
            raise ConfigError(
                f"algorithm.risk: expected `cvar:<level>` or `<weight>*mean+<weight>*cvar:<level>`, with weights that "
                f"add up to 1 and a level above 0 and up to 1, such as `cvar:0.1` or `0.5*mean+0.5*cvar:0.1`; found "
                f"{text!r}."
            )
        return cls(level, weight)

    def weights(self, n_quantiles: int) -> list[float]:
        """Return the weight of each of `n` quantiles in ascending order; they add up to 1.

        >>> Risk(level=0.5).weights(4)
        [0.5, 0.5, 0.0, 0.0]
        """
        covered = (min(max(self.level * n_quantiles - index, 0.0), 1.0) for index in range(n_quantiles))
        of_tail = (1.0 - self.mean_weight) / (self.level * n_quantiles)
        return [self.mean_weight / n_quantiles + of_tail * share for share in covered]


@dataclass
class AlgorithmConfig(CheckedConfig, ABC):
    """Hyperparameters and properties of an algorithm.

    An algorithm is this class and a trainer; both may be in any package, and nothing has to be registered:
    `algorithm._target_` names the configuration's class, which names the rest. The author writes

    * the hyperparameters as fields with defaults and docstrings, checked in `__post_init__`;
    * `trainer` and, unless there is none, `critic`, and `distributions` where a policy's logits mean something else;
    * a trainer, which defines how it is built (:meth:`~maze.train.trainers.common.trainer.Trainer.build`).

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
    risk = cast("str | None", None)
    n_quantiles = 50

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.removesuffix("Config").removesuffix("Algorithm").lower()

    def __post_init__(self) -> None:
        self.require_integer("n_epochs", "patience", "critic_burn_in_epochs", minimum=0)
        self.require_integer("epoch_length", "n_quantiles", minimum=1)
        if self.risk is not None:
            Risk.parse(self.risk)
            evaluator = self.rollout_evaluator  # means would select models that do not avoid risk
            if isinstance(evaluator, Mapping) and not {"keep", "objective"} & {*evaluator}:
                self.rollout_evaluator = {**evaluator, "keep": "latest"}
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
