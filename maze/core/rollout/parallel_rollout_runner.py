"""Rollouts in several processes at once."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any

from maze.console.runs import Progress
from maze.core.annotations import override
from maze.core.rollout.recording import EpisodeRecorder, EpisodeStatsReport, RolloutReport, recorded
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.rollout.solve import NO_SEARCH, EpisodeSeeds, Search
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import TARGET_KEY, CollectionOfConfigType, ConfigType
from maze.core.utils.import_guard import ImportGuard, current_guard, imports_guarded
from maze.core.utils.targets import locate
from maze.core.utils.worker_pool import ShareWorkers
from maze.core.utils.worker_process import Host, failure_of

__all__ = ["EpisodeRecorder", "EpisodeStatsReport", "ParallelRolloutRunner", "ParallelRolloutWorker"]


class ParallelRolloutWorker(Host):
    """Play episodes in the process that it is in: a worker process, or an actor of Ray.

    :param what: Environment, wrappers, steps after which episodes are truncated, and agent.
    :param run: The directory of the run that the agent is from.
    :param recording: Whether trajectories, event logs, actions, pages and tables are recorded.
    :param deterministic: Return deterministic (greedy) actions instead of sampling.
    :param env_timeout: Seconds that a step or a reset may take; `None`: any time.
    :param search: What is tried before each episode is recorded.
    :param instance_seeds: Seeds of environment and agent, where episodes have none of their own.
    :param seeds: Seeds of the episodes that :meth:`play` plays by default.
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
        seeds: EpisodeSeeds = (),
        is_quiet: bool = False,
        guard: ImportGuard | None = None,
    ) -> None:
        self.what, self.run_directory, self.recording, self.deterministic = what, run, recording, deterministic
        self.env_timeout, self.search, self.instance_seeds = env_timeout, search, instance_seeds
        self.seeds, self.is_quiet, self.guard = seeds, is_quiet, guard
        self._env: Any = None

    @override(Host)
    def open(self) -> None:
        if self.is_quiet:
            warnings.simplefilter("ignore")
        with imports_guarded(self.guard):
            self._env, self._agent = RolloutRunner.init_env_and_agent(
                *self.what, self.run_directory, *self.instance_seeds, self.env_timeout
            )

    @override(Host)
    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def play(self, n_unseeded: int = 0) -> None:
        """Play the episodes, and report each as an :class:`EpisodeStatsReport` when it ends.

        :param n_unseeded: Number of episodes without seeds of their own; the generators continue.
        """
        agent, seeds = RolloutRunner.best_plays(self._env, self._agent, self.seeds, self.search)
        guarded, recording = imports_guarded(self.guard), recorded(self._env, *self.recording)
        with guarded, recording as (recorded_env, recorder):
            RolloutRunner.run_interaction_loop(
                recorded_env,
                agent,
                n_unseeded or len(seeds),
                episode_end_callback=lambda: self.report(recorder.get_last_episode_data()),
                episode_seeds=None if n_unseeded else seeds,
                deterministic=self.deterministic,
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
        """Run episodes here and report each as an :class:`EpisodeStatsReport`; a failure as a
        :class:`~maze.core.utils.worker_process.Failure`."""
        worker = ParallelRolloutWorker(
            (env_config, wrapper_config, max_episode_steps, agent_config),
            input_directory,
            (record_trajectory, record_event_logs, False, False, False),
            deterministic,
            instance_seeds=(env_instance_seed, agent_instance_seed),
        )
        worker.report = reporting_queue.put
        try:
            worker.open()
            worker.play(n_episodes)
        except BaseException as error:  # signals are left to the parent: the error is the environment's or the agent's
            reporting_queue.put(failure_of(error))


class DistributedRolloutRunner(RolloutRunner):
    """Run the episodes in other processes and report them in the order of their numbers."""

    @override(RolloutRunner)
    def run_with(self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType) -> None:
        self._announce(agent)
        report = RolloutReport(self.record_event_logs, self._cfg, self.max_episode_steps)
        with self._played(env, wrappers, agent) as episodes, Progress(self.n_episodes, "Rollouts") as progress:
            for number, episode in episodes:
                report.add_as(number, episode)
                progress.update()
        self.stats, self.n_cut_off = report.publish(), report.n_cut_off

    @abstractmethod
    def _played(
        self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType
    ) -> AbstractContextManager[Iterator[tuple[int, EpisodeStatsReport]]]:
        """Return a context in which the episodes are played: their numbers and reports, as they end."""

    def _worker(self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType) -> dict[str, Any]:
        """Return the arguments of a :class:`ParallelRolloutWorker`."""
        return {
            "what": (env, wrappers, self.max_episode_steps, agent),
            "run": self.input_dir,
            "recording": (
                *(self.record_trajectory, self.record_event_logs, self.record_actions),
                *(False, self.record_parquet),
            ),
            "deterministic": self.deterministic,
            "env_timeout": self.env_timeout,
            "search": self.search,
            "guard": current_guard(),
        }


class ParallelRolloutRunner(DistributedRolloutRunner):
    """Distribute the episodes over several processes of this machine.

    :param n_episodes: Number of episodes in total.
    :param max_episode_steps: Steps after which an episode is cut off; 0: never.
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

    @contextmanager
    @override(DistributedRolloutRunner)
    def _played(
        self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType
    ) -> Iterator[Iterator[tuple[int, EpisodeStatsReport]]]:
        seeds = self.draw_episode_seeds(env)
        n_workers = min(self.n_processes, self.n_episodes)
        arguments = self._worker(env, wrappers, agent)
        hosts = [
            ParallelRolloutWorker(**arguments, seeds=seeds[index::n_workers], is_quiet=index > 0)
            for index in range(n_workers)
        ]
        for config in (env, wrappers, agent):
            target = config.get(TARGET_KEY) if isinstance(config, Mapping) else None
            if isinstance(target, str):  # imported once for all forked workers, which report errors
                with suppress(Exception):
                    locate(target)
        with closing(
            ShareWorkers("Rollout worker", hosts, self.n_episodes, lambda number: f"in episode {number}")
        ) as workers:
            yield workers.results("play")
