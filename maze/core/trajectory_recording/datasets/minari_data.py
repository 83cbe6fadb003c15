"""Reading and writing of Minari data sets. Needs the extra `minari`.

A Minari data set is a local directory; nothing is downloaded. Its steps have one observation and one action each, so
that environments with sub-steps are not supported.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.env.base_env import TRUNCATION_KEY, is_truncated
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, ConfigError, optional_package
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.trajectory_recording.datasets.trajectory_processor import IdentityWithNextObservationTrajectoryProcessor
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import (
    SpacesTrajectoryRecord,
    StateTrajectoryRecord,
    TrajectoryRecord,
)

PREFIX = "minari:"
"""Prefix of ids of Minari data sets where paths are accepted as well."""
_NEED = "Minari data sets need the extra"
_DATA, _METADATA = "data", "metadata.json"


def minari_path(dataset_id: str) -> Path:
    """Return the directory of a data set.

    :param dataset_id: Its id, such as `stockroom/rule-v0`.
    :raises CheckpointError: It is not on this machine.
    """
    optional_package("minari", "minari", _NEED)
    from minari.storage.datasets_root_dir import get_dataset_path

    path = Path(get_dataset_path(dataset_id))
    if not is_minari(path):
        raise CheckpointError(
            f"{PREFIX}{dataset_id}: there is no data set at {path}. Write it or download it "
            f"(`minari download {dataset_id}`); MINARI_DATASETS_PATH is the root of data sets."
        )
    return path


def is_minari(path: str | Path) -> bool:
    """Return whether a directory holds a Minari data set."""
    return (Path(path) / _DATA / _METADATA).is_file()


def read_minari(path: str | Path, env: MazeEnv[Any] | None = None) -> Iterator[TrajectoryRecord[Any]]:
    """Yield the episodes of a data set, as trajectories.

    If it was recorded in the gymnasium environment inside `env`, trajectories consist of states and actions of the
    simulation, which are converted with the wrappers; otherwise of observations and actions.

    :param path: Directory of the data set.
    :param env: The environment; `None`: observations and actions, with the entries `observation` and `action` if these
        are not dictionaries.
    :raises ConfigError: It was recorded in an environment with other spaces.
    :raises CheckpointError: It cannot be read.
    """
    minari = optional_package("minari", "minari", _NEED)
    try:
        dataset = minari.MinariDataset(Path(path) / _DATA)
        recorded = (dataset.observation_space, dataset.action_space)
    except Exception as error:  # damaged files raise various types
        raise CheckpointError(f"{path} is not a readable Minari data set ({type(error).__name__}: {error}).") from error
    of_states = env is not None and _fit(recorded, _gym_spaces(env))
    step_key: Any = 0
    if env is not None and not of_states:
        step_key = _only_substep(env, "be learned from")
        shown = (env.observation_spaces_dict[step_key], env.action_spaces_dict[step_key])
        if not _fit(recorded, shown):
            expected = _gym_spaces(env) or shown
            raise ConfigError(
                f"{path}: recorded in another environment: expected observations {expected[0]} and actions "
                f"{expected[1]}, found {recorded[0]} and {recorded[1]}."
            )
    for episode in dataset.iterate_episodes():
        yield _trajectory(episode, step_key, of_states)


def write_minari(
    dataset_id: str, trajectories: Iterable[TrajectoryRecord[Any]], env: MazeEnv[Any], **details: Any
) -> Path:
    """Write trajectories as a Minari data set.

    Trajectories of states of a gymnasium environment (`trajectory_data` of rollouts) are written with its own
    observations and actions; others with those of `env`, including wrappers, which are dictionaries.

    :param dataset_id: Id of the new data set, such as `stockroom/rule-v0`.
    :param trajectories: The episodes, of one kind.
    :param env: The environment of the recording, without sub-steps.
    :param details: Further arguments of `minari.create_dataset_from_buffers`, such as `author`, `description`,
        `algorithm_name` and `data_format` (`arrow` or `hdf5`).
    :return: Its directory.
    :raises ConfigError: There are no trajectories, or a step has several sub-steps.
    """
    minari = optional_package("minari", "minari", _NEED)
    step_key = _only_substep(env, "be written")
    episodes = list(trajectories)
    gym_spaces = _gym_spaces(env)
    is_raw = gym_spaces is not None and all(isinstance(episode, StateTrajectoryRecord) for episode in episodes)
    if not is_raw:
        gym_spaces = (env.observation_spaces_dict[step_key], env.action_spaces_dict[step_key])
    buffers: list[Any] = []
    for episode in episodes:
        records, observations, actions = _raw(episode) if is_raw else _converted(episode, env)
        if not records:
            continue
        truncated = [is_truncated(bool(record.done), record.info or {}) for record in records]
        terminated = [bool(one.done) and not is_cut_off for one, is_cut_off in zip(records, truncated, strict=True)]
        truncated[-1] = not terminated[-1]  # an unfinished episode was truncated
        buffers.append(
            minari.data_collector.EpisodeBuffer(
                id=len(buffers),
                observations=_stacked(observations),
                actions=_stacked(actions),
                rewards=[float(record.reward) for record in records],
                terminations=terminated,
                truncations=truncated,
            )
        )
    if not buffers:
        raise ConfigError(f"{PREFIX}{dataset_id}: there are no steps to write.")
    assert gym_spaces is not None
    given = {"observation_space": gym_spaces[0], "action_space": gym_spaces[1], "data_format": "arrow", **details}
    given.setdefault("env", getattr(env.core_env.env, "spec", None) if is_raw else None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="minari")  # the author is optional
        minari.create_dataset_from_buffers(dataset_id=dataset_id, buffer=buffers, **given)
    return minari_path(dataset_id)


def _trajectory(episode: Any, step_key: Any, of_states: bool) -> TrajectoryRecord[Any]:
    """Return a Minari episode as a trajectory of states and actions of the simulation, or of observations."""
    n_steps = len(episode.rewards)
    observations = [_at(episode.observations, t) for t in range(n_steps + 1)]
    name = str(episode.id)
    trajectory: TrajectoryRecord[Any] = StateTrajectoryRecord(name) if of_states else SpacesTrajectoryRecord(name)
    for t, (observation, following) in enumerate(pairwise(observations)):
        action, reward = _at(episode.actions, t), float(episode.rewards[t])
        is_terminated = bool(episode.terminations[t])
        is_cut_off = bool(episode.truncations[t]) and not is_terminated
        done, info = is_terminated or is_cut_off, {TRUNCATION_KEY: True} if is_cut_off else {}
        if of_states:
            trajectory.append(StateRecord(observation, action, StepEventLog(t), reward, done, info, {}))
            continue
        seen, after = _entries(observation, "observation"), _entries(following, "observation")
        record = SpacesRecord(ActorID(step_key, 0), seen, _entries(action, "action"), reward, done, info, after)
        trajectory.append(StructuredSpacesRecord([record]))
    if of_states:
        trajectory.append(StateRecord(observations[-1], None, StepEventLog(n_steps), None, None, None, {}))
    return trajectory


def _at(values: Any, t: int) -> Any:
    if isinstance(values, Mapping):
        return {key: _at(value, t) for key, value in values.items()}
    return tuple(_at(value, t) for value in values) if isinstance(values, tuple) else values[t]


def _entries(value: Any, name: str) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {name: value}


# Records of the steps, observations with the last one, and actions.
_Columns = tuple[list[Any], list[Any], list[Any]]


def _raw(episode: TrajectoryRecord[Any]) -> _Columns:
    """Return an episode in gymnasium's terms."""
    records = [record for record in episode.step_records if record.maze_action is not None]
    states = [record.maze_state for record in [*records, *episode.step_records[-1:]]]
    return records, states, [record.maze_action for record in records]


