"""Rollouts in several processes at once."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import traceback
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import cloudpickle

from maze.console.runs import Progress
from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.errors import EnvironmentFailedError, MazeError, WorkerError
from maze.core.rollout.recording import EpisodeRecorder, EpisodeStatsReport, RolloutReport, recorded
from maze.core.rollout.rollout_runner import EpisodeSeeds, RolloutRunner
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import TARGET_KEY, CollectionOfConfigType, ConfigType
from maze.core.utils.import_guard import ImportGuard, current_guard, imports_guarded
from maze.core.utils.pickling import pickled
from maze.core.utils.targets import locate
from maze.utils.process import become_worker, end, exit_text

__all__ = ["EpisodeRecorder", "EpisodeStatsReport", "ParallelRolloutRunner", "ParallelRolloutWorker"]

CLOSE_TIMEOUT = 2.0
"""Seconds a worker gets to leave before it is killed."""


class ReportingQueue(Protocol):
    """Takes the reports of a worker."""

    def put(self, item: Any) -> None: ...


@dataclass(frozen=True)
class WorkerFailure:
    """The exception that ended a worker, in a form that survives the way between processes."""

    description: str
    maze_error: MazeError | None
    """The exception itself, where it is an error of ours that says all there is to say."""

    @classmethod
    def of(cls, error: BaseException) -> WorkerFailure:
        lines = "".join(traceback.format_exception(error)).rstrip()
        is_plain = (
            isinstance(error, MazeError)
            and not isinstance(error, EnvironmentFailedError)  # its traceback is what helps
            and error.args == (str(error),)
        )
        return cls(lines, type(error)(str(error)) if is_plain else None)  # type: ignore[arg-type]


class ParallelRolloutWorker:
    """What runs in each worker process."""

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
        episode_seeds: EpisodeSeeds | None = None,
        record_actions: bool = False,
        env_timeout: float | None = None,
        record_parquet: bool = False,
        best_of: int = 1,
    ) -> None:
        """Runs episodes and reports each as an :class:`EpisodeStatsReport`; a failure as a :class:`WorkerFailure`.

        :param episode_seeds: Seeds of each episode, instead of one pair of seeds for all of them.
        :param best_of: How often each of these is played before it is recorded as it went best.
        """
        try:
            env, agent = RolloutRunner.init_env_and_agent(
                env_config,
                wrapper_config,
                max_episode_steps,
                agent_config,
                input_directory,
                env_instance_seed,
                agent_instance_seed,
                env_timeout,
            )
            recording = (record_trajectory, record_event_logs, record_actions, False, record_parquet)
            play_recorded(env, agent, n_episodes, reporting_queue.put, recording, deterministic, episode_seeds, best_of)
        except (
            BaseException
        ) as error:  # signals are left to the parent: whatever comes is the environment's or the agent's
            reporting_queue.put(WorkerFailure.of(error))


def play_recorded(
    env: Any,
    agent: Policy,
    n_episodes: int,
    report: Callable[[EpisodeStatsReport], None],
    recording: Sequence[bool],
    deterministic: bool,
    episode_seeds: EpisodeSeeds | None,
    best_of: int = 1,
) -> None:
    """Runs episodes and reports each, in the process that they were given to.

    :param report: Takes the report of each episode when it ends.
    :param recording: Whether trajectories, event logs, actions, pages and tables are recorded.
    :param episode_seeds: Seeds of each episode; `None`: the generators go on.
    :param best_of: How often each of these is played before it is recorded as it went best.
    """
    if episode_seeds is not None:
        episode_seeds = RolloutRunner.best_seeds(env, agent, episode_seeds, best_of)
    with recorded(env, *recording) as (recorded_env, recorder):
        RolloutRunner.run_interaction_loop(
            recorded_env,
            agent,
            n_episodes,
            episode_end_callback=lambda: report(recorder.get_last_episode_data()),
            episode_seeds=episode_seeds,
            deterministic=deterministic,
        )


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


@dataclass
class _Worker:
    """The parent's view of a worker process."""

    index: int
    process: BaseProcess
    connection: Connection
    episodes: Sequence[int]
    """Numbers of the episodes it runs, in their order."""
    n_reported: int = 0

    @property
    def is_done(self) -> bool:
        return self.n_reported == len(self.episodes)

    def receive(self) -> tuple[int, EpisodeStatsReport]:
        """The next report and the number of its episode; a worker that failed or died raises."""
        try:
            report = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error
        if isinstance(report, WorkerFailure):
            if report.maze_error is not None:
                raise report.maze_error
            raise WorkerError(f"{self._name()} failed in {self._place()}:\n{report.description}")
        episode = self.episodes[self.n_reported]
        self.n_reported += 1
        return episode, report

    def _death(self) -> WorkerError:
        self.process.join(CLOSE_TIMEOUT)
        code = self.process.exitcode
        hint = " Out of memory, perhaps: try fewer runner.n_processes." if code == -signal.SIGKILL else ""
        return WorkerError(f"{self._name()} {exit_text(code)} in {self._place()}.{hint}")

    def _name(self) -> str:
        return f"Rollout worker {self.index} (pid {self.process.pid})"

    def _place(self) -> str:
        episode = self.episodes[min(self.n_reported, len(self.episodes) - 1)]
        return f"episode {episode} ({self.n_reported} of its {len(self.episodes)} episodes were finished)"


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
        workers = self._start_workers(env, wrappers, agent)
        try:
            yield _reports(workers)
        finally:
            _close(workers)

    def _start_workers(self, env: ConfigType, wrappers: CollectionOfConfigType, agent: ConfigType) -> list[_Worker]:
        seeds = self.draw_episode_seeds()
        context = _start_context(env, wrappers, agent)
        n_workers = min(self.n_processes, self.n_episodes)
        workers: list[_Worker] = []
        try:
            for index in range(n_workers):
                episodes = range(index, self.n_episodes, n_workers)
                arguments = {
                    "env_config": env,
                    "wrapper_config": wrappers,
                    "agent_config": agent,
                    "n_episodes": len(episodes),
                    "max_episode_steps": self.max_episode_steps,
                    "record_trajectory": self.record_trajectory,
                    "input_directory": self.input_dir,
                    "env_instance_seed": None,
                    "agent_instance_seed": None,
                    "record_event_logs": self.record_event_logs,
                    "deterministic": self.deterministic,
                    "record_actions": self.record_actions,
                    "record_parquet": self.record_parquet,
                    "env_timeout": self.env_timeout,
                    "best_of": self.best_of,
                    "episode_seeds": [seeds[episode] for episode in episodes],
                }
                workers.append(_start(context, index, episodes, arguments))
        except BaseException:
            _close(workers)
            raise
        return workers


