"""Outputs of rollouts: statistics, event logs and trajectories."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maze.console.runs import EVERYTHING
from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.log_events_writer import LogEventsWriter
from maze.core.log_events.log_events_writer_registry import LogEventsWriterRegistry
from maze.core.log_events.log_events_writer_tsv import LogEventsWriterTSV
from maze.core.log_stats import log_stats
from maze.core.log_stats.log_stats_writer_console import LogStatsWriterConsole
from maze.core.trajectory_recording.writers.trajectory_writer import TrajectoryWriter
from maze.core.trajectory_recording.writers.trajectory_writer_file import TrajectoryWriterFile
from maze.core.trajectory_recording.writers.trajectory_writer_registry import TrajectoryWriterRegistry
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import env_name
from maze.core.wrappers.monitoring_wrapper import base_maze_env
from maze.core.wrappers.trajectory_recording_wrapper import (
    ActionRecordingWrapper,
    ParquetRecordingWrapper,
    TrajectoryRecordingWrapper,
    with_frames,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.core.agent.policy import Policy

STATS_PATH = "rollout_stats"
TRAJECTORY_DIR = Path("trajectory_data")
PAGE_DIR = Path("episode_pages")
EVENT_LOG_DIR = Path("event_logs")
ACTION_RECORD_DIR = Path("action_records")
PARQUET_DIR = Path("trajectory_parquet")


class EpisodeStatsReport(NamedTuple):
    """Report of a finished episode."""

    stats: log_stats.LogStats
    event_log: EpisodeEventLog | None
    """None where events are not recorded."""
    is_cut_off: bool = False
    """Whether the step limit of the rollout truncated it."""


class EpisodeRecorder(log_stats.LogStatsConsumer, LogEventsWriter):
    """Keep statistics and event log of the last episode until they are fetched.

    :param env: The environment; counts truncated episodes where there is a step limit.
    """

    def __init__(self, env: Any = None) -> None:
        self._env = env
        self._n_cut_off = int(getattr(env, "n_cut_off", 0))
        self.pages: list[Path] = []
        """Pages of the episodes, in order."""
        self.last_stats: log_stats.LogStats | None = None
        self.last_event_log: EpisodeEventLog | None = None

    @override(log_stats.LogStatsConsumer)
    def receive(self, stat: log_stats.LogStats) -> None:
        self.last_stats = stat

    @override(LogEventsWriter)
    def write(self, episode_event_log: EpisodeEventLog) -> None:
        self.last_event_log = episode_event_log

    def get_last_episode_data(self) -> EpisodeStatsReport:
        """Return statistics and event log of the last finished episode."""
        assert self.last_stats is not None, "no episode has finished"
        before, self._n_cut_off = self._n_cut_off, int(getattr(self._env, "n_cut_off", 0))
        return EpisodeStatsReport(self.last_stats, self.last_event_log, self._n_cut_off > before)


@contextmanager
def recorded(
    env: Any,
    record_trajectory: bool,
    record_event_logs: bool,
    record_actions: bool = False,
    record_pages: int = 0,
    record_parquet: bool = False,
    sampling: Policy | None = None,
) -> Iterator[tuple[MazeEnv[Any], EpisodeRecorder]]:
    """Return a context with an environment that records its episodes and writes each record when the episode ends.

    :param env: A Maze environment.
    :param record_trajectory: Write the trajectory of each episode.
    :param record_event_logs: Write the events of each episode.
    :param record_actions: Write seed and actions of each episode.
    :param record_pages: Write a page of each episode, with a picture of every so many steps; 0: no pages.
    :param record_parquet: Write a table of each episode.
    :param sampling: The policy whose samples the actions are; tables contain their probabilities, if it states them.
    :return: The environment, and the recorder of statistics and event logs.
    """
    recorder = EpisodeRecorder(env)
    with ExitStack() as stack:
        stack.enter_context(log_stats.StatsContext())
        listeners = env.context.event_service.on_clear
        stack.callback(listeners.__setitem__, slice(None), list(listeners))  # the same afterwards
        if not isinstance(env, LogStatsWrapper):
            env = LogStatsWrapper.wrap(env)
        aggregator = env.get_stats(log_stats.LogStatsLevel.EPISODE)
        aggregator.register_consumer(recorder)
        stack.callback(aggregator.remove_consumer, recorder)
        if record_event_logs:
            LogEventsWriterRegistry.register_writer(recorder)
        writers: list[TrajectoryWriter] = []
        if record_trajectory:
            writers.append(TrajectoryWriterFile(log_dir=TRAJECTORY_DIR))
        if record_pages:
            from maze.core.rendering.trajectory_page import TrajectoryPageWriter

            name = env_name(base_maze_env(env))
            writers.append(TrajectoryPageWriter(PAGE_DIR, name, recorder.pages, record_pages))
            env = with_frames(env, record_pages)
        for writer in writers:
            TrajectoryWriterRegistry.register_writer(writer)
            stack.callback(TrajectoryWriterRegistry.unregister_writer, writer)
        if writers and not isinstance(env, TrajectoryRecordingWrapper):
            env = TrajectoryRecordingWrapper.wrap(env)
        if record_actions:
            env = ActionRecordingWrapper.wrap(env, output_dir=ACTION_RECORD_DIR)
        if record_parquet:
            env = ParquetRecordingWrapper.wrap(env, output_dir=PARQUET_DIR)
            if sampling is not None:
                from maze.core.agent.action_distribution import propensities  # imports torch

                env.propensities = partial(propensities, sampling, action_spaces=env.action_spaces_dict)
        yield env, recorder


class RolloutReport:
    """Collect the reports of all episodes, in their order; print the statistics once, at the end.

    :param record_event_logs: Write the event logs.
    :param cfg: Configuration of the job, written to the logs with the statistics.
    :param max_episode_steps: Steps after which episodes are truncated; 0: never.
    """

    def __init__(self, record_event_logs: bool, cfg: DictConfig | None = None, max_episode_steps: int = 0) -> None:
        self._cfg = cfg
        self._max_episode_steps = max_episode_steps
        self._n_episodes = 0
        self.n_cut_off = 0
        """Number of episodes that the rollout truncated."""
        # Finished episodes whose predecessors have not been reported yet.
        self._early: dict[int, EpisodeStatsReport] = {}
        self._aggregator = log_stats.LogStatsAggregator(log_stats.LogStatsLevel.EPOCH)
        self._guard = log_stats.StatsContext()  # disables the writer at its first error
        self._event_log_writer = LogEventsWriterTSV(log_dir=EVENT_LOG_DIR) if record_event_logs else None

    def add(self, report: EpisodeStatsReport, number: int | None = None) -> None:
        """Add a finished episode; episodes are reported in the order of their numbers.

        :param report: Its report.
        :param number: Counts the episodes, from 0; `None`: the next one.
        """
        self._early[self._n_episodes if number is None else number] = report
        while (following := self._early.pop(self._n_episodes, None)) is not None:
            self._aggregator.receive(following.stats)
            self._n_episodes += 1
            self.n_cut_off += bool(following.is_cut_off and self._max_episode_steps)
            if (writer := self._event_log_writer) is not None and following.event_log is not None:
                self._guard.guarded(writer, partial(writer.write, following.event_log))

    def publish(self) -> log_stats.LogStats:
        """Print the statistics over all episodes, and return them."""
        stats = self._aggregator.reduce()
        with log_stats.StatsContext():
            if self._cfg is None:
                log_stats.register_log_stats_writer(LogStatsWriterConsole())
            else:
                from maze.utils.log_stats_utils import setup_logging

                setup_logging(self._cfg, tensorboard_render_figure=False, verbose=EVERYTHING)
            log_stats.get_stats_logger(STATS_PATH).receive(stats)
            log_stats.increment_log_step()
        if self.n_cut_off:
            print(
                f"{self.n_cut_off} of {self._n_episodes} episodes were truncated after {self._max_episode_steps} steps "
                "(runner.max_episode_steps; 0: no limit).",
                flush=True,
            )
        return stats


def has_display() -> bool:
    """Return whether windows can be opened."""
    if sys.platform in ("win32", "darwin"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))


def open_window(env: Any) -> None:
    """Let a gymnasium environment without a render mode draw in a window; it is not yet reset."""
    gym_env = getattr(getattr(env, "core_env", None), "env", None)
    if hasattr(env, "set_render_mode") and getattr(gym_env, "render_mode", None) is None:
        env.set_render_mode("human")
