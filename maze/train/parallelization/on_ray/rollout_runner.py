"""Rollouts in actors of Ray: `maze-run runner=ray`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from maze.core.annotations import override
from maze.core.rollout.recording import EpisodeStatsReport, RolloutReport, recorded
from maze.core.rollout.rollout_runner import EpisodeSeeds, Progress, RolloutRunner
from maze.core.utils.factory import CollectionOfConfigType, ConfigType
from maze.core.utils.files import atomic_write
from maze.core.utils.storage import local_copy, origin_of
from maze.train.parallelization.on_ray.crew import N_AHEAD
from maze.train.parallelization.on_ray.ray_placement import OnRay
from maze.train.parallelization.placement import placement_of

_NAME = "rollouts"
MOST_EPISODES = 10
"""Episodes of a slice, at most: as many are played again where an actor is lost."""


class RemoteRollouts:
    """Plays episodes in an actor.

    :param what: Environment, wrappers, steps after which episodes are cut off, agent, and the directory (or URL) of the
        run.
    :param env_timeout: Seconds that a step or a reset may take; `None`: any time.
    :param recording: Whether trajectories, event logs, actions, pages and tables are recorded.
    :param deterministic: Take the most probable actions.
    :param best_of: How often each episode is played before it is recorded as it went best.
    """

    def __init__(
        self,
        what: tuple[Any, Any, int, Any, str],
        env_timeout: float | None,
        recording: tuple[bool, ...],
        deterministic: bool,
        best_of: int = 1,
    ) -> None:
        env, wrappers, max_steps, agent, run = what
        self._env, self._agent = RolloutRunner.init_env_and_agent(
            env, wrappers, max_steps, agent, local_copy(run, "input_dir"), env_timeout=env_timeout
        )
        self._recording = recording
        self._deterministic = deterministic
        self._best_of = best_of

    def play(self, first: int, seeds: EpisodeSeeds) -> tuple[list[EpisodeStatsReport], dict[str, bytes]]:
        """Plays an episode for each pair of seeds.

        :param first: Number of the first episode.
        :param seeds: Their seeds.
        :return: Their reports, and the files that were written, by their paths in the run's directory: the machine of
            the actor may share none with that of the run.
        """
        reports: list[EpisodeStatsReport] = []
        seeds = RolloutRunner.best_seeds(self._env, self._agent, seeds, self._best_of)
        with _directory_of_files() as files, recorded(self._env, *self._recording) as (env, recorder):
            RolloutRunner.run_interaction_loop(
                env,
                self._agent,
                len(seeds),
                episode_end_callback=lambda: reports.append(recorder.get_last_episode_data()),
                episode_seeds=seeds,
                deterministic=self._deterministic,
            )
        return reports, files

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()


@contextmanager
def _directory_of_files() -> Iterator[dict[str, bytes]]:
    """Context with a working directory of its own; afterwards, the files that were written there, by their paths."""
    files: dict[str, bytes] = {}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            yield files
        finally:
            os.chdir(before)
        written = [path for path in Path(directory).rglob("*") if path.is_file()]
        files.update({str(path.relative_to(directory)): path.read_bytes() for path in written})


def _write(content: bytes, file: BinaryIO) -> None:
    file.write(content)


class RayRolloutRunner(RolloutRunner):
    """Distributes the episodes over actors of Ray; each is delivered once, whatever vanishes meanwhile.

    :param placement: The actors, or how they are configured.
    :param address: Where Ray is, see :class:`~maze.train.parallelization.on_ray.ray_placement.OnRay`.
    :param env_groups: Number of actors; 0: as many as there are CPUs.
    :param arguments: Those of :class:`~maze.core.rollout.rollout_runner.RolloutRunner`.
    """

    def __init__(
        self,
        *arguments: Any,
        placement: ConfigType = "ray",
        address: str | None = None,
        env_groups: int = 0,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        placed = placement_of(placement)
        assert isinstance(placed, OnRay), "a runner of rollouts on Ray is placed there"
        self.placement = placed
        self.placement.address = address
        self.placement.env_groups = env_groups

    @override(RolloutRunner)
    def run_with(self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType) -> None:
        self._announce(agent)
        report = RolloutReport(self.record_event_logs, self._cfg, self.max_episode_steps)
        what = (env, wrappers, self.max_episode_steps, agent, origin_of(self.input_dir))
        recording = (self.record_trajectory, self.record_event_logs, self.record_actions, False, self.record_parquet)
        maker = partial(RemoteRollouts, what, self.env_timeout, recording, self.deterministic, self.best_of)
        try:
            crew = self.placement.crew(self.n_episodes)
            crew.place(_NAME, lambda actor, n_starts: maker)
            with Progress(self.n_episodes, "Rollouts") as progress:
                for (first, _), (episodes, files) in crew.hand_out(_NAME, "play", self._slices(crew.n_actors)):
                    for path, content in files.items():
                        Path(path).parent.mkdir(parents=True, exist_ok=True)
                        atomic_write(path, partial(_write, content))
                    for number, episode in enumerate(episodes, first):
                        report.add_as(number, episode)
                        progress.update()
        finally:
            self.placement.close()
        self.stats, self.n_cut_off = report.publish(), report.n_cut_off

    def _slices(self, n_actors: int) -> Callable[[], tuple[int, EpisodeSeeds] | None]:
        """Gives the next slice each time: number of its first episode, and seeds."""
        seeds = self.draw_episode_seeds()
        size = max(1, min(MOST_EPISODES, self.n_episodes // (N_AHEAD * n_actors)))
        slices = iter([(first, seeds[first : first + size]) for first in range(0, len(seeds), size)])
        return lambda: next(slices, None)
