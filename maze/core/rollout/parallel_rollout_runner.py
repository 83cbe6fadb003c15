"""Rollouts in several processes at once."""

from __future__ import annotations

import sys
import threading
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

from maze.console.runs import Progress
from maze.core.annotations import override
from maze.core.errors import MazeError, WorkerError
from maze.core.rollout.recording import EpisodeRecorder, EpisodeStatsReport, RolloutReport, recorded
from maze.core.rollout.rollout_runner import EpisodeSeeds, RolloutRunner
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import TARGET_KEY, CollectionOfConfigType, ConfigType
from maze.core.utils.targets import locate
from maze.core.utils.worker_pool import Worker, WorkerPool
from maze.core.utils.worker_process import Host, failure_of

__all__ = ["EpisodeRecorder", "EpisodeStatsReport", "ParallelRolloutRunner", "ParallelRolloutWorker"]


class ReportingQueue(Protocol):
    """Takes the reports of a worker."""

    def put(self, item: Any) -> None: ...


class ParallelRolloutWorker(Host):
    """Plays episodes where it is: in a worker process, or in an actor of Ray.

    :param what: Environment, wrappers, steps after which episodes are cut off, and agent.
    :param run: The directory of the run that the agent is from.
    :param recording: Whether trajectories, event logs, actions, pages and tables are recorded.
    :param deterministic: Take the most probable actions instead of drawing them.
    :param env_timeout: Seconds that a step or a reset may take; `None`: any time.
    :param best_of: How often each episode is played before it is recorded as it went best.
    :param instance_seeds: Seeds of environment and agent, where episodes have none of their own.
    :param is_quiet: Whether warnings are suppressed: another worker issues them.
    """

    def __init__(
        self,
        what: tuple[ConfigType, CollectionOfConfigType, int, ConfigType],
        run: str,
        recording: tuple[bool, bool, bool, bool, bool],
        deterministic: bool,
        env_timeout: float | None = None,
        best_of: int = 1,
        instance_seeds: tuple[int | None, int | None] = (None, None),
        is_quiet: bool = False,
    ) -> None:
        self.what, self.run_directory, self.recording, self.deterministic = what, run, recording, deterministic
        self.env_timeout, self.best_of, self.instance_seeds = env_timeout, best_of, instance_seeds
        self.is_quiet = is_quiet
        self._env: Any = None

    @override(Host)
    def open(self) -> None:
        if self.is_quiet:
            warnings.simplefilter("ignore")
        self._env, self._agent = RolloutRunner.init_env_and_agent(
            *self.what, self.run_directory, *self.instance_seeds, self.env_timeout
        )

    @override(Host)
    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def play(self, n_episodes: int, seeds: EpisodeSeeds | None) -> None:
        """Play episodes, and report each as an :class:`EpisodeStatsReport` when it ends.

        :param n_episodes: Number of episodes.
        :param seeds: Seeds of each episode; `None`: the generators go on.
        """
        if seeds is not None:
            seeds = RolloutRunner.best_seeds(self._env, self._agent, seeds, self.best_of)
        with recorded(self._env, *self.recording) as (recorded_env, recorder):
            RolloutRunner.run_interaction_loop(
                recorded_env,
                self._agent,
                n_episodes,
                episode_end_callback=lambda: self.report(recorder.get_last_episode_data()),
                episode_seeds=seeds,
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
        reporting_queue: ReportingQueue,
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
            worker.play(n_episodes, None)
        except BaseException as error:  # signals are left to the parent: the error is the environment's or the agent's
            reporting_queue.put(failure_of(error, None))


class DistributedRolloutRunner(RolloutRunner):
    """Runs the episodes in other processes, and reports them in their order, whoever is faster."""

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
        """Context in which the episodes are played: their numbers and reports, as they end."""

    def _worker(self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType) -> dict[str, Any]:
        """The arguments of a :class:`ParallelRolloutWorker`."""
        return {
            "what": (env, wrappers, self.max_episode_steps, agent),
            "run": self.input_dir,
            "recording": (
                *(self.record_trajectory, self.record_event_logs, self.record_actions),
                *(False, self.record_parquet),
            ),
            "deterministic": self.deterministic,
            "env_timeout": self.env_timeout,
            "best_of": self.best_of,
        }


class ParallelRolloutRunner(DistributedRolloutRunner):
    """Distributes the episodes over several processes of this machine."""

    def __init__(
        self,
        n_episodes: int,
        max_episode_steps: int,
        n_processes: int,
        record_trajectory: bool,
        record_event_logs: bool,
        deterministic: bool = False,
        record_actions: bool = False,
        env_timeout: float | None = None,
        record_parquet: bool = False,
        best_of: int = 1,
    ) -> None:
        super().__init__(
            n_episodes,
            max_episode_steps,
            record_trajectory,
            record_event_logs,
            deterministic,
            record_actions,
            env_timeout,
            record_parquet,
            best_of,
        )
        self.n_processes = whole_number("runner.n_processes", n_processes, at_least=1)

    @contextmanager
    @override(DistributedRolloutRunner)
    def _played(
        self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType
    ) -> Iterator[Iterator[tuple[int, EpisodeStatsReport]]]:
        seeds = self.draw_episode_seeds()
        n_workers = min(self.n_processes, self.n_episodes)
        arguments = self._worker(env, wrappers, agent)
        hosts = [ParallelRolloutWorker(**arguments, is_quiet=index > 0) for index in range(n_workers)]
        pool = _RolloutPool(hosts, [seeds[index::n_workers] for index in range(n_workers)], env, wrappers, agent)
        try:
            yield pool.episodes()
        finally:
            pool.close()


class _RolloutPool(WorkerPool):
    """Worker processes that play every n-th episode each.

    :param hosts: What they serve.
    :param seeds: Seeds of the episodes of each.
    :param configs: What they build.
    """

    self_explanatory = (MazeError,)

    def __init__(self, hosts: list[ParallelRolloutWorker], seeds: list[EpisodeSeeds], *configs: Any) -> None:
        self._seeds = seeds
        self._n_reported = [0] * len(hosts)
        rows = [slice(index, index + 1) for index in range(len(hosts))]
        super().__init__(hosts, rows, _start_method(*configs))

    def episodes(self) -> Iterator[tuple[int, EpisodeStatsReport]]:
        """Numbers and reports of the episodes, as they end."""
        self.gather("start")
        for worker, seeds in zip(self.workers, self._seeds, strict=True):
            self.tell(worker, "play", len(seeds), seeds)
        while sum(self._n_reported) < sum(map(len, self._seeds)):
            for worker, report in self.reports(wait=True):
                episode = self._episode(worker)
                self._n_reported[worker.index] += 1
                yield episode, report

    def _episode(self, worker: Worker) -> int:
        n_workers = len(self._seeds)
        n_before = min(self._n_reported[worker.index], len(self._seeds[worker.index]) - 1)
        return worker.index + n_workers * n_before

    @override(WorkerPool)
    def error(self, what: str, worker: Worker, call: str, **details: Any) -> WorkerError:
        index, trace = worker.index, details.get("worker_traceback")
        done = f"{self._n_reported[index]} of its {len(self._seeds[index])} episodes were finished"
        what = f"{'failed' if trace else what} in episode {self._episode(worker)} ({done})"
        text = f"Rollout worker {index} (pid {worker.process.pid}) {what}"
        return WorkerError(f"{text}:\n{trace}" if trace else f"{text}. {details.get('advice', '')}".rstrip())


def _start_method(*configs: Any) -> str:
    """Forking takes milliseconds and takes any object along, but it is not safe beside other threads."""
    can_fork = sys.platform == "linux" and threading.active_count() == 1
    if not can_fork:
        return "spawn"
    for config in configs:
        target = config.get(TARGET_KEY) if isinstance(config, Mapping) else None
        if isinstance(target, str):  # imported once for all workers, which report errors with the configuration key
            with suppress(Exception):
                locate(target)
    return "fork"
