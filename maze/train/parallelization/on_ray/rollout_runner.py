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
from maze.core.rollout.rollout_runner import EpisodeSeeds
from maze.core.utils.factory import CollectionOfConfigType, ConfigType
from maze.core.utils.files import inside_directory, write_whole
from maze.core.utils.storage import local_copy, origin_of
from maze.train.parallelization.on_ray.crew import N_AHEAD, Crew
from maze.train.parallelization.placement import placed

_NAME = "rollouts"
MOST_EPISODES = 10
"""Episodes of a slice, at most: as many are played again where an actor is lost."""


class RemoteRollouts(ParallelRolloutWorker):
    """Plays slices of the episodes in an actor."""

    @classmethod
    def opened(cls, run: str, **arguments: Any) -> RemoteRollouts:
        """Builds environment and agent, in the actor.

        :param run: The directory (or URL) of the run that the agent is from.
        :param arguments: Those of :class:`ParallelRolloutWorker`.
        """
        worker = cls(run=local_copy(run, "input_dir"), **arguments)
        worker.open()
        return worker

    def play_slice(self, first: int, seeds: EpisodeSeeds) -> tuple[list[EpisodeStatsReport], dict[str, bytes]]:
        """Plays an episode for each pair of seeds.

        :param first: Number of the first episode.
        :param seeds: Their seeds.
        :return: Their reports, and the files that were written, by their paths in the run's directory: the machine of
            the actor may share none with that of the run.
        """
        reports: list[EpisodeStatsReport] = []
        self.report, self.seeds = reports.append, seeds
        with _directory_of_files() as files:
            self.play()
        return reports, files


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
        arguments = {**self._worker(env, wrappers, agent), "run": origin_of(self.input_dir)}
        maker = partial(RemoteRollouts.opened, **arguments)
        try:
            crew = self.placement.crew(self.n_episodes)
            assert crew is not None, "a runner of rollouts on Ray is placed there"
            crew.place(_NAME, lambda actor, n_starts: maker)
            yield self._delivered(crew)
        finally:
            self.placement.close()

    def _delivered(self, crew: Crew) -> Iterator[tuple[int, EpisodeStatsReport]]:
        for (first, _), (episodes, files) in crew.hand_out(_NAME, "play_slice", self._slices(crew.n_actors)):
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