def _reports(workers: list[_Worker]) -> Iterator[tuple[int, EpisodeStatsReport]]:
    """Numbers and reports of the episodes, as they end."""
    by_connection = {worker.connection: worker for worker in workers}
    while by_connection:
        for connection in wait(list(by_connection)):
            worker = by_connection[connection]  # type: ignore[index]
            yield worker.receive()
            if worker.is_done:
                del by_connection[worker.connection]


class _PipeQueue:
    """A pipe that looks like a queue. Unlike a shared queue, it cannot be left locked by a dying neighbour."""

    def __init__(self, connection: Connection) -> None:
        self.put = connection.send


def _start_context(*configs: Any) -> BaseContext:
    """Forking is a matter of milliseconds and takes any object along, but it is not safe beside other threads."""
    can_fork = sys.platform == "linux" and threading.active_count() == 1
    if not can_fork:
        return multiprocessing.get_context("spawn")
    for config in configs:
        _import_target(config)
    return multiprocessing.get_context("fork")


def _import_target(config: Any) -> None:
    """Imports what a configuration names, once for all workers."""
    target = config.get(TARGET_KEY) if isinstance(config, Mapping) else None
    if isinstance(target, str):
        # A worker reports the same error, together with the configuration key.
        with suppress(Exception):
            locate(target)


def _start(context: BaseContext, index: int, episodes: Sequence[int], arguments: dict[str, Any]) -> _Worker:
    receiver, sender = context.Pipe(duplex=False)
    if context.get_start_method() == "fork":
        payload: Any = arguments
    else:
        payload = pickled(arguments, "Environment or agent: it")
    process = context.Process(target=_work, args=(index, payload, sender, current_guard()))  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        # Python counts the idle threads of numerical libraries, which survive a fork well.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        process.start()
    sender.close()
    return _Worker(index, process, receiver, episodes)


def _work(index: int, payload: Any, sender: Connection, guard: ImportGuard | None) -> None:
    become_worker()
    if index > 0:
        warnings.simplefilter("ignore")  # the first worker says it for all of them
    with imports_guarded(guard):
        arguments = cloudpickle.loads(payload) if isinstance(payload, bytes) else payload
        ParallelRolloutWorker.run(reporting_queue=_PipeQueue(sender), **arguments)


def _close(workers: list[_Worker]) -> None:
    """Ends all workers, whatever state they are in."""
    for worker in workers:
        if not worker.is_done:
            worker.process.kill()
    for worker in workers:
        end(worker.process, CLOSE_TIMEOUT)
        worker.connection.close()
