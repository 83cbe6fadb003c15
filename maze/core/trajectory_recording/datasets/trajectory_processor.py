"""What happens to a recorded trajectory before a policy learns from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from maze.core.annotations import override
from maze.core.env.base_env import TRUNCATION_KEY
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import (
    SpacesTrajectoryRecord,
    StateTrajectoryRecord,
    TrajectoryRecord,
)


class TrajectoryProcessor(ABC):
    """Filters or changes trajectories, and converts them to observations and actions."""

    @abstractmethod
    def pre_process(self, trajectory: TrajectoryRecord[Any]) -> TrajectoryRecord[Any] | list[TrajectoryRecord[Any]]:
        """Changes a trajectory before it is converted.

        :param trajectory: The trajectory as it was recorded; it must not be modified.
        :return: What to learn from instead: a trajectory, or several, or none (an empty list).
        """

    @staticmethod
    def convert_trajectory_with_env(
        trajectory: TrajectoryRecord[Any], conversion_env: MazeEnv[Any] | None
    ) -> list[StructuredSpacesRecord]:
        """The steps of a trajectory in terms of the spaces, without the last state, in which no action was taken.

        :param trajectory: States and actions of the simulation, or observations and actions already.
        :param conversion_env: Environment with the conversions and wrappers to apply; only needed for the former.
        """
        if isinstance(trajectory, SpacesTrajectoryRecord):
            return list(trajectory.step_records)
        env = _checked_env(trajectory, conversion_env)
        return [
            StructuredSpacesRecord.converted_from(record, env, first_step_in_episode=index == 0)
            for index, record in enumerate(_steps_with_action(trajectory))
        ]

    def process(
        self, trajectory: TrajectoryRecord[Any], conversion_env: MazeEnv[Any] | None
    ) -> list[list[StructuredSpacesRecord]]:
        """Pre-processes and converts a trajectory.

        :return: The steps of each trajectory that became of it; those without a step are left out.
        """
        processed = self.pre_process(trajectory)
        trajectories = processed if isinstance(processed, list) else [processed]
        converted = [self.convert_trajectory_with_env(one, conversion_env) for one in trajectories]
        return [steps for steps in converted if steps]


class IdentityTrajectoryProcessor(TrajectoryProcessor):
    """Takes trajectories as they are."""

    @override(TrajectoryProcessor)
    def pre_process(self, trajectory: TrajectoryRecord[Any]) -> TrajectoryRecord[Any]:
        return trajectory


@dataclass
class DeadEndClippingTrajectoryProcessor(TrajectoryProcessor):
    """Drops the last steps of episodes that ended by themselves, as they may have led into a dead end.

    Episodes that were cut off, by a time limit for example, did not end in one and are kept as they are.
    """

    clip_k: int
    """How many steps to drop."""

    def __post_init__(self) -> None:
        if self.clip_k < 0:
            raise ConfigError(f"DeadEndClippingTrajectoryProcessor: `clip_k` must not be negative, got {self.clip_k}.")

    @override(TrajectoryProcessor)
    def pre_process(self, trajectory: TrajectoryRecord[Any]) -> TrajectoryRecord[Any]:
        if isinstance(trajectory, SpacesTrajectoryRecord):
            records: list[Any] = trajectory.step_records
            last = records[-1].substep_records[-1] if records else None
        else:
            records = _steps_with_action(trajectory)
            last = records[-1] if records else None
        if last is None or not last.done or _is_truncated(last.info):
            return trajectory
        n_kept = max(0, len(records) - self.clip_k)
        return _with_steps(trajectory, trajectory.step_records[:n_kept])


class IdentityWithNextObservationTrajectoryProcessor(TrajectoryProcessor):
    """Takes trajectories as they are, and adds to each sub-step the observation that followed it.

    After the last step of an episode this is the observation of its last state. Where that was not recorded, a step
    that terminated the episode gets its own observation, which nobody may value; any other last step is dropped.
    A trajectory may consist of several episodes; where a step was dropped between two of them, it becomes two.
    """

    @override(TrajectoryProcessor)
    def pre_process(self, trajectory: TrajectoryRecord[Any]) -> TrajectoryRecord[Any]:
        return trajectory

    @staticmethod
    @override(TrajectoryProcessor)
    def convert_trajectory_with_env(
        trajectory: TrajectoryRecord[Any], conversion_env: MazeEnv[Any] | None
    ) -> list[StructuredSpacesRecord]:
        """The steps with what followed them; `None` did where an episode before the last one was cut off."""
        steps = [
            replace(step, substep_records=[replace(substep) for substep in step.substep_records])
            for step in TrajectoryProcessor.convert_trajectory_with_env(trajectory, conversion_env)
        ]
        substeps = [substep for step in steps for substep in step.substep_records]
        if not substeps:
            return []
        for substep, following in pairwise(substeps):
            # what comes after the end of an episode belongs to the next one
            if substep.next_observation is None and not substep.done:
                substep.next_observation = following.observation
        last = substeps[-1]
        if last.next_observation is None:
            last.next_observation = _last_observation(trajectory, conversion_env)
        for substep in substeps:
            if substep.next_observation is None and substep.done and not _is_truncated(substep.info):
                substep.next_observation = substep.observation
        return steps if last.next_observation is not None else steps[:-1]

    @override(TrajectoryProcessor)
    def process(
        self, trajectory: TrajectoryRecord[Any], conversion_env: MazeEnv[Any] | None
    ) -> list[list[StructuredSpacesRecord]]:
        converted = super().process(trajectory, conversion_env)
        return [piece for steps in converted for piece in _split_at_unknown(steps)]


def _split_at_unknown(steps: list[StructuredSpacesRecord]) -> list[list[StructuredSpacesRecord]]:
    """Successive steps, without those that it is not known of what followed them."""
    pieces: list[list[StructuredSpacesRecord]] = [[]]
    for step in steps:
        if step.substep_records and step.substep_records[-1].next_observation is None:
            pieces.append([])
        else:
            pieces[-1].append(step)
    return [piece for piece in pieces if piece]


def _last_observation(trajectory: TrajectoryRecord[Any], env: MazeEnv[Any] | None) -> Any:
    """The observation of the state that a recorded episode ended in; None if that state is not there."""
    if not isinstance(trajectory, StateTrajectoryRecord) or env is None or not trajectory.step_records:
        return None
    last = trajectory.step_records[-1]
    if last.maze_action is not None or last.maze_state is None:
        return None
    records = StructuredSpacesRecord.converted_from(last, env, first_step_in_episode=False).substep_records
    return records[0].observation if records else None


def _steps_with_action(trajectory: TrajectoryRecord[Any]) -> list[StateRecord]:
    return [record for record in trajectory.step_records if record.maze_action is not None]


def _is_truncated(info: Any) -> bool:
    return isinstance(info, dict) and bool(info.get(TRUNCATION_KEY, False))


def _with_steps(trajectory: TrajectoryRecord[Any], steps: list[Any]) -> TrajectoryRecord[Any]:
    if isinstance(trajectory, StateTrajectoryRecord):
        clipped: TrajectoryRecord[Any] = StateTrajectoryRecord(trajectory.id, renderer=trajectory.renderer)
    else:
        clipped = type(trajectory)(trajectory.id)
    clipped.step_records = steps
    return clipped


def _checked_env(trajectory: TrajectoryRecord[Any], conversion_env: MazeEnv[Any] | None) -> MazeEnv[Any]:
    if not isinstance(trajectory, StateTrajectoryRecord):
        raise ConfigError(
            f"Trajectory {trajectory.id}: expected a state or spaces trajectory record, got a "
            f"{type(trajectory).__name__}."
        )
    if conversion_env is None:
        raise ConfigError(
            f"Trajectory {trajectory.id} holds states of the simulation; to learn from it, the data set needs a "
            f"`conversion_env_factory` that makes the environment (with its wrappers) to convert them with."
        )
    return conversion_env
