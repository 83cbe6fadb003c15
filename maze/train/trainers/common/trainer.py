"""What trains a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeVar

from maze.core.errors import ConfigError

if TYPE_CHECKING:
    from maze.core.agent.torch_model import TorchModel
    from maze.train.trainers.common.config_classes import AlgorithmConfig
    from maze.train.trainers.common.training_runner import TrainingRunner


class Trainer(ABC):
    """Trains a model.

    :param algorithm_config: Hyperparameters.
    :param model: The model to train.
    """

    AlgorithmConfigType = TypeVar("AlgorithmConfigType", bound="AlgorithmConfig")

    config_class: ClassVar[type[AlgorithmConfig] | None] = None
    """The class of the configuration, where a configuration does not name it itself."""

    def __init__(self, algorithm_config: Any, model: TorchModel | None = None) -> None:
        self.algorithm_config = algorithm_config
        self.model = model

    @classmethod
    def build(cls, run: TrainingRunner) -> Trainer:
        """Builds the trainer of a run: here an algorithm says what it needs.

        The runner has read the configuration, seeded everything and estimated normalization statistics. It is asked
        for the parts: `run.algorithm` (the configuration), `run.model()` (policy, and critic where there is one),
        `run.rollouts()` or another way to collect experience (`run.actors(...)`, `run.workers(...)`),
        `run.best_model_selection(model)`, `run.evaluator(selection)` and `run.agent_seed()`. What the runner made it
        closes, and it continues the trainer from an earlier run where that is configured. Only what is the algorithm's
        own (a replay buffer, a data set) is built here.

        :param run: The runner of the training.
        :raises ConfigError: The algorithm does not say it.
        """
        raise ConfigError(f"algorithm: {cls.__name__} does not say how it is built. Give it a `build(run)`.")

    @abstractmethod
    def train(self, n_epochs: int | None = None, **kwargs: Any) -> None:
        """Trains the model.

        :param n_epochs: Number of epochs; `None` takes the number of the configuration.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The weights of the model."""

    @abstractmethod
    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        """Loads a file with weights, as written for the best model, or with the state of a training.

        :param file_path: The file, by path or opened for binary reading.
        """

    def resume(self, state: Mapping[str, Any], origin: str | Path) -> None:
        """Goes on with a training of another process; :meth:`train` then counts the epochs of both.

        :param state: State of that training, as it was saved.
        :param origin: Where it comes from, for messages.
        :raises ConfigError: The algorithm cannot go on with that state.
        """
        raise ConfigError(
            f"resume: {type(self).__name__} cannot go on with `{origin}`. Leave out `resume=true` to start from its "
            "weights."
        )
