"""The errors that a user, a file or another process can cause.

`assert` guards what our own code guarantees; everything else is one of these and states where it happened, what was
expected, what was found and what to do, and keeps its cause (`raise ... from`).
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Iterable
from difflib import get_close_matches
from typing import Any


class MazeError(Exception):
    """Common base: the command line prints it as one message, without a traceback."""

    exit_status: int = 1
    """Exit status of a command that ends with this error."""
    row: int | None = None
    """Index of the faulty row of a batch; `None`: no single row."""

    def remark(self, text: str) -> None:
        """Append a line to the message."""
        self.args = (f"{self}\n{text}",)


class ConfigError(MazeError):
    """A configuration value is missing, unknown, of the wrong type or out of range."""


class ConfigValueError(ConfigError, ValueError):
    """A hyperparameter or an argument of a wrapper is out of its range; also a :class:`ValueError`."""


class ConfigImportError(ConfigError, ImportError):
    """A class, module or optional package that is named cannot be imported; also an :class:`ImportError`."""


class ConfigAssertionError(ConfigError, AssertionError):
    """A network's parts do not fit together; also an :class:`AssertionError`."""


class EnvironmentContractError(MazeError):
    """An environment breaks its contract (spaces, actors, rewards); the message names environment, sub-step and key."""


class EnvironmentFailedError(MazeError):
    """Code of an environment raised an exception, the cause of this one; names environment, sub-step, step and seed."""

    place: str = ""
    """Environment, sub-step, step and seed."""


class NonFiniteError(MazeError):
    """A reward, observation, logit, loss or gradient is NaN or infinite; raised before any parameter changes."""


class WorkerError(MazeError):
    """A worker process failed: names its index, pid, exit code or signal, the call it was in, and its traceback."""


class CheckpointError(MazeError):
    """A checkpoint or another artefact is missing, damaged, foreign or does not fit the model."""


class GateNotPassedError(MazeError):
    """A candidate is worse than its baseline by more than is tolerated, or is not shown to be within it."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its type, where that is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def text_of(error: BaseException) -> str:
    """Return type and message of an error."""
    try:
        message = str(error)
    except Exception as second:  # a user's __str__
        message = f"<its message cannot be shown: {type(second).__name__}>"
    return f"{type(error).__name__}: {message}".rstrip(".: ")


def unknown_key_error(what: str, key: Hashable, known: Iterable[Hashable]) -> ConfigError:
    """Build an error that names the unknown key, the known ones and the closest of them.

    :param what: Beginning of the message: the kind and the place of the key.
    :param key: The unknown key.
    :param known: The known keys.
    """
    known = list(known)
    names = ", ".join(repr(name) for name in known) or "none"
    return ConfigError(f"{what} {key!r} is unknown.{did_you_mean(key, known)} Known: {names}.")


def install_command(extra: str) -> str:
    """Return the command that adds an extra to an installed Maze.

    The public index has another project of this name, with versions below 1: `>=1` keeps pip from installing it.

    :param extra: Name of the extra, such as `serve`.
    """
    return f'pip install "maze-rl[{extra}]>=1"'


def optional_package(name: str, extra: str, need: str) -> Any:
    """Return an optional module.

    :param name: Its import path.
    :param extra: The extra that installs it.
    :param need: Beginning of the error message: the feature that needs the module.
    :raises ConfigImportError: It cannot be imported; the message has the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigImportError(f"{need} ({error}): {install_command(extra)}.") from error


def did_you_mean(wrong: object, known: Iterable[object], form: str = "{}") -> str:
    """Return a sentence (after a blank) with the known name that was probably meant; empty where none is similar.

    :param wrong: The unknown name.
    :param known: The known names.
    :param form: Format of the name in the sentence, for instance `algorithm.{}`.
    """
    close = closest(wrong, known)
    return "" if close is None else f" Did you mean `{form.format(close)}`?"


_LONGEST_NAME = 200

SYNONYMS = {
    "buffer_size": "replay_buffer_size",
    "clip_coef": "clip_range",
    "clip_param": "clip_range",
    "discount": "gamma",
    "ent_coef": "entropy_coef",
    "entropy_coeff": "entropy_coef",
    "grad_clip": "max_grad_norm",
    "lambda_": "gae_lambda",
    "learning_rate": "lr",
    "learning_starts": "initial_buffer_size",
    "minibatch_size": "batch_size",
    "n_envs": "concurrency",
    "n_iterations": "n_epochs",
    "n_steps": "n_rollout_steps",
    "norm_adv": "advantage_normalization",
    "num_envs": "concurrency",
    "num_epochs": "n_optimization_epochs",
    "num_steps": "n_rollout_steps",
    "train_batch_size": "batch_size",
    "update_epochs": "n_optimization_epochs",
    "vf_coef": "value_loss_coef",
    "vf_loss_coeff": "value_loss_coef",
}
"""Names of hyperparameters in stable-baselines3, RLlib and CleanRL, and in Maze."""


def closest(wrong: object, known: Iterable[object]) -> str | None:
    """Return the known name that was probably meant; `None`: none is similar.

    The first of these that exists: the name that :data:`SYNONYMS` states, the most similar name, and the alphabetically
    first name that contains it.

    :param wrong: The unknown name; capital letters do not matter, texts of more than 200 characters have no match.
    :param known: The known names.
    """
    text = str(wrong).lower()
    if len(text) > _LONGEST_NAME:  # a comparison of long texts takes seconds, and strangers send them
        return None
    names = {str(name).lower(): str(name) for name in known}
    if SYNONYMS.get(text) in names:
        return names[SYNONYMS[text]]
    similar = get_close_matches(text, names, n=1) or sorted(name for name in names if text and text in name)
    return names[similar[0]] if similar else None
