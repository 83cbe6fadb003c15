"""Sequences of step records and of actions: episodes, or fixed-length pieces of rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import CheckpointError, ConfigError, EnvironmentContractError
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.utils.files import file_stem, json_with_checksum, open_json, write_whole
from maze.core.utils.safe_pickle import safe_load

if TYPE_CHECKING:
    from maze.core.env.maze_env import MazeEnv
    from maze.core.rendering.renderer import Renderer


StepRecordType = TypeVar("StepRecordType")

# Name of an action that is not a dictionary.
_SINGLE_ACTION = ""
_MAX_ITEM_SIZE = 1 << 16


@dataclass
class ActionRecord:
    """Actions of an episode in order, and the seed of its environment.

    Stored as JSON, which contains no code.

    :param episode_id: The episode.
    :param seed: Seed of the environment; `None`: the episode was not the first one after seeding.
    """

    episode_id: str
    seed: int | None
    actions: list[tuple[ActorID, Any]] = field(default_factory=list)
    """Actor and action of each (sub-)step."""

    def append(self, actor_id: ActorID, action: Any) -> None:
        """Add the next action.

        :param actor_id: The actor.
        :param action: Its action, numbers or arrays by action head.
        """
        self.actions.append((actor_id, action))

    def __copy__(self) -> ActionRecord:
        return replace(self, actions=list(self.actions))

    def __len__(self) -> int:
        return len(self.actions)

    def save(self, directory: Path) -> Path:
        """Write `<episode id>.json` atomically.

        :param directory: Directory of the file, which is created if necessary.
        """
        content = {
            "episode_id": self.episode_id,
            "seed": self.seed,
            "actions": [[actor.step_key, actor.agent_id, _plain_action(action)] for actor, action in self.actions],
        }
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{file_stem(self.episode_id)}.json"
        write_whole(path, json_with_checksum(json.dumps(content, default=int).encode()))  # numbers of NumPy
        return path

    @classmethod
    def load(cls, path: Path | str) -> ActionRecord:
        """Read a file of :meth:`save`.

        :param path: The file.
        :raises CheckpointError: The file cannot be read, or is not a record of actions.
        """
        try:
            content = json.loads(open_json(Path(path).read_bytes(), str(path)).decode())
            record = cls(content["episode_id"], content["seed"])
            for step_key, agent_id, action in content["actions"]:
                record.append(ActorID(step_key, agent_id), _restored_action(action))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
            raise CheckpointError(
                f"{path} is not a valid record of actions ({type(error).__name__}: {error}). Rollouts with "
                f"runner.record_actions=true write them."
            ) from error
        return record


def plain_seed(seed: Any) -> int | None:
    """Return a seed as an integer; `None`: it is not an integer."""
    return int(seed) if isinstance(seed, (int, np.integer)) else None


def _plain_action(action: Any) -> dict[str, list[Any]]:
    named = action if isinstance(action, Mapping) else {_SINGLE_ACTION: action}
    plain = {}
    for name, value in named.items():
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise EnvironmentContractError(
                f"Action `{name}` cannot be recorded: expected numbers or arrays, found {type(value).__name__}."
            )
        plain[str(name)] = [array.dtype.str, array.tolist()]
    return plain


def _restored_action(plain: Mapping[str, list[Any]]) -> Any:
    action = {}
    for name, (text, value) in plain.items():
        dtype: np.dtype[Any] = np.dtype(str(text))
        if dtype.hasobject or dtype.itemsize > _MAX_ITEM_SIZE:
            raise ValueError(f"values of type {text}")
        action[name] = np.asarray(value, dtype)[()]
    return action[_SINGLE_ACTION] if list(action) == [_SINGLE_ACTION] else action


class TrajectoryRecord(Generic[StepRecordType]):
    """Step records in order.

    :param id: Identity of the trajectory, such as the episode id.
    """

    def __init__(self, id: Any) -> None:
        self.id = id
        self.step_records: list[StepRecordType] = []

    def append(self, step_record: StepRecordType) -> None:
        """Add the next step."""
        self.step_records.append(step_record)

    def extend(self, trajectory_record: TrajectoryRecord[StepRecordType]) -> None:
        """Add all steps of another trajectory that continues this one.

        :param trajectory_record: The other trajectory, with which this one then shares the step records.
        """
        self.step_records.extend(trajectory_record.step_records)

    def __len__(self) -> int:
        return len(self.step_records)


class StateTrajectoryRecord(TrajectoryRecord[StateRecord]):
    """Episode of maze states and maze actions, independent of action and observation spaces.

    :param id: The episode id.
    :param renderer: Renderer that can show the recorded states.
    """

    action_record: ActionRecord | None = None
    """Seed and actions of the agent, for replay; missing in recordings of earlier releases."""

    def __init__(self, id: Any, renderer: Renderer | None = None) -> None:
        super().__init__(id)
        self.renderer = renderer

    def by_substep(self) -> StateTrajectoryRecord:
        """Return the episode with a record for each sub-step instead of each step, for viewers.

        :raises ConfigError: The episode has no steps.
        """
        if not self.step_records:
            raise ConfigError(f"Episode {self.id} has no steps to show.")
        episode = StateTrajectoryRecord(self.id, self.renderer)
        episode.step_records = [substep for record in self.step_records for substep in record.by_substep()]
        return episode


class SpacesTrajectoryRecord(TrajectoryRecord[StructuredSpacesRecord]):
    """Trajectory of observations and actions."""

    def stack(self) -> StructuredSpacesRecord:
        """Return all steps as one structured record, whose arrays have time as their first dimension."""
        return StructuredSpacesRecord.stack_records(self.step_records)

    @classmethod
    def stack_trajectories(cls, trajectories: Sequence[SpacesTrajectoryRecord]) -> SpacesTrajectoryRecord:
        """Stack trajectories of the same length step by step; the ids become a list.

        :param trajectories: At least one trajectory.
        :raises ValueError: They are not of the same length.
        """
        lengths = [len(trajectory) for trajectory in trajectories]
        if not lengths or len(set(lengths)) > 1:
            raise ValueError(f"Trajectories to stack must have the same length, these have {lengths}.")
        stacked = cls(id=[trajectory.id for trajectory in trajectories])
        for steps in zip(*(trajectory.step_records for trajectory in trajectories), strict=True):
            stacked.append(StructuredSpacesRecord.stack_records(steps))
        return stacked

    @property
    def actions_dicts(self) -> list[dict[StepKeyType, Any]]:
        """Actions by sub-step key, for each step."""
        return [record.actions_dict for record in self.step_records]

    @property
    def actions(self) -> list[list[Any]]:
        """Actions of the sub-steps, for each step."""
        return [record.actions for record in self.step_records]

    def is_done(self) -> bool:
        """Return whether the trajectory ends with the end of an episode; for unbatched records only."""
        return bool(self.step_records) and self.step_records[-1].is_done()

    def total_reward(self) -> Any:
        """Return sum of all rewards; for batched records one sum per environment."""
        return sum(reward for record in self.step_records for reward in record.rewards if reward is not None)


# Largest number of inspected wrappers.
_MOST_LAYERS = 100

# Data classes by name, and packages whose data classes are allowed.
# fmt: off
_DATA_CLASSES = frozenset({
    "maze.core.env.structured_env.ActorID",
    "maze.core.events.event_collection.EventCollection",
    "maze.core.events.event_record.EventRecord",
    "maze.core.log_events.step_event_log.StepEventLog",
    "maze.core.log_stats.log_stats.LogStatsKey",
    "maze.core.rendering.renderer.RecordedFramesRenderer",
    "maze.core.rendering.renderer.Renderer",
    "maze.core.trajectory_recording.records.spaces_record.SpacesRecord",
    "maze.core.trajectory_recording.records.state_record.StateRecord",
    "maze.core.trajectory_recording.records.structured_spaces_record.StructuredSpacesRecord",
    "maze.core.trajectory_recording.records.trajectory_record.ActionRecord",
    "maze.core.trajectory_recording.records.trajectory_record.SpacesTrajectoryRecord",
    "maze.core.trajectory_recording.records.trajectory_record.StateTrajectoryRecord",
    "maze.core.trajectory_recording.records.trajectory_record.TrajectoryRecord",
    "maze_envs.*",
})
_EVENTS = frozenset({
    "maze.core.env.base_env_events.BaseEnvEvents",
    "maze.core.log_events.monitoring_events.ActionEvents",
    "maze.core.log_events.monitoring_events.DiscreteActionEvents",
    "maze.core.log_events.monitoring_events.ObservationEvents",
    "maze.core.log_events.monitoring_events.RewardEvents",
    "maze.core.wrappers.monitoring_wrapper.StepTimingEvents",
    "maze.core.wrappers.observation_visualization_wrapper.ObservationVisualizationEvents",
})
# fmt: on


def packages_of(env: MazeEnv[Any]) -> frozenset[str]:
    """Return the user's packages of an environment: of its wrappers, simulation and conversions.

    Maze, torch, gymnasium, the standard library and a few others are excluded.

    :param env: The environment with its wrappers.
    :return: Names of the top-level packages.
    """
    from maze.core.utils.import_guard import NEVER_WHOLE

    parts: list[Any] = []
    layer: Any = env
    while layer is not None and len(parts) < _MOST_LAYERS:
        parts.append(layer)
        layer = getattr(layer, "env", None)
    for name in ("observation_conversion_dict", "action_conversion_dict"):
        parts += getattr(env, name, {}).values()
    return frozenset(type(part).__module__.partition(".")[0] for part in parts) - NEVER_WHOLE


def load_trajectory(
    path: str | Path, allow_pickle: bool = False, extra_types: Iterable[type | str] = (), **options: Any
) -> TrajectoryRecord[object]:
    """Read a trajectory of :class:`TrajectoryWriterFile`.

    :param path: The file.
    :param allow_pickle: Trust the file: load any type, which can execute any code.
    :param extra_types: Further types that may be loaded: the classes of your environment's states, actions and
        renderer, their full names, or a pattern such as `my_project.envs.*`.
    :param options: Further arguments of :func:`load_trajectories`; `env=env` allows data classes of the environment's
        package.
    :raises CheckpointError: The file is damaged, holds types that are not allowed, or no trajectory.
    """
    trajectories = load_trajectories(path, allow_pickle, extra_types, **options)
    if len(trajectories) != 1:
        raise CheckpointError(
            f"{path}: expected one trajectory record, found {len(trajectories)}. Read them with `load_trajectories`."
        )
    return trajectories[0]


def load_trajectories(
    path: str | Path,
    allow_pickle: bool = False,
    extra_types: Iterable[type | str] = (),
    own_packages: Iterable[str] = (),
    hint: str = "`load_trajectory(path, extra_types=[...])` or `register_safe_types(...)`",
    env: MazeEnv[Any] | None = None,
) -> list[TrajectoryRecord[object]]:
    """Read the trajectories of a file with one trajectory or a list of them.

    :param path: The file.
    :param allow_pickle: Trust the file: load any type, which can execute any code.
    :param extra_types: Further types that may be loaded, as for :func:`load_trajectory`.
    :param own_packages: User packages whose imported data classes may be loaded.
    :param hint: Instruction for allowing further types, for messages.
    :param env: The recorded environment, whose packages are allowed (:func:`packages_of`).
    :raises CheckpointError: The file is damaged, holds types that are not allowed, or something else.
    """
    named = {*own_packages, *(() if env is None else packages_of(env))}
    content = safe_load(path, extra_types, allow_pickle, hint, _DATA_CLASSES | _EVENTS, named)
    trajectories = list(content) if isinstance(content, list | tuple) else [content]
    for trajectory in trajectories:
        if not isinstance(trajectory, TrajectoryRecord):
            raise CheckpointError(
                f"{path}: expected a trajectory record or a list of them, found an object of type "
                f"{type(trajectory).__name__}. Trajectories are recorded with `runner.record_trajectory=true` into "
                "`trajectory_data/`."
            )
    return trajectories
