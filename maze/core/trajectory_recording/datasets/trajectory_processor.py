"""Processing of recorded trajectories before learning."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from maze.core.annotations import override
from maze.core.env.base_env import is_truncated
from maze.core.env.faults import USER_CODE_ERRORS
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError, MazeError, text_of
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import (
    SpacesTrajectoryRecord,
    StateTrajectoryRecord,
    TrajectoryRecord,
)
from maze.core.utils.config_utils import whole_number


class TrajectoryProcessor(ABC):
    """Filter or modify trajectories, and convert them to observations and actions."""

    @abstractmethod
    def pre_process(self, trajectory: TrajectoryRecord[Any]) -> TrajectoryRecord[Any] | list[TrajectoryRecord[Any]]:
        """Filter or modify a trajectory before it is converted.

        :param trajectory: The recorded trajectory, which must not be modified in place.
        :return: A trajectory, or a list of any number of them.
        """

    @staticmethod
    def convert_trajectory_with_env(
        trajectory: TrajectoryRecord[Any], conversion_env: MazeEnv[Any] | None
    ) -> list[StructuredSpacesRecord]:
        """Return the steps of a trajectory as observations and actions, without the last state.

        :param trajectory: States and actions of the simulation, or observations and actions.
        :param conversion_env: Environment with the conversions and wrappers; required for states and actions.
        :raises ConfigError: There is no environment, or it cannot convert the states and actions.
        """
        if isinstance(trajectory, SpacesTrajectoryRecord):
            return list(trajectory.step_records)
        if not isinstance(trajectory, StateTrajectoryRecord) or conversion_env is None:
            raise ConfigError(
                f"Trajectory {trajectory.id} is a {type(trajectory).__name__}. A StateTrajectoryRecord with a "
                "`conversion_env_factory` of the data set, which makes the environment (with its wrappers) for the "
                "conversion, or a SpacesTrajectoryRecord was expected."
            )
        try:
            return [
                StructuredSpacesRecord.converted_from(record, conversion_env, first_step_in_episode=index == 0)
                for index, record in enumerate(_steps_with_action(trajectory))
            ]
        except MazeError:
            raise
        except USER_CODE_ERRORS as error:
            raise ConfigError(
                f"Trajectory {trajectory.id}: {type(conversion_env).__name__} cannot convert its states and actions "
                f"({text_of(error)}). Name the environment of the recording, with its wrappers."
            ) from error

    def process(
        self, trajectory: TrajectoryRecord[Any], conversion_env: MazeEnv[Any] | None
    ) -> list[list[StructuredSpacesRecord]]:
        """Pre-process and convert a trajectory.

        :param trajectory: The recorded trajectory.
        :param conversion_env: See :meth:`convert_trajectory_with_env`.
        :return: The steps of each resulting trajectory that has any.
        :raises ConfigError: The trajectory cannot be converted.
        """
        processed = self.pre_process(trajectory)
        trajectories = processed if isinstance(processed, list) else [processed]
        converted = [self.convert_trajectory_with_env(one, conversion_env) for one in trajectories]
        return [steps for steps in converted if steps]


class IdentityTrajectoryProcessor(TrajectoryProcessor):
    """Keep trajectories unchanged."""

    @override(TrajectoryProcessor)
    def pre_process(self, trajectory: TrajectoryRecord[Any]) -> TrajectoryRecord[Any]:
        return trajectory


@dataclass
class DeadEndClippingTrajectoryProcessor(TrajectoryProcessor):
    """Drop the last steps of terminated episodes, which may have led into a dead end.

    Truncated episodes are kept unchanged.
    """

    clip_k: int
    """Number of steps to drop."""

    def __post_init__(self) -> None:
        self.clip_k = whole_number("DeadEndClippingTrajectoryProcessor.clip_k", self.clip_k, at_least=0)

    @override(TrajectoryProcessor)
    def pre_process(self, trajectory: TrajectoryRecord[Any]) -> TrajectoryRecord[Any]:
        is_converted = isinstance(trajectory, SpacesTrajectoryRecord)
        records: list[Any] = trajectory.step_records if is_converted else _steps_with_action(trajectory)
        last = records[-1] if records else None
        if is_converted and last is not None:
            last = last.substep_records[-1]
        if last is None or not last.done or is_truncated(last.done, last.info or {}):
            return trajectory
        clipped = copy.copy(trajectory)
        clipped.step_records = trajectory.step_records[: max(0, len(records) - self.clip_k)]
        return clipped


class IdentityWithNextObservationTrajectoryProcessor(IdentityTrajectoryProcessor):
    """Add to each sub-step the next observation.

    After the last step of an episode this is the observation of its last state. If that was not recorded, a step that
    terminated the episode gets its own observation, which is not used for bootstrapping; other last steps are dropped.
    A trajectory may consist of several episodes; it is split where a step was dropped between two of them.
    """

    @staticmethod
    @override(TrajectoryProcessor)
    def convert_trajectory_with_env(
        trajectory: TrajectoryRecord[Any], conversion_env: MazeEnv[Any] | None
    ) -> list[StructuredSpacesRecord]:
        """Return the steps with next observations; `None` where an episode before the last one was truncated."""
        steps = [
            replace(step, substep_records=[replace(substep) for substep in step.substep_records])
            for step in TrajectoryProcessor.convert_trajectory_with_env(trajectory, conversion_env)
        ]
        substeps = [substep for step in steps for substep in step.substep_records]
        if not substeps:
            return []
        for substep, following in pairwise(substeps):
            # the observation after the end of an episode belongs to the next one
            if substep.next_observation is None and not substep.done:
                substep.next_observation = following.observation
        last = substeps[-1]
        if last.next_observation is None:
            last.next_observation = _last_observation(trajectory, conversion_env)
        for substep in substeps:
            if substep.next_observation is None and substep.done and not is_truncated(True, substep.info or {}):
                substep.next_observation = substep.observation
        return steps if last.next_observation is not None else steps[:-1]

    @override(TrajectoryProcessor)
    def process(
        self, trajectory: TrajectoryRecord[Any], conversion_env: MazeEnv[Any] | None
    ) -> list[list[StructuredSpacesRecord]]:
        pieces: list[list[StructuredSpacesRecord]] = []
        for steps in super().process(trajectory, conversion_env):
            pieces.append([])
            for step in steps:  # split where the next observation is unknown
                if step.substep_records and step.substep_records[-1].next_observation is None:
                    pieces.append([])
                else:
                    pieces[-1].append(step)
        return [piece for piece in pieces if piece]


def _last_observation(trajectory: TrajectoryRecord[Any], env: MazeEnv[Any] | None) -> Any:
    """Return the observation of the last state of an episode; `None`: it was not recorded."""
    if not isinstance(trajectory, StateTrajectoryRecord) or env is None or not trajectory.step_records:
        return None
    last = trajectory.step_records[-1]
    if last.maze_action is not None or last.maze_state is None:
        return None
    try:
        records = StructuredSpacesRecord.converted_from(last, env, first_step_in_episode=False).substep_records
    except USER_CODE_ERRORS:  # all earlier states were converted: the environment needs the action as well
        return None
    return records[0].observation if records else None


def _steps_with_action(trajectory: TrajectoryRecord[Any]) -> list[StateRecord]:
    return [record for record in trajectory.step_records if record.maze_action is not None]
