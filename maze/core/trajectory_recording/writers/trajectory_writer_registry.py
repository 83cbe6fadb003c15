"""Registry of writers of episodes."""

from __future__ import annotations

import logging
from typing import ClassVar

from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord
from maze.core.trajectory_recording.writers.trajectory_writer import TrajectoryWriter

logger = logging.getLogger(__name__)


class TrajectoryWriterRegistry:
    """The writers of this process. After an `OSError` a writer is removed with one warning."""

    writers: ClassVar[list[TrajectoryWriter]] = []

    @classmethod
    def register_writer(cls, writer: TrajectoryWriter) -> None:
        """Register a writer for episodes that end afterwards.

        :param writer: The writer, which stays registered in this process until :meth:`unregister_writer`.
        """
        cls.writers.append(writer)

    @classmethod
    def unregister_writer(cls, writer: TrajectoryWriter) -> None:
        """Remove a writer.

        :param writer: The writer; one that is not registered is ignored.
        """
        if writer in cls.writers:
            cls.writers.remove(writer)

    @classmethod
    def record_trajectory_data(cls, episode_record: StateTrajectoryRecord) -> None:
        """Pass a finished episode to all writers.

        :param episode_record: The episode, which must not be modified afterwards.
        """
        for writer in list(cls.writers):
            try:
                writer.write(episode_record)
            except OSError as error:  # noqa: PERF203 - writers fail one by one
                cls.unregister_writer(writer)
                logger.warning(
                    "%s cannot store episode %s (%s); it is disabled and records no more trajectories.",
                    type(writer).__name__,
                    episode_record.id,
                    error,
                )
