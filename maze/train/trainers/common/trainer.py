"""What trains a model: the interface, and the loop of epochs and updates that all algorithms share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeVar

from maze.core.agent.torch_actor_critic import policy_of
from maze.core.agent.torch_model import resolve_device
from maze.core.agent.torch_policy import InitialPolicy
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, get_stats_logger
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.observation_statistics import ObservationStatistics
from maze.train.trainers.common.training_session import TrainingSession
from maze.train.trainers.common.training_state import SavedTraining
from maze.train.utils.freed_memory import freed_memory_kept
from maze.train.utils.matrix_products import MatrixProducts
from maze.train.utils.training_record import EpochSummary
from maze.train.utils.update_stats import UpdateStats

if TYPE_CHECKING:
    from maze.core.agent.torch_model import TorchModel
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase
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


class EpochTrainer(SavedTraining, Trainer, ABC):
    """Trains epoch after epoch. An epoch has a number of updates; its end is logged, evaluated and saved.

    An algorithm is a subclass that names the class of its configuration (:attr:`config_class`) and of its events
    (:attr:`events_class`), and says

    * what an update is (:meth:`_update`): collect or draw data, compute
      :class:`~maze.train.trainers.common.learning.Losses`, take a
      :func:`~maze.train.trainers.common.learning.gradient_step`, and report both to :attr:`stats`;
    * what it consists of besides its model (:meth:`_parts`): optimizers, generators, environments, a replay buffer;
    * where its episodes come from (:meth:`_episode_source`), if it collects some.

    What is saved of it is said by :class:`~maze.train.trainers.common.training_state.SavedTraining`; all the rest it
    gets from its :class:`~maze.train.trainers.common.training_session.TrainingSession`: evaluation between epochs, the
    best model, early stopping, the progress display, a checkpoint after each epoch from which a training goes on
    exactly, an orderly end after a signal, and for a number that is not finite an error that says where, with a file to
    reproduce it. Burn-in (:attr:`_critic_learns_alone`) and the distance from the initial policy
    (:attr:`_initial_policy`) follow the configuration, if it has those fields.

    Algorithms that act while they learn begin with
    :class:`~maze.train.trainers.common.actor_critic.actor_critic_trainer.ActorCritic` (rollouts of the current policy)
    or :class:`~maze.train.trainers.common.replay_trainer.ReplayTrainer` (a replay buffer).

    :param algorithm_config: Hyperparameters: a `config_class`, or a mapping of its fields.
    :param model: What is trained and saved; it is moved to `config.device`.
    :param evaluator: Evaluates the policy; `None`: nobody does, and the training's episodes say how good it is.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param checkpoint_file: Where the state of the training is written after each epoch; `None`: nowhere.
    :raises ConfigError: The device is not there.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    """Hyperparameters. How many updates make an epoch, patience, device, burn-in and so on are fields of it."""
    events_class: ClassVar[type[Any]]
    """The events that the losses report to, each logged once per epoch."""
    evaluates_between_epochs: ClassVar[bool] = True
    """Whether there is an evaluation before each epoch and one after the last, apart from what an update does."""
    takes_env_steps: ClassVar[bool] = False
    """Whether it takes environment steps though their number in an update is not fixed (:meth:`_steps_per_update`)."""
    learns_recurrent: ClassVar[bool] = False
    """Whether it learns models that carry hidden states from step to step."""
    learns_observation_statistics: ClassVar[bool] = False
    """Whether it has :attr:`observation_statistics` learn; otherwise models that normalize need them beforehand."""
    follows_curriculum: ClassVar[bool] = False
    """Whether its environments may change from epoch to epoch, see
    :class:`~maze.train.parallelization.curriculum.Curriculum`."""
    update_name: ClassVar[str] = "update"
    """What an update is called in messages."""

    def __init__(
        self,
        algorithm_config: Any,
        model: TorchModel,
        *,
        evaluator: Evaluator | None = None,
        model_selection: ModelSelectionBase | None = None,
        checkpoint_file: str | Path | None = None,
    ) -> None:
        self.config = self.config_class.from_config(algorithm_config)
        super().__init__(self.config, model)
        self.policy = policy_of(model)
        if model.is_recurrent and not self.learns_recurrent:
            raise ConfigError(
                f"model: {type(self).__name__} does not learn networks that carry hidden states from step to step. Use "
                "PPO or A2C, or `model.recurrence=true` with stacked observations."
            )
        model.to(resolve_device(self.config.device, "algorithm.device", type(self.config).device))
        self.observation_statistics = ObservationStatistics(model)
        """What networks know of observations that they normalize; a part of their weights."""
        self.products = MatrixProducts(model.parameters())
        """Context for what is computed of a batch."""
        self.evaluator = evaluator
        self.model_selection = model_selection
        if evaluator is not None and model_selection is not None:
            evaluator.report_to(model_selection)
        self.train_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        """Statistics of the epoch."""
        self.events = self.train_stats.create_event_topic(self.events_class)
        self.stats = UpdateStats(self.events_class)
        """Collects the numbers of the updates; their means are fired once per epoch."""
        self.epoch = self.update = self.n_env_steps = self.n_updates = 0
        self._epoch_length = 0
        self._initial_policy = None
        self.session = TrainingSession(self, checkpoint_file)
        """Evaluates, saves, and says when training ends."""

    # -- what trainers differ in -----------------------------------------------------------------------

    @abstractmethod
    def _update(self) -> None:
        """Collects or draws data and learns from it."""

    def _latest_data(self) -> dict[str, Any]:
        """What the latest update learned from, where its state does not hold it; tensors and plain values."""
        return {}

    def _n_updates_per_epoch(self) -> int:
        return self._epoch_length or int(self.config.epoch_length)

    def _steps_per_update(self) -> int:
        """Number of environment steps per update; 0: it takes none, or their number is not fixed."""
        return 0

    def _work_of_an_epoch(self) -> str:
        """What an epoch is made of; it is printed before the first one, which may take long."""
        steps = f"collecting {self.steps_per_epoch:,} environment steps, " if self.steps_per_epoch else ""
        return f"{steps}{self._n_updates_per_epoch():,} updates"

    def _begin_training(self, n_epochs: int) -> None:
        """Comes first in each call of :meth:`train`.

        :param n_epochs: Number of epochs; 0: not fixed.
        """

    def _end_training(self) -> None:
        """Comes after the last epoch of a training that ends by itself."""

    def _write_epoch_stats(self) -> None:
        """Logs the statistics of the epoch that has just been completed."""
        self.stats.publish(self.events)
        self.train_stats.reduce()
        episodes = self._episode_source()
        if episodes is not None:
            episodes.write_epoch_stats()

    # -- for all that learn policies -------------------------------------------------------------------

    @property
    def _critic_learns_alone(self) -> bool:
        """Whether this is one of the epochs at the start in which the policy stays as it is."""
        return self.epoch < int(self.config.critic_burn_in_epochs)

    @property
    def _kl_to_initial_coef(self) -> float:
        """Weight of the divergence from the initial policy: decays with each epoch in which the policy has learned."""
        config = self.config
        n_learning_epochs = max(0, self.epoch - config.critic_burn_in_epochs)
        return float(config.kl_to_initial_coef * config.kl_to_initial_decay**n_learning_epochs)

    # -- the loop --------------------------------------------------------------------------------------

    @override(Trainer)
    def train(self, n_epochs: int | None = None, **kwargs: Any) -> None:
        """Trains until the number of epochs is reached, or early stopping or a signal ends the training.

        After a training that has come to its end, another call trains on; after an interrupted one (in this process or
        one whose state was loaded), it does what was left.

        :param n_epochs: Number of epochs; 0: :data:`EPOCH_LIMIT` at most. `None` takes the configuration's.
        """
        n_epochs = int(self.config.n_epochs) if n_epochs is None else n_epochs
        self._begin_training(n_epochs)
        if not self.learns_observation_statistics:
            self.observation_statistics.require_learned(type(self).__name__)
        if self.config.kl_to_initial_coef and self._initial_policy is None:
            self._initial_policy = InitialPolicy(self.policy)
        with self.session.opened(n_epochs) as session, freed_memory_kept():
            while session.goes_on():
                while self.update < self._n_updates_per_epoch():
                    with session.one_update():
                        self._update()
                self.epoch, self.update = self.epoch + 1, 0
                session.before_statistics()
                self._write_epoch_stats()
                session.epoch_done()
            self._end_training()

    def evaluate(self, deterministic: bool | None = None, repeats: int = 1) -> None:
        """Evaluates the current policy.

        :param deterministic: Take the most probable actions; `None` leaves it to the evaluator.
        :param repeats: How often.
        :raises ConfigError: There is no evaluator.
        """
        self.session.evaluate(deterministic, repeats)

    @property
    def steps_per_epoch(self) -> int:
        """Number of environment steps of an epoch; 0: it takes none, or their number is not fixed."""
        return self._n_updates_per_epoch() * self._steps_per_update()

    def epochs_for(self, n_steps: int) -> int:
        """Return the number of epochs that take a number of environment steps, rounded up to whole updates.

        Epochs become shorter where whole ones of the configured length would take more steps.

        :param n_steps: Number of environment steps of the next call of :meth:`train`; the number of an update is fixed.
        """
        n_updates = math.ceil(n_steps / self._steps_per_update())
        n_epochs = math.ceil(n_updates / self._n_updates_per_epoch())
        self._epoch_length = math.ceil(n_updates / n_epochs)
        return n_epochs

    @property
    def history(self) -> list[EpochSummary]:
        """The epochs that this object has completed."""
        return self.session.history
