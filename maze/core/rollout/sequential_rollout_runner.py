"""Rollouts one after the other in this process."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from maze.console.runs import Progress
from maze.core.annotations import override
from maze.core.env.faults import closed
from maze.core.env.maze_env import MazeEnv
from maze.core.rollout.recording import RolloutReport, has_display, recorded
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import CollectionOfConfigType, ConfigType
from maze.core.wrappers.trajectory_recording_wrapper import can_be_drawn


class SequentialRolloutRunner(RolloutRunner):
    """Run all episodes in this process, which makes rendering and debugging possible.

    :param n_episodes: Number of episodes in total.
    :param max_episode_steps: Steps after which an episode is truncated; 0: never.
    :param record_trajectory: Store each episode's trajectory in `trajectory_data`.
    :param record_event_logs: Store all events in `event_logs`.
    :param render: Show the environment after each step in a window; without a display or a library for drawing,
        `record_pages` takes its place.
    :param record_pages: Write each episode as a page for a browser into `episode_pages`. A number `k` draws every
        `k`-th step only.
    :param rest: Further arguments of :class:`~maze.core.rollout.rollout_runner.RolloutRunner`.
    """

    def __init__(
        self,
        n_episodes: int,
        max_episode_steps: int,
        record_trajectory: bool,
        record_event_logs: bool,
        render: bool,
        record_pages: bool | int = False,
        **rest: Any,
    ) -> None:
        super().__init__(n_episodes, max_episode_steps, record_trajectory, record_event_logs, **rest)
        self.render = render
        every_k = int(record_pages) if isinstance(record_pages, bool) else record_pages
        self.record_pages = whole_number("runner.record_pages", every_k, at_least=0)

    @override(RolloutRunner)
    def run_with(self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType) -> None:
        maze_env, policy = self.init_env_and_agent(
            env, wrappers, self.max_episode_steps, agent, self.input_dir, env_timeout=self.env_timeout
        )
        can_render = self.render and has_display() and can_be_drawn(maze_env)
        record_pages = self.record_pages or int(self.render and not can_render)
        if self.render and not can_render:
            print("No display or drawing library was found; each episode is written as an HTML page.", flush=True)
        self._announce(agent)
        self._report = RolloutReport(self.record_event_logs, self._cfg, self.max_episode_steps)
        kinds = self.record_trajectory, self.record_event_logs, self.record_actions, record_pages, self.record_parquet
        with ExitStack() as stack:
            if not isinstance(env, MazeEnv):  # an object is the caller's
                stack.callback(closed, maze_env.close, "env")
            policy, seeds = self.best_plays(maze_env, policy, self.draw_episode_seeds(maze_env), self.search)
            sampling = None if self.deterministic or self.search.is_active else policy
            with (
                recorded(maze_env, *kinds, sampling) as (recorded_env, self._recorder),
                Progress(self.n_episodes, "Rollouts") as self._progress,
            ):
                self.run_interaction_loop(
                    recorded_env,
                    policy,
                    self.n_episodes,
                    render=can_render,
                    episode_end_callback=self.update_progress,
                    episode_seeds=seeds,
                    deterministic=self.deterministic,
                )
        self.stats, self.n_cut_off = self._report.publish(), self._report.n_cut_off
        for page in self._recorder.pages:
            print(f"Open the episode in a browser: {page.absolute()}", flush=True)

    def update_progress(self) -> None:
        """Add the report of the finished episode, and update the progress bar."""
        self._report.add(self._recorder.get_last_episode_data())
        self._progress.update()