def _converted(episode: TrajectoryRecord[Any], env: MazeEnv[Any]) -> _Columns:
    steps = IdentityWithNextObservationTrajectoryProcessor().convert_trajectory_with_env(episode, env)
    records = [step.substep_records[0] for step in steps]
    last = [record.next_observation for record in records[-1:]]
    return records, [*(record.observation for record in records), *last], [record.action for record in records]


def _stacked(values: Sequence[Any]) -> Any:
    """Return trees of values as a tree of arrays, time first."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _stacked([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(_stacked([value[index] for value in values]) for index in range(len(first)))
    return np.stack([np.asarray(value) for value in values])


def _gym_spaces(env: MazeEnv[Any]) -> tuple[Any, Any] | None:
    """Return the spaces of the inner gymnasium environment; `None`: there is none."""
    gym_env = getattr(env.core_env, "env", None)
    found = tuple(getattr(gym_env, name, None) for name in ("observation_space", "action_space"))
    return found if all(isinstance(space, spaces.Space) for space in found) else None  # type: ignore[return-value]


def _only_substep(env: MazeEnv[Any], what: str) -> Any:
    keys = list(env.action_spaces_dict)
    if len(keys) != 1:
        raise ConfigError(
            f"Minari data sets have one action in each step; sub-steps {keys} of {type(env).__name__} cannot {what}. "
            f"Record trajectories (`runner.record_trajectory=true`) or tables (`runner.record_parquet=true`) instead."
        )
    return keys[0]


def _fit(recorded: tuple[Any, Any], expected: tuple[Any, Any] | None) -> bool:
    """Return whether spaces have the same kinds, shapes and names; bounds may differ."""
    return expected is not None and all(_alike(*pair) for pair in zip(recorded, expected, strict=True))


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, spaces.Dict):
        names_fit = set(one.spaces) == set(other.spaces)
        return names_fit and all(_alike(one[key], other[key]) for key in one.spaces)
    if isinstance(one, spaces.Tuple):
        return len(one) == len(other) and all(_alike(*pair) for pair in zip(one, other, strict=True))
    return bool(one.shape == other.shape if isinstance(one, spaces.Box) else one == other)
