"""Context for the recording of an environment."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, TypeVar

from maze.core.log_events.log_events_utils import SimpleEventLoggingSetup
from maze.core.trajectory_recording.utils.trajectory_utils import SimpleTrajectoryRecordingSetup
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.trajectory_recording_wrapper import TrajectoryRecordingWrapper

T = TypeVar("T")


class MonitoringSetup(Generic[T]):
    """Record events (`event_logs/`) and trajectories (`trajectory_data/`) and print statistics at the end.

    >>> with MonitoringSetup(env, log_dir="monitoring") as env:  # doctest: +SKIP
    ...     env.reset()

    :param env: The environment, which is wrapped for the recordings.
    :param log_dir: Parent of the two directories.
    """

    def __init__(self, env: T, log_dir: str = ".") -> None:
        wrapped: Any = env
        if not isinstance(wrapped, LogStatsWrapper):
            wrapped = LogStatsWrapper.wrap(wrapped, logging_prefix="monitoring")
        if not isinstance(wrapped, TrajectoryRecordingWrapper):
            wrapped = TrajectoryRecordingWrapper.wrap(wrapped)
        self.env: Any = wrapped
        self.log_dir = Path(log_dir)
        self._setups = ExitStack()

    def __enter__(self) -> T:
        from maze.utils.log_stats_utils import SimpleStatsLoggingSetup

        # entered first, left last: the episode is finished for the statistics after the recordings
        self._setups.enter_context(SimpleStatsLoggingSetup(self.env))
        self._setups.enter_context(SimpleEventLoggingSetup(self.env, self.log_dir / "event_logs"))
        self._setups.enter_context(SimpleTrajectoryRecordingSetup(self.env, self.log_dir / "trajectory_data"))
        env: T = self.env
        return env

    def __exit__(self, *exc_info: Any) -> None:
        self._setups.__exit__(*exc_info)
