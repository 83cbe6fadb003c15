"""Errors of environments, with environment, sub-step, step and seed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import numpy as np

from maze.core.env.structured_env import ActorID
from maze.core.errors import EnvironmentContractError, EnvironmentFailedError, MazeError, NonFiniteError, text_of

logger = logging.getLogger(__name__)

USER_CODE_ERRORS = (Exception, SystemExit, GeneratorExit)
"""Exceptions of environment code that do not end the process. A `KeyboardInterrupt` does."""


LONG_EPISODE = 10_000
"""Steps after which a warning about an unfinished episode is logged."""
ENDLESS_EPISODE = 1_000_000
"""Steps after which an unfinished episode is an error."""


class Seeding(NamedTuple):
    """Seed of an environment.

    :param seed: The seed.
    :param n_ticks_since: Number of ticks since the environment was seeded.
    """

    seed: int
    n_ticks_since: int

    def __str__(self) -> str:
        return f"{self.n_ticks_since} ticks after it was seeded with {self.seed}"


class Place(NamedTuple):
    """Position of an environment, for messages.

    :param name: Name of the environment.
    :param actor: Current or last actor.
    :param n_steps: Number of steps completed in the episode.
    :param seeding: Its seed.
    """

    name: str
    actor: ActorID | None = None
    n_steps: int | None = None
    seeding: Seeding | None = None

    @classmethod
    def of(cls, env: Any, name: str, seeding: Seeding | None = None) -> Place:
        """Return the place of a single environment; only its name if its methods fail.

        :param env: The environment.
        :param name: Its name in messages.
        :param seeding: Seed of its episode, if known.
        """
        actor = n_steps = None
        with suppress(*USER_CODE_ERRORS):
            actor = ActorID(*env.actor_id())
        with suppress(*USER_CODE_ERRORS):
            n_steps = int(env.get_env_time())
        return cls(name, actor, n_steps, seeding)

    @property
    def when(self) -> str:
        """Step and seed, if known."""
        steps = [] if self.n_steps is None else [f"after {self.n_steps} steps of its episode"]
        return ", ".join(steps + ([] if self.seeding is None else [str(self.seeding)]))

    def __str__(self) -> str:
        parts = [self.name]
        if self.actor is not None:
            agent = f" (agent {self.actor.agent_id})" if self.actor.agent_id else ""
            parts.append(f"sub-step {self.actor.step_key!r}{agent}")
        return ", ".join([*parts, self.when] if self.when else parts)


def failure(error: BaseException, place: Place, call: str) -> MazeError:
    """Return the error to be raised from an exception of an environment.

    :param error: The exception.
    :param place: Environment, sub-step, step and seed.
    :param call: Name of the method.
    """
    if isinstance(error, EnvironmentFailedError):
        return error
    if not isinstance(error, MazeError):
        failed = EnvironmentFailedError(f"{place}: `{call}` raised {text_of(error)}.")
        failed.place = str(place)
        return failed
    text = str(error)
    if not isinstance(error, EnvironmentContractError) or error.args != (text,):
        return error  # its message is complete
    if "sub-step" not in text:
        return type(error)(f"{place}: {text}")
    name = "" if text.startswith(place.name) else f"{place.name}: "
    return type(error)(f"{name}{text}" + (f" ({place.when})" if place.when else ""))


def fail(error: BaseException, place: Place, call: str) -> NoReturn:
    """Raise the :func:`failure` for an exception of an environment, with that exception as its cause.

    :param error: The exception.
    :param place: Environment, sub-step, step and seed.
    :param call: Name of the method.
    :raises MazeError: Always.
    """
    named = failure(error, place, call)
    if named is error:
        raise error
    raise named from error


def made_by(factory: Callable[[], Any], name: str) -> Any:
    """Return the environment that a factory makes.

    :param factory: The factory.
    :param name: Name of the environment, for messages.
    :raises MazeError: The factory raised an exception; see :func:`failure`.
    """
    try:
        return factory()
    except USER_CODE_ERRORS as error:
        fail(error, Place(name), "the factory")


@contextmanager
def in_simulation(what: str) -> Iterator[None]:
    """Return a context whose errors name a simulation, as opposed to the episode itself.

    :param what: The simulation, for messages.
    """
    try:
        yield
    except MazeError as error:
        error.remark(f"This happened in {what}.")
        raise
    except USER_CODE_ERRORS as error:
        raise EnvironmentFailedError(f"{what}: {text_of(error)}.") from error


def failure_of_acting(
    error: MazeError, observation: Mapping[str, Any], place_of_row: Callable[[int], Place]
) -> MazeError:
    """Return the error to be raised if a policy cannot compute actions for a batch of observations.

    :param error: The exception.
    :param observation: Arrays `[n_rows, ...]`.
    :param place_of_row: Returns the environment and position of a row.
    """
    if isinstance(error, NonFiniteError) and (found := non_finite_entry(observation)) is not None:
        key, (row, *index), value = found
        what = "NaN or None" if np.isnan(value) else str(value)
        return NonFiniteError(
            f"{place_of_row(row)}: observation `{key}` (index {index}) is {what}. Correct the observation in the "
            "environment or its wrappers."
        )
    return error if error.row is None else type(error)(f"{place_of_row(error.row)}: {error}")


def non_finite_entry(observation: Mapping[str, Any]) -> tuple[str, list[int], Any] | None:
    """Return key, index and value of the first number that is NaN or infinite; `None`: there is none.

    :param observation: Arrays of any shape by key. `None` in an array of objects counts as NaN.
    """
    for key, value in observation.items():
        array = np.asarray(value)
        if array.dtype.kind == "O":  # holds None
            with suppress(TypeError, ValueError):
                array = array.astype(float)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            index = np.argwhere(~np.isfinite(array))[0].tolist()
            return key, index, array[tuple(index)]
    return None


def check_episode_ends(n_steps: int, name: str) -> None:
    """Warn of a very long episode, and raise an error for an endless one.

    To be called after every `LONG_EPISODE` steps.

    :param n_steps: Number of steps of the episode so far.
    :param name: Name of the environment.
    :raises EnvironmentContractError: After `ENDLESS_EPISODE` steps.
    """
    text = (
        f"{name}: the episode has not ended after {n_steps} steps. Environments whose episodes do not terminate need a "
        "limit: '+wrappers={maze.core.wrappers.time_limit_wrapper.TimeLimitWrapper:"
        "{max_episode_steps:1000}}', in rollouts runner.max_episode_steps, evolution strategies algorithm.max_steps."
    )
    if n_steps >= ENDLESS_EPISODE:
        raise EnvironmentContractError(text)
    if LONG_EPISODE <= n_steps < 2 * LONG_EPISODE:
        logger.warning(text)


def closed(close: Callable[[], object], name: str) -> None:
    """Close an environment; exceptions other than `KeyboardInterrupt` are logged as warnings.

    :param close: Its method `close`.
    :param name: Its name in the warning.
    """
    try:
        close()
    except USER_CODE_ERRORS as error:
        logger.warning("%s: `close` raised %s.", name, text_of(error))
