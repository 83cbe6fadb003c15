"""Reading stored trajectories without running code that a file may bring along."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from maze.core.errors import CheckpointError
from maze.core.trajectory_recording.records.trajectory_record import TrajectoryRecord
from maze.core.utils.safe_pickle import safe_load

_RECORD_TYPES = (
    "maze.core.env.structured_env.ActorID",
    "maze.core.events.event_collection.EventCollection",
    "maze.core.events.event_record.EventRecord",
    "maze.core.log_events.step_event_log.StepEventLog",
    "maze.core.log_stats.log_stats.LogStatsKey",
    "maze.core.trajectory_recording.records.*",
    "maze.core.rendering.*",
    "maze_envs.*",
)


def load_trajectory(
    path: str | Path, allow_pickle: bool = False, extra_types: Iterable[type | str] = ()
) -> TrajectoryRecord[object]:
    """Read a trajectory that was written by :class:`TrajectoryWriterFile`.

    :param path: The file.
    :param allow_pickle: Trust the file: load any type, which can run any code.
    :param extra_types: Further types that may be loaded: the classes of your environment's states, actions and
        renderer, their full names, or a pattern such as `my_project.envs.*`.
    """
    hint = "`load_trajectory(path, extra_types=[...])` or `register_safe_types(...)`"
    trajectory = safe_load(path, allowed=(*_RECORD_TYPES, *extra_types), allow_pickle=allow_pickle, hint=hint)
    if not isinstance(trajectory, TrajectoryRecord):
        raise CheckpointError(
            f"{path}: expected a trajectory record, found an object of type {type(trajectory).__name__}. "
            "Trajectories are recorded with `runner.record_trajectory=true` into `trajectory_data/`."
        )
    return trajectory
