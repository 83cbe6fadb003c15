"""The state of a whole training, and going on from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from maze.core.errors import CheckpointError, ConfigError
from maze.core.log_stats.log_stats import GlobalLogState
from maze.core.utils.checkpoint import load_into, load_state
from maze.train.trainers.common.learning import InitialPolicy
from maze.train.utils.plain_state import (
    STATE_FORMAT,
    from_plain,
    global_generators_state,
    set_global_generators_state,
    states_of,
    statistics_from_plain,
    statistics_to_plain,
    to_plain,
)

if TYPE_CHECKING:
    from maze.train.trainers.common.trainer import EpochTrainer

STATE_VERSION = 1

_COUNTERS = ("epoch", "update", "n_env_steps")
_COURSE = ("first_epoch", "is_finished", "evaluated_epoch", "training_reward")


def state_of(trainer: EpochTrainer) -> dict[str, Any]:
    """All that a training consists of; see :meth:`~maze.train.trainers.common.trainer.EpochTrainer.training_state`."""
    initial, session = trainer._initial_policy, trainer.session
    return {
        STATE_FORMAT: STATE_VERSION,
        "algorithm": type(trainer).__name__,
        "model": trainer.model.state_dict(),
        "initial_policy": None if initial is None else initial.policy.state_dict(),
        "policy_generators": trainer.policy.rng_state(),
        **{name: getattr(trainer, name) for name in _COUNTERS},
        **{name: getattr(session, name) for name in _COURSE},
        "log_step": GlobalLogState.global_step,
        "seeds": dict(session.run_seeds),
        "model_selection": None if trainer.model_selection is None else trainer.model_selection.state_dict(),
        "evaluator": None if trainer.evaluator is None else to_plain(trainer.evaluator.state_dict()),
        "update_statistics": trainer.stats.state_dict(),
        "statistics": {name: statistics_to_plain(each) for name, each in trainer._aggregators().items()},
        "global_generators": global_generators_state(),
        "parts": states_of(trainer._parts()),
    }


def continue_from(trainer: EpochTrainer, state: Mapping[str, Any], origin: str | Path) -> None:
    """Has a trainer continue from a state that :func:`state_of` returned, and says what it cannot continue.

    :param trainer: The trainer, as configured.
    :param state: The state.
    :param origin: Where it comes from, for messages.
    :raises CheckpointError: It is the state of another algorithm or another release, or its weights do not fit.
    """
    if state[STATE_FORMAT] != STATE_VERSION:
        raise CheckpointError(
            f"`{origin}` has version {state[STATE_FORMAT]} of the format of training states; this release reads "
            f"version {STATE_VERSION}. Use the release that wrote it (`versions.json` beside it names it)."
        )
    if not _is_of(trainer, state):
        raise CheckpointError(
            f"`{origin}` is the state of a training with another algorithm "
            f"({state.get('algorithm', 'not named')}); expected one of {type(trainer).__name__}."
        )
    trainer._check_fits(state, origin)
    session = trainer.session
    load_into(trainer.model, state["model"], origin)
    trainer._initial_policy = None
    if state["initial_policy"] is not None:
        trainer._initial_policy = InitialPolicy(trainer.policy)
        load_into(trainer._initial_policy.policy, state["initial_policy"], origin)
    trainer.policy.set_rng_state(state["policy_generators"])
    for owner, names in ((trainer, _COUNTERS), (session, _COURSE)):
        for name in names:
            setattr(owner, name, state[name])
    session.run_seeds = dict(state["seeds"])
    trainer.stats.load_state_dict(state["update_statistics"])
    problems = trainer._load_parts(state)
    session.restored = {"model_selection": state["model_selection"], "evaluator": from_plain(state["evaluator"])}
    session.restored = {name: restored for name, restored in session.restored.items() if restored is not None}
    problems += session.hand_out_restored()
    for name, aggregator in trainer._aggregators().items():
        statistics_from_plain(aggregator, state["statistics"].get(name, ()))
    GlobalLogState.global_step = state["log_step"]
    set_global_generators_state(state["global_generators"])
    session.report(problems, origin)


def take_over_file(trainer: EpochTrainer, file_path: str | Path | BinaryIO) -> None:
    """Loads a file with weights, or continues from one with the state of a training.

    :param trainer: The trainer. A policy alone takes the weights of a training with another algorithm.
    :param file_path: The file, by path or opened for binary reading.
    """
    state = load_state(file_path)
    origin = Path(file_path) if isinstance(file_path, str | Path) else "The checkpoint"
    if STATE_FORMAT not in state:
        trainer.load_state_dict(state, origin)
    elif trainer.policy is trainer.model and not _is_of(trainer, state):
        trainer.load_state_dict(state["model"], origin)
    else:
        trainer.load_training_state(state, origin)


def resume_from(trainer: EpochTrainer, state: Mapping[str, Any], origin: str | Path) -> None:
    """Goes on with a training of another process; epochs of both are counted.

    :param trainer: The trainer.
    :param state: State of that training.
    :param origin: Where it comes from, for messages.
    :raises ConfigError: The training was another one.
    """
    if not _is_of(trainer, state):
        raise ConfigError(
            f"algorithm: `{origin}` is the state of a training with {state.get('algorithm', 'another algorithm')}, "
            f"but {type(trainer).__name__} is configured. Choose the algorithm of that training, or leave out "
            "`resume=true` to start a new one with its weights."
        )
    try:
        trainer.load_training_state(state, origin)
    except CheckpointError as error:
        raise ConfigError(
            f"model: the training in `{origin}` cannot be resumed with the configured model. {error} To start a "
            "new training with weights alone, leave out `resume=true`."
        ) from error
    trainer.session.first_epoch, trainer.session.is_finished = 0, False


def _is_of(trainer: EpochTrainer, state: Mapping[str, Any]) -> bool:
    return bool(state.get("algorithm") == type(trainer).__name__)
