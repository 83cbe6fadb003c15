"""Context for the recording of trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from maze.core.trajectory_recording.writers.trajectory_writer_file import TrajectoryWriterFile
from maze.core.trajectory_recording.writers.trajectory_writer_registry import TrajectoryWriterRegistry


class SimpleTrajectoryRecordingSetup:
    """Write the trajectories of an environment within a `with` block; the last episode at its end.

    >>> env = TrajectoryRecordingWrapper.wrap(env)  # doctest: +SKIP
    >>> with SimpleTrajectoryRecordingSetup(env):  # doctest: +SKIP
    ...     env.reset()

    :param env: Environment wrapped in a `TrajectoryRecordingWrapper`.
    :param log_dir: Directory of the files.
    """

    def __init__(self, env: Any, log_dir: str | Path = Path("./trajectory_data")) -> None:
        self.env = env
        self._writer = TrajectoryWriterFile(log_dir)

    def __enter__(self) -> SimpleTrajectoryRecordingSetup:
        TrajectoryWriterRegistry.register_writer(self._writer)
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.env.publish_trajectory()
        finally:
            TrajectoryWriterRegistry.unregister_writer(self._writer)
