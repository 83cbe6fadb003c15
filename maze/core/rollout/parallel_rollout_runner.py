"""Rollouts in several processes at once, on this machine or on a cluster."""

from __future__ import annotations

import sys
import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from maze.console.runs import Progress
from maze.core.annotations import override
from maze.core.rollout.recording import EpisodeRecorder, EpisodeStatsReport, RolloutReport, recorded
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.rollout.solve import NO_SEARCH, EpisodeSeeds, Search
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import TARGET_KEY, CollectionOfConfigType, ConfigType, locate
from maze.core.utils.files import inside_directory, local_copy, origin_of, write_whole
from maze.core.utils.import_guard import ImportGuard, current_guard, imports_guarded
from maze.core.utils.worker_pool import ProcessPool, TaskPool, quick_start_method
from maze.core.utils.worker_process import failure_of

__all__ = ["EpisodeRecorder", "EpisodeStatsReport", "ParallelRolloutRunner", "ParallelRolloutWorker"]

_NAME = "rollouts"
MOST_EPISODES = 10
"""Maximum number of episodes of a slice: they are played again if an actor of Ray is lost."""


class ParallelRolloutWorker:
    """Play slices of the episodes in the process that it is in: a worker process, or an actor of Ray.

    :param what: Environment, wrappers, steps after which episodes are truncated, and agent.
    :param run: Directory (or URL) of the run that the agent is from.
    :param recording: Whether trajectories, event logs, actions, pages and tables are recorded.
    :param deterministic: Return deterministic (greedy) actions instead of sampling.
    :param env_timeout: Seconds that a step or a reset may take; `None`: any time.
    :param search: Plays that are tried before each episode is recorded.
    :param instance_seeds: Seeds of environment and agent, where episodes have none of their own.
    :param sends_files: Whether recorded files are returned: the machine may have no access to the run directory.
    :param is_quiet: Whether warnings are suppressed: another worker issues them.
    :param guard: Import guard under which the worker builds and plays; `None`: a new one.
    """

    def __init__(
        self,
        what: tuple[ConfigType, CollectionOfConfigType, int, ConfigType],
        run: str,
        recording: tuple[bool, bool, bool, bool, bool],
        deterministic: bool,
        env_timeout: float | None = None,
        search: Search = NO_SEARCH,
        instance_seeds: tuple[int | None, int | None] = (None, None),
        sends_files: bool = False,
        is_quiet: bool = False,
        guard: ImportGuard | None = None,
    ) -> None:
        self._recording, self._deterministic, self._search = recording, deterministic, search
        self._sends_files, self._guard = sends_files, guard
        if is_quiet:
            warnings.simplefilter("ignore")
        with imports_guarded(guard):
            self._env, self._agent = RolloutRunner.init_env_and_agent(
                *what, local_copy(run, "input_dir"), *instance_seeds, env_timeout
            )

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def play_slice(self, first: int, seeds: EpisodeSeeds) -> tuple[list[EpisodeStatsReport], dict[str, bytes]]:
        """Play an episode for each pair of seeds.

        :param first: Number of the first episode.
        :param seeds: Seeds of the episodes.
        :return: The reports of the episodes, and the contents of the files by path relative to the run directory.
        """
        reports: list[EpisodeStatsReport] = []
        kept: AbstractContextManager[dict[str, bytes]] = _directory_of_files() if self._sends_files else nullcontext({})
        with kept as files:
            self.play(reports.append, seeds)
        return reports, files

    def play(self, report: Callable[[EpisodeStatsReport], Any], seeds: EpisodeSeeds, n_unseeded: int = 0) -> None:
        """Play episodes.

        :param report: Receives the report of each episode.
        :param seeds: Seeds of the episodes.
        :param n_unseeded: Number of episodes without seeds of their own; the generators continue.
        """
        agent, seeds = RolloutRunner.best_plays(self._env, self._agent, seeds, self._search)
        sampling = None if self._deterministic or self._search.is_active else agent
        guarded, recording = imports_guarded(self._guard), recorded(self._env, *self._recording, sampling)
        with guarded, recording as (recorded_env, recorder):
            RolloutRunner.run_interaction_loop(
                recorded_env,
                agent,
                n_unseeded or len(seeds),
                episode_end_callback=lambda: report(recorder.get_last_episode_data()),
                episode_seeds=None if n_unseeded else seeds,
                deterministic=self._deterministic,
            )

    @staticmethod
    def run(
        env_config: ConfigType,
        wrapper_config: CollectionOfConfigType,
        agent_config: ConfigType,
        n_episodes: int,
        max_episode_steps: int,
        record_trajectory: bool,
        input_directory: str,
        reporting_queue: Any,
        env_instance_seed: int | None,
        agent_instance_seed: int | None,
        record_event_logs: bool = True,
        deterministic: bool = False,
    ) -> None:
        """Run episodes in this process, and put an :class:`EpisodeStatsReport` of each into `reporting_queue`.

        No exception is raised. After an error, the last entry is an
        :class:`~maze.utils.exception_report.ExceptionReport`.

        :param env_config: Environment, or configuration of one.
        :param wrapper_config: Wrappers to put around it, innermost first.
        :param agent_config: Policy, or configuration of one.
        :param n_episodes: Number of episodes.
        :param max_episode_steps: Steps after which an episode is truncated; 0: never.
        :param record_trajectory: Store each episode's trajectory in `trajectory_data`.
        :param input_directory: Directory that file names in the configurations refer to.
        :param reporting_queue: Object with the method `put`.
        :param env_instance_seed: Seed of the environment, before the first episode; `None`: it is not seeded.
        :param agent_instance_seed: Seed of the policy, likewise.
        :param record_event_logs: Store all events in `event_logs`.
        :param deterministic: Return deterministic (greedy) actions instead of sampling.
        """
        try:
            worker = ParallelRolloutWorker(
                (env_config, wrapper_config, max_episode_steps, agent_config),
                input_directory,
                (record_trajectory, record_event_logs, False, False, False),
                deterministic,
                instance_seeds=(env_instance_seed, agent_instance_seed),
            )
            worker.play(reporting_queue.put, (), n_episodes)
        except BaseException as error:  # signals are left to the parent: the error is the environment's or the agent's
            reporting_queue.put(failure_of(error))


