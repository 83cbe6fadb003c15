"""The state of a whole training, and going on from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from maze.core.agent.torch_policy import InitialPolicy, TorchPolicy
from maze.core.errors import CheckpointError, ConfigError
from maze.core.log_stats.log_stats import GlobalLogState, LogStatsAggregator
from maze.core.utils.checkpoint import load_into, load_state
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
from maze.train.utils.update_stats import UpdateStats

if TYPE_CHECKING:
    from maze.train.trainers.common.evaluators.evaluator import Evaluator
    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase
    from maze.train.trainers.common.training_session import EpisodeSource, TrainingSession

STATE_VERSION = 1

_COUNTERS = ("epoch", "update", "n_env_steps")
_COURSE = ("first_epoch", "is_finished", "evaluated_epoch", "training_reward")


class SavedTraining:
    """What a trainer consists of: weights and all else that another process needs to go on with its training."""

    optional_parts: ClassVar[Mapping[str, str]] = {}
    """Parts that a training has where a field of its configuration says so, with the field; without them it was another
    training."""

    config: Any
    """The hyperparameters; subclasses declare their own type."""
    model: Any
    """What is trained; subclasses declare its type."""
    policy: TorchPolicy
    """What is evaluated: the model, or the policy in it."""
    evaluator: Evaluator | None
    model_selection: ModelSelectionBase | None
    epoch: int
    """Number of completed epochs."""
    update: int
    """Number of completed updates of the current epoch."""
    n_env_steps: int
    """Number of environment steps so far, those that filled a replay buffer included."""
    n_updates: int
    """Number of updates so far."""
    train_stats: LogStatsAggregator
    """Statistics of the epoch."""
    stats: UpdateStats
    """Collects the numbers of the updates; their means are fired once per epoch."""
    session: TrainingSession
    """Evaluates, saves, and says when training ends."""
    _initial_policy: InitialPolicy | None
    """What the training started from, where the policy has to stay close to it."""

    # -- what trainers differ in -----------------------------------------------------------------------

    def _parts(self) -> dict[str, Part]:
        """What the training consists of besides the model, by names of their own.

        All of it is saved with the training, and continued in this order. The policy's generators, statistics,
        evaluator, best model, progress and the global generators need no mention.
        """
        return {}

    def _load_parts(self, state: Mapping[str, Any]) -> list[str]:
        """Continues all parts.

        :return: What could not be continued.
        """
        return load_states(self._parts(), state["parts"])

    def _check_fits(self, state: Mapping[str, Any], origin: str | Path) -> None:
        """Raises an error where the parts, as configured, cannot go on with a state of this algorithm."""
        for part, field in self.optional_parts.items():
            if part in self._parts() and part not in state["parts"]:
                raise ConfigError(
                    f"algorithm.{field}: the training in `{origin}` learned without it. Leave it out to go on, or "
                    "start a new training with the weights alone."
                )

    def _episode_source(self) -> EpisodeSource | None:
        """What collects the training's episodes."""
        return None

    def _aggregators(self) -> dict[str, LogStatsAggregator]:
        """Statistics of the current epoch, by names of their own."""
        episodes = self._episode_source()
        return {"updates": self.train_stats, **({} if episodes is None else {"episodes": episodes.epoch_stats})}

    # -- weights ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The weights of the model."""
        state: dict[str, Any] = self.model.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], origin: str | Path = "The state dictionary") -> None:
        """Loads weights; those of a policy alone leave a critic as it is, and a policy leaves out those of a critic.

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

    # -- the whole training ----------------------------------------------------------------------------

    def training_state(self, is_last: bool = True) -> dict[str, Any]:
        """All that the training consists of, so that another process can go on with it; tensors and plain values.

        :param is_last: Whether the training ends here; what is expensive to save may be left out of others.
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
        """Continues from a state that :meth:`training_state` returned, and says what it cannot continue.

        :param state: The state.
        :param origin: Where it comes from, for messages.
        :raises CheckpointError: It is the state of another algorithm or another release, or its weights do not fit.
        """
        if state[STATE_FORMAT] != STATE_VERSION:
            raise CheckpointError(
                f"`{origin}` has version {state[STATE_FORMAT]} of the format of training states; this release reads "
                f"version {STATE_VERSION}. Use the release that wrote it (`versions.json` beside it names it)."
            )
        if not self._has_saved(state):
            raise CheckpointError(
                f"`{origin}` is the state of a training with another algorithm "
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

    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        """Loads a file with weights, or continues from one with the state of a training.

        A policy alone takes the weights of a training with another algorithm.

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

    def resume(self, state: Mapping[str, Any], origin: str | Path) -> None:
        """Goes on with a training of another process; epochs of both are counted.

        :param state: State of that training.
        :param origin: Where it comes from, for messages.
        :raises ConfigError: The training was another one.
        """
        if not self._has_saved(state):
            raise ConfigError(
                f"algorithm: `{origin}` is the state of a training with {state.get('algorithm', 'another algorithm')}, "
                f"but {type(self).__name__} is configured. Choose the algorithm of that training, or leave out "
                "`resume=true` to start a new one with its weights."
            )
        try:
            self.load_training_state(state, origin)
        except CheckpointError as error:
            raise ConfigError(
                f"model: the training in `{origin}` cannot be resumed with the configured model. {error} To start a "
                "new training with weights alone, leave out `resume=true`."
            ) from error
        self.session.first_epoch, self.session.is_finished = 0, False

    def _has_saved(self, state: Mapping[str, Any]) -> bool:
        return bool(state.get("algorithm") == type(self).__name__)
