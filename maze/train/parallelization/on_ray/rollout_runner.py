"""Rollouts in actors of Ray: `maze-run runner=ray`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from maze.core.annotations import override
from maze.core.rollout.parallel_rollout_runner import DistributedRolloutRunner, ParallelRolloutWorker
from maze.core.rollout.recording import EpisodeStatsReport
from maze.core.rollout.solve import EpisodeSeeds
from maze.core.utils.factory import CollectionOfConfigType, ConfigType
from maze.core.utils.files import inside_directory, write_whole
from maze.core.utils.storage import local_copy, origin_of
from maze.train.parallelization.on_ray.actor_pool import ActorPool
from maze.train.parallelization.placement import placement_of

_NAME = "rollouts"
MOST_EPISODES = 10
"""Maximum number of episodes of a slice: they are played again if the actor is lost."""


class RemoteRollouts(ParallelRolloutWorker):
    """Play slices of the episodes in an actor of Ray."""

    @classmethod
    def opened(cls, run: str, **arguments: Any) -> RemoteRollouts:
        """Build environment and agent in the actor.

        :param run: Directory (or URL) of the run that the agent was trained in.
        :param arguments: Further arguments of :class:`ParallelRolloutWorker`.
        """
        worker = cls(run=local_copy(run, "input_dir"), **arguments)
        worker.open()
        return worker

    def play_slice(self, first: int, seeds: EpisodeSeeds) -> tuple[list[EpisodeStatsReport], dict[str, bytes]]:
        """Play an episode for each pair of seeds.

        :param first: Number of the first episode.
        :param seeds: Seeds of the episodes.
        :return: The reports of the episodes, and the contents of the written files by path relative to the run
            directory: the actor may run on a machine without access to that directory.
        """
        reports: list[EpisodeStatsReport] = []
        self.report, self.seeds = reports.append, seeds
        with _directory_of_files() as files:
            self.play()
        return reports, files


@contextmanager
def _directory_of_files() -> Iterator[dict[str, bytes]]:
    """Return a context with a temporary working directory; on exit, its files are read into the dictionary."""
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as directory:
        with inside_directory(directory):
            yield files
        written = [path for path in Path(directory).rglob("*") if path.is_file()]
        files.update({str(path.relative_to(directory)): path.read_bytes() for path in written})


class RayRolloutRunner(DistributedRolloutRunner):
    """Distribute the episodes over actors of Ray; each episode is delivered once, also if actors are lost.

    :param placement: The execution backend, or its configuration.
    :param address: Address of Ray, see :class:`~maze.train.parallelization.on_ray.ray_placement.OnRay`.
    :param env_groups: Number of actors; 0: number of CPUs.
    :param arguments: Arguments of :class:`~maze.core.rollout.rollout_runner.RolloutRunner`.
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
        self.placement = placement_of(placement, address, env_groups)

    @contextmanager
    @override(DistributedRolloutRunner)
    def _played(
        self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType
    ) -> Iterator[Iterator[tuple[int, EpisodeStatsReport]]]:
        arguments = {**self._worker(env, wrappers, agent), "run": origin_of(self.input_dir)}
        maker = partial(RemoteRollouts.opened, **arguments)
        try:
            pool = self.placement.actor_pool(self.n_episodes)
            assert pool is not None, "this runner needs a Ray placement"
            pool.host(_NAME, lambda actor, n_starts: maker)
            yield self._delivered(pool, self.draw_episode_seeds(env))
        finally:
            self.placement.close()

    def _delivered(self, pool: ActorPool, seeds: EpisodeSeeds) -> Iterator[tuple[int, EpisodeStatsReport]]:
        for (first, _), (episodes, files) in pool.hand_out(
            _NAME, "play_slice", self._slices(pool.n_ahead * pool.n_actors, seeds)
        ):
            for path, content in files.items():
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, content)
            yield from enumerate(episodes, first)

    def _slices(self, n_places: int, seeds: EpisodeSeeds) -> Callable[[], tuple[int, EpisodeSeeds] | None]:
        """Return a function that returns the next slice: number of its first episode, and seeds."""
        size = max(1, min(MOST_EPISODES, self.n_episodes // n_places))
        slices = iter([(first, seeds[first : first + size]) for first in range(0, len(seeds), size)])
        return lambda: next(slices, None)
