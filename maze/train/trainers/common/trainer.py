"""Trainers: the interface, and the loop of epochs and updates that all algorithms share."""

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
from maze.core.errors import CheckpointError, ConfigError
from maze.core.log_stats.log_stats import GlobalLogState, LogStatsAggregator, LogStatsLevel, get_stats_logger
from maze.core.utils.checkpoint import load_into, load_state
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.learning import UpdateStats
from maze.train.trainers.common.observation_statistics import ObservationStatistics
from maze.train.trainers.common.training_session import TrainingSession
from maze.train.utils.freed_memory import freed_memory_kept
from maze.train.utils.plain_state import (
    STATE_FORMAT,
    Part,
    from_plain,
    global_generators_state,
    load_states,
    set_global_generators_state,
    states_of,
    statistics_from_plain,
    statistics_to_plain,
    to_plain,
)
from maze.train.utils.training_record import EpochSummary

if TYPE_CHECKING:
    from maze.core.agent.torch_model import TorchModel
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase
    from maze.train.trainers.common.training_runner import TrainingRunner
    from maze.train.trainers.common.training_session import EpisodeSource


STATE_VERSION = 1

_COUNTERS = ("epoch", "update", "n_env_steps")
_COURSE = ("first_epoch", "is_finished", "evaluated_epoch", "training_reward")


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
        """Build the trainer of a run from the parts that an algorithm needs.

        The runner has read the configuration, seeded everything and estimated normalization statistics. It
        provides the parts: `run.algorithm` (the configuration), `run.model()` (policy, and critic where there is one),
        `run.rollouts()` or another way to collect experience (`run.actors(...)`, `run.workers(...)`),
        `run.best_model_selection(model)`, `run.evaluator(selection)` and `run.agent_seed()`. What the runner made it
        closes, and it continues the trainer from an earlier run where that is configured. Only what is the algorithm's
        own (a replay buffer, a data set) is built here.

        :param run: The runner.
        :raises ConfigError: The algorithm has no `build`.
        """
        raise ConfigError(f"algorithm: {cls.__name__} cannot be built. Implement its class method `build(run)`.")

    @abstractmethod
    def train(self, n_epochs: int | None = None, **kwargs: Any) -> None:
        """Train the model.

        :param n_epochs: Number of epochs; `None` takes the number of the configuration.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the model."""

    @abstractmethod
    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        """Load a file with weights, as written for the best model, or with the state of a run.

        :param file_path: The file, by path or opened for binary reading.
        """

    def resume(self, state: Mapping[str, Any], origin: str | Path) -> None:
        """Resume a run of another process; :meth:`train` then counts the epochs of both.

        :param state: Its saved state.
        :param origin: Where it comes from, for messages.
        :raises ConfigError: The algorithm cannot resume that state.
        """
        raise ConfigError(
            f"resume: {type(self).__name__} cannot resume `{origin}`. Leave out `resume=true` to start from its "
            "weights."
        )