@contextmanager
def _directory_of_files() -> Iterator[dict[str, bytes]]:
    """Return a context with a temporary working directory; on exit, its files are read into the dictionary."""
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as directory:
        with inside_directory(directory):
            yield files
        written = [path for path in Path(directory).rglob("*") if path.is_file()]
        files.update({str(path.relative_to(directory)): path.read_bytes() for path in written})


class DistributedRolloutRunner(RolloutRunner):
    """Run slices of the episodes in the actors of a pool and report them in the order of their numbers."""

    sends_files: ClassVar[bool] = False
    """Whether the actors return recorded files."""

    @override(RolloutRunner)
    def run_with(self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType) -> None:
        self._announce(agent)
        report = RolloutReport(self.record_event_logs, self._cfg, self.max_episode_steps)
        recording = self.record_trajectory, self.record_event_logs, self.record_actions, False, self.record_parquet
        make = partial(
            ParallelRolloutWorker,
            (env, wrappers, self.max_episode_steps, agent),
            origin_of(self.input_dir) if self.sends_files else self.input_dir,
            recording,
            self.deterministic,
            self.env_timeout,
            self.search,
            sends_files=self.sends_files,
            guard=current_guard(),
        )
        seeds = self.draw_episode_seeds(env)
        for config in (env, wrappers, agent):
            target = config.get(TARGET_KEY) if isinstance(config, Mapping) else None
            if isinstance(target, str):  # imported once for all forked workers, which report errors
                with suppress(Exception):
                    locate(target)
        with self._pool() as pool, Progress(self.n_episodes, "Rollouts") as progress:
            pool.host(_NAME, lambda actor, n_starts: partial(make, is_quiet=actor > 0))
            size = max(1, min(MOST_EPISODES, self.n_episodes // (pool.n_ahead * pool.n_actors)))
            slices = iter([(first, seeds[first : first + size]) for first in range(0, len(seeds), size)])
            for (first, _), (episodes, files) in pool.hand_out(_NAME, "play_slice", lambda: next(slices, None)):
                for path, content in files.items():
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    write_whole(path, content)
                for number, episode in enumerate(episodes, first):
                    report.add(episode, number)
                    progress.update()
        self.stats, self.n_cut_off = report.publish(), report.n_cut_off

    @abstractmethod
    def _pool(self) -> AbstractContextManager[TaskPool]:
        """Return a context with the actors."""


class ParallelRolloutRunner(DistributedRolloutRunner):
    """Distribute the episodes over several processes of this machine.

    :param n_episodes: Number of episodes in total.
    :param max_episode_steps: Steps after which an episode is truncated; 0: never.
    :param n_processes: Number of processes.
    :param record_trajectory: Store each episode's trajectory in `trajectory_data`.
    :param record_event_logs: Store all events in `event_logs`.
    :param rest: Further arguments of :class:`~maze.core.rollout.rollout_runner.RolloutRunner`.
    """

    def __init__(
        self,
        n_episodes: int,
        max_episode_steps: int,
        n_processes: int,
        record_trajectory: bool,
        record_event_logs: bool,
        **rest: Any,
    ) -> None:
        super().__init__(n_episodes, max_episode_steps, record_trajectory, record_event_logs, **rest)
        self.n_processes = whole_number("runner.n_processes", n_processes, at_least=1)

    @override(DistributedRolloutRunner)
    def _pool(self) -> AbstractContextManager[TaskPool]:
        n_processes = min(self.n_processes, self.n_episodes)
        modules = [__name__, *{"torch"}.intersection(sys.modules)]
        method = quick_start_method()
        return closing(ProcessPool(n_processes, method, modules=modules, noun="rollout worker", item=_episodes))


def _episodes(arguments: tuple[Any, ...]) -> str:
    first, seeds = arguments
    return f" of episode {first}" if len(seeds) == 1 else f" of episodes {first} to {first + len(seeds) - 1}"
