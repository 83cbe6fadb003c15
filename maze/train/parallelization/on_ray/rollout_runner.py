"""Rollouts in actors of Ray: `maze-run runner=ray`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from maze.core.annotations import override
from maze.core.rollout.parallel_rollout_runner import DistributedRolloutRunner, play_recorded
from maze.core.rollout.recording import EpisodeStatsReport
from maze.core.rollout.rollout_runner import EpisodeSeeds, RolloutRunner
from maze.core.utils.factory import CollectionOfConfigType, ConfigType
from maze.core.utils.files import inside_directory, write_whole
from maze.core.utils.import_guard import ImportGuard, current_guard, imports_guarded
from maze.core.utils.storage import local_copy, origin_of
from maze.train.parallelization.on_ray.crew import N_AHEAD, Crew
from maze.train.parallelization.placement import placed

_NAME = "rollouts"
MOST_EPISODES = 10
"""Episodes of a slice, at most: as many are played again where an actor is lost."""


class RemoteRollouts:
    """Plays episodes in an actor.

    :param what: Environment, wrappers, steps after which episodes are cut off, and agent.
    :param run: The directory (or URL) of the run that the agent is from.
    :param env_timeout: Seconds that a step or a reset may take; `None`: any time.
    :param guard: What may be imported for them.
    :param how: Further arguments of :func:`play_recorded`.
    """

    def __init__(
        self,
        what: tuple[Any, Any, int, Any],
        run: str,
        env_timeout: float | None,
        guard: ImportGuard | None = None,
        **how: Any,
    ) -> None:
        directory = local_copy(run, "input_dir")
        with imports_guarded(guard):
            self._env, self._agent = RolloutRunner.init_env_and_agent(*what, directory, env_timeout=env_timeout)
        self._how = how

    def play(self, first: int, seeds: EpisodeSeeds) -> tuple[list[EpisodeStatsReport], dict[str, bytes]]:
        """Plays an episode for each pair of seeds.

        :param first: Number of the first episode.
        :param seeds: Their seeds.
        :return: Their reports, and the files that were written, by their paths in the run's directory: the machine of
            the actor may share none with that of the run.
        """
        reports: list[EpisodeStatsReport] = []
        with _directory_of_files() as files:
            play_recorded(self._env, self._agent, len(seeds), reports.append, episode_seeds=seeds, **self._how)
        return reports, files

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()


@contextmanager
def _directory_of_files() -> Iterator[dict[str, bytes]]:
    """Context with a working directory of its own; afterwards, the files that were written there, by their paths."""
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as directory:
        with inside_directory(directory):
            yield files
        written = [path for path in Path(directory).rglob("*") if path.is_file()]
        files.update({str(path.relative_to(directory)): path.read_bytes() for path in written})


class RayRolloutRunner(DistributedRolloutRunner):
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
        **rest: Any,
    ) -> None:
        super().__init__(*arguments, **rest)
        self.placement = placed(placement, address, env_groups)

    @contextmanager
    @override(DistributedRolloutRunner)
    def _played(
        self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType
    ) -> Iterator[Iterator[tuple[int, EpisodeStatsReport]]]:
        what, run = (env, wrappers, self.max_episode_steps, agent), origin_of(self.input_dir)
        recording = (self.record_trajectory, self.record_event_logs, self.record_actions, False, self.record_parquet)
        how = {"recording": recording, "deterministic": self.deterministic, "best_of": self.best_of}
        maker = partial(RemoteRollouts, what, run, self.env_timeout, current_guard(), **how)
        try:
            crew = self.placement.crew(self.n_episodes)
            assert crew is not None, "a runner of rollouts on Ray is placed there"
            crew.place(_NAME, lambda actor, n_starts: maker)
            yield self._delivered(crew)
        finally:
            self.placement.close()

    def _delivered(self, crew: Crew) -> Iterator[tuple[int, EpisodeStatsReport]]:
        for (first, _), (episodes, files) in crew.hand_out(_NAME, "play", self._slices(crew.n_actors)):
            for path, content in files.items():
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, content)
            yield from enumerate(episodes, first)

    def _slices(self, n_actors: int) -> Callable[[], tuple[int, EpisodeSeeds] | None]:
        """Gives the next slice each time: number of its first episode, and seeds."""
        seeds = self.draw_episode_seeds()
        size = max(1, min(MOST_EPISODES, self.n_episodes // (N_AHEAD * n_actors)))
        slices = iter([(first, seeds[first : first + size]) for first in range(0, len(seeds), size)])
        return lambda: next(slices, None)