class EpochTrainer(Trainer, ABC):
    """Trains epoch after epoch. An epoch has a number of updates; its end is logged, evaluated and saved.

    An algorithm is a subclass that names the class of its configuration (:attr:`config_class`) and of its events
    (:attr:`events_class`), and says

    * what an update is (:meth:`_update`): collect or draw data, compute
      :class:`~maze.train.trainers.common.learning.Losses`, take a
      :func:`~maze.train.trainers.common.learning.gradient_step`, and report both to :attr:`stats`;
    * what it consists of besides its model (:meth:`_parts`): optimizers, generators, environments, a replay buffer;
    * where its episodes come from (:meth:`episode_source`), if it collects some.

    Its state holds its weights and everything that another process needs to resume it. All the rest it gets from its
    :class:`~maze.train.trainers.common.training_session.TrainingSession`: evaluation between epochs, the
    best model, early stopping, the progress display, a checkpoint after each epoch from which a run resumes
    exactly, an orderly end after a signal, and for a number that is not finite an error with its place and a file to
    reproduce it. Burn-in (:attr:`_critic_learns_alone`) and the distance from the initial policy
    (:attr:`_initial_policy`) follow the configuration, if it has those fields.

    Algorithms that act while they learn begin with
    :class:`~maze.train.trainers.common.actor_critic.actor_critic_trainer.ActorCritic` (rollouts of the current policy)
    or :class:`~maze.train.trainers.common.replay_trainer.ReplayTrainer` (a replay buffer).

    :param algorithm_config: Hyperparameters: a `config_class`, or a mapping of its fields.
    :param model: The model that is trained and saved; it is moved to `config.device`.
    :param evaluator: Evaluates the policy; `None`: the model is judged by the training episodes.
    :param model_selection: Keeps the best model; early stopping needs it.
    :param checkpoint_file: File of the state, written after each epoch; `None`: none.
    :raises ConfigError: The device is not there.
    """

    config_class: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    """Hyperparameters. How many updates make an epoch, patience, device, burn-in and so on are fields of it."""
    events_class: ClassVar[type[Any]]
    """The events that the losses report to, each logged once per epoch."""
    evaluates_between_epochs: ClassVar[bool] = True
    """Whether there is an evaluation before each epoch and one after the last, apart from what an update does."""
    takes_env_steps: ClassVar[bool] = False
    """Whether it takes environment steps though their number in an update is not fixed (:meth:`steps_per_update`)."""
    learns_recurrent: ClassVar[bool] = False
    """Whether it learns models that carry hidden states from step to step."""
    learns_observation_statistics: ClassVar[bool] = False
    """Whether it has :attr:`observation_statistics` learn; otherwise models that normalize need them beforehand."""
    follows_curriculum: ClassVar[bool] = False
    """Whether its environments may change from epoch to epoch, see
    :class:`~maze.train.parallelization.curriculum.Curriculum`."""
    optional_parts: ClassVar[Mapping[str, str]] = {}
    """Parts that exist if a field of the configuration is set, by part; a state without them cannot be resumed."""
    update_name: ClassVar[str] = "update"
    """Name of an update in messages."""

    config: Any
    """The hyperparameters; subclasses declare their own type."""
    model: Any
    """The model that is trained; subclasses declare its type."""

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
        """Statistics of observations that networks normalize; a part of their weights."""
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
        self.epoch = self.update = 0
        """Number of completed epochs, and of completed updates of the current one."""
        self.n_updates = self.n_env_steps = 0
        """Number of all updates and of all environment steps, those that filled a replay buffer included."""
        self._epoch_length = 0
        """Number of updates of an epoch; 0: as configured."""
        self._initial_policy: InitialPolicy | None = None
        self.session = TrainingSession(self, checkpoint_file)
        """Evaluates, saves, and ends the run."""

    # -- what trainers differ in -----------------------------------------------------------------------

    @abstractmethod
    def _update(self) -> None:
        """Collect or draw data and learn from it."""

    def latest_data(self) -> dict[str, Any]:
        """Data of the latest update that the state does not contain; tensors and plain values."""
        return {}

    def n_updates_per_epoch(self) -> int:
        return self._epoch_length or int(self.config.epoch_length)

    def steps_per_update(self) -> int:
        """Return the number of environment steps per update; 0: it takes none, or their number is not fixed."""
        return 0

    def work_of_an_epoch(self) -> str:
        """Description of an epoch, printed before the first one."""
        steps = f"collecting {self.steps_per_epoch:,} environment steps, " if self.steps_per_epoch else ""
        return f"{steps}{self.n_updates_per_epoch():,} updates"

    def _begin_training(self, n_epochs: int) -> None:
        """Comes first in each call of :meth:`train`.

        :param n_epochs: Number of epochs; 0: not fixed.
        """

    def _end_training(self) -> None:
        """Hook after the last epoch of a run that ends by itself."""

    def _write_epoch_stats(self) -> None:
        """Log the statistics of the epoch that has just been completed."""
        self.stats.publish(self.events)
        self.train_stats.reduce()
        episodes = self.episode_source()
        if episodes is not None:
            episodes.write_epoch_stats()

    def _parts(self) -> dict[str, Part]:
        """Stateful parts besides the model, by name.

        All of them are saved with the run, and restored in this order. The policy's generators, statistics,
        evaluator, best model, progress and the global generators need no mention.
        """
        return {}

    def _load_parts(self, state: Mapping[str, Any]) -> list[str]:
        """Continue all parts.

        :return: Sentences about parts that could not be restored.
        """
        return load_states(self._parts(), state["parts"])

    def _check_fits(self, state: Mapping[str, Any], origin: str | Path) -> None:
        """Raise an error where the parts, as configured, cannot go on with a state of this algorithm."""
        for part, field in self.optional_parts.items():
            if part in self._parts() and part not in state["parts"]:
                raise ConfigError(
                    f"algorithm.{field}: the run in `{origin}` learned without it. Leave it out to resume, or "
                    "start a new run with the weights alone."
                )

    def episode_source(self) -> EpisodeSource | None:
        """Source of the training episodes."""
        return None

    def _aggregators(self) -> dict[str, LogStatsAggregator]:
        """Statistics of the current epoch, by names of their own."""
        episodes = self.episode_source()
        return {"updates": self.train_stats, **({} if episodes is None else {"episodes": episodes.epoch_stats})}

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
        """Train until the number of epochs is reached, or early stopping or a signal ends the run.

        After a run that ended by itself, another call adds epochs; an interrupted run (in this process or from a loaded
        state) is completed.

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
                while self.update < self.n_updates_per_epoch():
                    with session.one_update():
                        self._update()
                self.epoch, self.update = self.epoch + 1, 0
                session.before_statistics()
                self._write_epoch_stats()
                session.epoch_done()
            self._end_training()

    def evaluate(self, deterministic: bool | None = None, repeats: int = 1) -> None:
        """Evaluate the current policy.

        :param deterministic: Take the most probable actions; `None` leaves it to the evaluator.
        :param repeats: How often.
        :raises ConfigError: There is no evaluator.
        """
        self.session.evaluate(deterministic, repeats)

    @property
    def steps_per_epoch(self) -> int:
        """Number of environment steps of an epoch; 0: it takes none, or their number is not fixed."""
        return self.n_updates_per_epoch() * self.steps_per_update()

    def epochs_for(self, n_steps: int) -> int:
        """Return the number of epochs that take a number of environment steps, rounded up to whole updates.

        Epochs become shorter where whole ones of the configured length would take more steps.

        :param n_steps: Number of environment steps of the next call of :meth:`train`; the number of an update is fixed.
        """
        n_updates = math.ceil(n_steps / self.steps_per_update())
        n_epochs = math.ceil(n_updates / self.n_updates_per_epoch())
        self._epoch_length = math.ceil(n_updates / n_epochs)
        return n_epochs

    @property
    def history(self) -> list[EpochSummary]:
        """The epochs that this object has completed."""
        return self.session.history

    # -- weights ---------------------------------------------------------------------------------------

    @override(Trainer)
    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the model."""
        state: dict[str, Any] = self.model.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], origin: str | Path = "The state dictionary") -> None:
        """Load weights; those of a policy alone leave a critic as it is, and a policy leaves out those of a critic.

        :param state_dict: Weights as :meth:`state_dict` gives them.
        :param origin: Where they come from, for error messages.
        """
        if self.policy is self.model:
            own = self.model.state_dict()
            load_into(self.model, {key: value for key, value in state_dict.items() if key in own}, origin)
        else:
            is_policy_alone = set(state_dict) == set(self.policy.state_dict())
            load_into(self.policy if is_policy_alone else self.model, state_dict, origin)
        self.session.evaluated_epoch = None
        self._initial_policy = None

    # -- state -----------------------------------------------------------------------------------------

    def training_state(self, is_last: bool = True) -> dict[str, Any]:
        """Return the complete state, from which another process can resume; tensors and plain
        values.

        :param is_last: Whether the run ends here; otherwise large parts may be left out.
        """
        initial = self._initial_policy
        return {
            STATE_FORMAT: STATE_VERSION,
            "algorithm": type(self).__name__,
            "model": self.model.state_dict(),
            "initial_policy": None if initial is None else initial.policy.state_dict(),
            "policy_generators": self.policy.rng_state(),
            **{name: getattr(self, name) for name in _COUNTERS},
            "n_updates": self.n_updates,
            **{name: getattr(self.session, name) for name in _COURSE},
            "log_step": GlobalLogState.global_step,
            "seeds": dict(self.session.run_seeds),
            "model_selection": None if self.model_selection is None else self.model_selection.state_dict(),
            "evaluator": None if self.evaluator is None else to_plain(self.evaluator.state_dict()),
            "update_statistics": self.stats.state_dict(),
            "statistics": {name: statistics_to_plain(each) for name, each in self._aggregators().items()},
            "global_generators": global_generators_state(),
            "parts": states_of(self._parts()),
        }

    def load_training_state(self, state: Mapping[str, Any], origin: str | Path = "The training state") -> None:
        """Restore a state of :meth:`training_state`, and report parts that cannot be restored.

        :param state: The state.
        :param origin: Where it comes from, for messages.
        :raises CheckpointError: It is the state of another algorithm or another release, or its weights do not fit.
        """
        if state[STATE_FORMAT] != STATE_VERSION:
            raise CheckpointError(
                f"`{origin}` has version {state[STATE_FORMAT]} of the format of states; this release reads "
                f"version {STATE_VERSION}. Use the release that wrote it (`versions.json` beside it names it)."
            )
        if not self._has_saved(state):
            raise CheckpointError(
                f"`{origin}` is the state of a run with another algorithm "
                f"({state.get('algorithm', 'not named')}); expected one of {type(self).__name__}."
            )
        self._check_fits(state, origin)
        load_into(self.model, state["model"], origin)
        self._initial_policy = None
        if state["initial_policy"] is not None:
            self._initial_policy = InitialPolicy(self.policy)
            load_into(self._initial_policy.policy, state["initial_policy"], origin)
        self.policy.set_rng_state(state["policy_generators"])
        for owner, names in ((self, _COUNTERS), (self.session, _COURSE)):
            for name in names:
                setattr(owner, name, state[name])
        # states of earlier versions lack it
        self.n_updates = state.get("n_updates", self.epoch * int(self.config.epoch_length) + self.update)
        self.session.run_seeds = dict(state["seeds"])
        self.stats.load_state_dict(state["update_statistics"])
        problems = self._load_parts(state)
        restored = {"model_selection": state["model_selection"], "evaluator": from_plain(state["evaluator"])}
        self.session.restored = {name: of_part for name, of_part in restored.items() if of_part is not None}
        problems += self.session.hand_out_restored()
        for name, aggregator in self._aggregators().items():
            statistics_from_plain(aggregator, state["statistics"].get(name, ()))
        GlobalLogState.global_step = state["log_step"]
        set_global_generators_state(state["global_generators"])
        self.session.report(problems, origin)

    @override(Trainer)
    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        """Load a file with weights, or continue from one with the state of a training.

        A policy alone takes the weights of a run with another algorithm.

        :param file_path: The file, by path or opened for binary reading.
        """
        state = load_state(file_path)
        origin = Path(file_path) if isinstance(file_path, str | Path) else "The checkpoint"
        if STATE_FORMAT not in state:
            self.load_state_dict(state, origin)
        elif self.policy is self.model and not self._has_saved(state):
            self.load_state_dict(state["model"], origin)
        else:
            self.load_training_state(state, origin)

    @override(Trainer)
    def resume(self, state: Mapping[str, Any], origin: str | Path) -> None:
        """Resume a run of another process; epochs of both are counted.

        :param state: Its state.
        :param origin: Where it comes from, for messages.
        :raises ConfigError: The run had another algorithm or model.
        """
        if not self._has_saved(state):
            raise ConfigError(
                f"algorithm: `{origin}` is the state of a run with {state.get('algorithm', 'another algorithm')}, "
                f"but {type(self).__name__} is configured. Choose the algorithm of that run, or leave out "
                "`resume=true` to start a new one with its weights."
            )
        try:
            self.load_training_state(state, origin)
        except CheckpointError as error:
            raise ConfigError(
                f"model: the run in `{origin}` cannot be resumed with the configured model. {error} To start a "
                "new run with weights alone, leave out `resume=true`."
            ) from error
        self.session.first_epoch, self.session.is_finished = 0, False

    def _has_saved(self, state: Mapping[str, Any]) -> bool:
        return bool(state.get("algorithm") == type(self).__name__)
