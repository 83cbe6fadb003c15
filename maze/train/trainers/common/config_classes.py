"""Configurations of trainings: plain dataclasses that carry values and check them."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from maze.core.errors import ConfigError, did_you_mean
from maze.core.utils.config_utils import whole_number

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.runner import Runner

ConfigType = TypeVar("ConfigType", bound="AlgorithmConfig")


@dataclass
class AlgorithmConfig(ABC):
    """Hyperparameters of a trainer."""

    n_epochs: int = 0
    """Number of epochs to train; 0 trains until early stopping or an interrupt ends the training."""

    # What the life cycle of a training asks every configuration. An algorithm makes fields of those that it offers.
    epoch_length = 1
    patience = 0
    device = "cpu"
    critic_burn_in_epochs = 0
    kl_to_initial_coef = 0.0
    kl_to_initial_decay = 1.0

    def __post_init__(self) -> None:
        self.require_integer("n_epochs", minimum=0)

    @classmethod
    def from_config(cls: type[ConfigType], config: ConfigType | Mapping[str, Any]) -> ConfigType:
        """The configuration itself, or one built from a mapping such as the ``algorithm`` part of a composed config.

        :param config: Field names and values; fields that are left out keep their defaults.
        """
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"algorithm: expected a {cls.__name__} or a mapping of its fields, got {type(config).__name__}."
            )
        values = {str(key): value for key, value in config.items() if key != "_target_"}
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                hint = did_you_mean(key, known, "algorithm.{}") or f" Known fields: {', '.join(known)}."
                raise ConfigError(f"algorithm.{key}: {cls.__name__} has no such field.{hint}")
        return cls(**values)

    def require_integer(self, name: str, minimum: int) -> None:
        """Raises a ``ConfigError`` unless the field is an integer of at least ``minimum``."""
        whole_number(f"algorithm.{name}", getattr(self, name), minimum)

    def require_number(
        self, name: str, minimum: float, maximum: float = math.inf, *, above: bool = False, below: bool = False
    ) -> None:
        """Raises a ``ConfigError`` unless the field is a finite number in the given range.

        :param name: Name of the field.
        :param minimum: Smallest number allowed.
        :param maximum: Largest number allowed.
        :param above: Whether the number has to be larger than ``minimum``.
        :param below: Whether the number has to be smaller than ``maximum``.
        """
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if is_number:
            is_number = (value > minimum if above else value >= minimum) and (
                value < maximum if below else value <= maximum
            )
        if not is_number:
            lower = f"{'above' if above else 'of at least'} {minimum:g}"
            upper = "" if maximum == math.inf else f" and {'below' if below else 'at most'} {maximum:g}"
            raise ConfigError(f"algorithm.{name}: expected a number {lower}{upper}, got {value!r}.")

    def require_choice(self, name: str, choices: Collection[Any]) -> None:
        """Raises a ``ConfigError`` unless the field is one of ``choices``."""
        value = getattr(self, name)
        if value not in choices:
            raise ConfigError(f"algorithm.{name}: expected one of {', '.join(map(str, choices))}, got {value!r}.")


@dataclass
class ModelConfig:
    """The model part of a training configuration."""

    policies: dict[Any, Any]
    """How policies are built."""
    critics: dict[Any, Any] | None
    """How critics are built; ``None`` for algorithms without."""
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
    """What runs the training."""
