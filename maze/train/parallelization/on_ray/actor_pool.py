"""Pool of Ray actors: start, calls, failures and replacement of lost actors."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from maze.core.annotations import override
from maze.core.errors import ConfigError, MazeError, WorkerError, first_line
from maze.core.log_stats.log_stats import LogStatsAggregator
from maze.core.utils import worker_process
from maze.core.utils.update_profile import TRANSFER, WAITING, timed
from maze.core.utils.worker_pool import ClusterEvents, Maker, Task, TaskPool
from maze.core.utils.worker_process import Failure, exception_of, failure_of, pickled
from maze.train.parallelization.on_ray.session import n_cpus, require_ray
from maze.utils.process import use_one_thread

logger = logging.getLogger(__name__)

# Seconds after which unresponsive actors are logged, and between two checks for new machines.
_WAIT_LOG_SECONDS = 10.0
# Seconds between two queries of the resources of the cluster.
_SAMPLE_SECONDS = 1.0
_CLOSE_SECONDS = 2.0
LONGEST_PAUSE = 30.0
"""Maximum number of seconds before a replacement."""


class Host(worker_process.Host):
    """The remote class of the actors. Failures are results. Ray lists its processes as `ray::Host`."""

    def __init__(self) -> None:
        super().__init__()
        use_one_thread()

    def describe(self) -> dict[str, Any]:
        """Return process id and node."""
        node_id = require_ray().get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "node": f"{platform.node()}/{node_id[:6]}"}

    @override(worker_process.Host)
    def host(self, name: str, maker: bytes, *fd: int) -> None:
        """Make an object; if that fails, its calls return the failure."""
        if name in self.hosted:
            self.hosted.pop(name).close()
        try:
            super().host(name, maker, *fd)
        except BaseException as error:
            self.hosted[name] = failure_of(error)

    @override(worker_process.Host)
    def call(self, name: str, method: str, *arguments: Any) -> Any:
        if isinstance(failure := self.hosted[name], Failure):
            return failure
        try:
            return super().call(name, method, *arguments)
        except BaseException as error:  # SystemExit of an environment included: the driver receives every failure
            return failure_of(error)


@dataclass
class ActorLimits:
    """Resources, time limits and number of replacements of actors; see `OnRay`."""

    cpus_per_actor: int = 1
    max_restarts: int = 3
    restart_pause: float = 1.0
    start_timeout: float = 120.0
    max_actors: int = 0


@dataclass(eq=False)
class _Actor:
    handle: Any = None
    description: Any = None
    """Reference to the result of :meth:`Host.describe`; `None`: it was read."""
    requested_at: float = 0.0
    name: str = ""
    node: str = ""
    n_starts: int = 0
    n_failures: int = 0
    """Number of consecutive failures."""
    is_away: bool = False
    """The actor had joined later and is lost; other actors run its calls."""


class ActorPool(TaskPool):
    """Actors that host the same objects.

    A lost actor is replaced by a new one and its calls are repeated. The same holds for an actor whose environment
    failed. Errors that a repetition does not change are raised. The owner of a pool has to close it, also after
    :meth:`grow` failed.

    :param limits: Resources, time limits and number of replacements.
    """

    n_ahead = 2  # one in progress and one queued

    def __init__(self, limits: ActorLimits) -> None:
        super().__init__()
        self._ray = require_ray()
        self._limits = limits
        # Maker of each hosted object, and the number of actors that host it; `None`: all actors, also later ones.
        self._makers: dict[str, tuple[Maker, int | None]] = {}
        self._lock = threading.RLock()
        self._actors: list[_Actor] = []
        self.n_first = 0
        self._joining: list[_Actor] = []  # requested, not started yet
        self._next_check = 0.0
        self._is_closed = threading.Event()
        # All resources of the cluster, and its free resources.
        self._resources: tuple[dict[str, float], dict[str, float]] = {}, {}
        self._sampling = threading.Thread(target=self._sample_resources, daemon=True)
        self._sampling.start()

    def grow(self, n_actors: int) -> None:
        """Start actors up to a number and wait for them.

        :param n_actors: Number of actors.
        :raises ConfigError: The cluster has too few resources.
        """
        new = [_Actor() for _ in range(n_actors - len(self._actors))]
        self._actors += new
        self.n_first = len(self._actors)
        for actor in new:
            self._start(actor)
        while waiting := {actor.description: actor for actor in new if actor.description is not None}:
            for ref in self._ready(list(waiting), len(waiting), _WAIT_LOG_SECONDS):
                self._finish_start(self._actors.index(waiting[ref]))
            self._log_not_started(new)

    @property
    @override(TaskPool)
    def n_actors(self) -> int:
        return len(self._actors)

    @property
    @override(TaskPool)
    def n_there(self) -> int:
        return sum(not actor.is_away for actor in self._actors)

    @override(TaskPool)
    def host(self, name: str, maker: Maker, n_hosts: int | None = None, fd: int | None = None) -> None:
        self._makers[name] = maker, n_hosts
        for index in range(self.n_actors):
            self._host(index, [name])

    @override(TaskPool)
    @timed(TRANSFER)
    def put(self, value: Any) -> Any:
        return self._ray.put(value)

    @override(TaskPool)
    def submit(self, actor: int, name: str, method: str, *arguments: Any) -> Task:
        task = Task(actor, name, method, arguments)
        with self._lock:
            self._under_way.add(task)
            self._send(task)
        return task

    @override(TaskPool)
    def finished(self, tasks: Sequence[Task], n_wanted: int = 1, wait: bool = True) -> list[Task]:
        done: list[Task] = []
        since = time.monotonic()
        while (n_missing := min(n_wanted, len(tasks)) - len(done)) > 0:
            by_ref = {task.ref: task for task in tasks if task not in done}
            ready = self._ready(list(by_ref), n_missing, _WAIT_LOG_SECONDS if wait else 0)
            done += [by_ref[ref] for ref in ready if self._take(by_ref[ref])]
            if not ready and not wait:
                break
            if not ready:
                indices = sorted({task.host for task in by_ref.values()})
                self._log_not_started([self._actors[index] for index in indices])
                seconds = time.monotonic() - since
                logger.info("Waiting for `%s` of actors %s since %.0f s.", tasks[0].method, indices, seconds)
        return [task for task in tasks if task in done]

    @override(TaskPool)
    def join_new(self) -> None:
        """Add actors, up to `max_actors`, if machines have joined the cluster; checks every few seconds."""
        for actor in [actor for actor in self._joining if self._ready([actor.description], 1, 0)]:
            self._joining.remove(actor)
            self._add_joined(actor)
        away = sum(actor.is_away for actor in self._actors)
        n_more = self._limits.max_actors - self.n_actors + away - len(self._joining)
        if n_more <= 0 or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _WAIT_LOG_SECONDS
        if any(actor.description is not None for actor in self._actors):
            return  # replacements of lost actors come first
        free = self._resources[1].get("CPU", 0.0)
        for _ in range(min(n_more, int(free / self._limits.cpus_per_actor))):
            self._joining.append(_Actor())
            self._start(self._joining[-1])

    @override(TaskPool)
    def report_work(self, statistics: LogStatsAggregator) -> ClusterEvents:
        events = super().report_work(statistics)
        total, free = (of_kind.get("object_store_memory", 0.0) for of_kind in self._resources)
        events.object_store_megabytes(value=max(0.0, total - free) / 2**20)
        return events

    @override(TaskPool)
    def close(self) -> None:
        self._is_closed.set()
        self._sampling.join(1.0)  # its queries must not outlive Ray
        actors, self._actors, self._joining = [*self._actors, *self._joining], [], []
        if self._ray.is_initialized() and actors:
            with suppress(Exception):
                self._ready([actor.handle.close.remote() for actor in actors], len(actors), _CLOSE_SECONDS)
            for actor in actors:
                self._kill(actor)

    def _sample_resources(self) -> None:
        """Query the resources of the cluster in a thread: such calls block if the head node is lost."""
        while not self._is_closed.is_set():
            with suppress(Exception):  # Ray may be shut down
                self._resources = self._ray.cluster_resources(), self._ray.available_resources()
            self._is_closed.wait(_SAMPLE_SECONDS)

    @timed(WAITING)
    def _ready(self, refs: list[Any], n_wanted: int, timeout: float) -> list[Any]:
        with self._waiting():
            ready: list[Any] = self._ray.wait(refs, num_returns=n_wanted, timeout=timeout)[0]
        return ready

    @timed(TRANSFER)
    def _answer(self, ref: Any) -> Any:
        return self._ray.get(ref)

    # -- starting --------------------------------------------------------------------------------------

    def _start(self, actor: _Actor) -> None:
        host = self._ray.remote(num_cpus=self._limits.cpus_per_actor, max_restarts=0, max_task_retries=0)(Host)
        actor.handle, actor.requested_at = host.remote(), time.monotonic()
        actor.description = actor.handle.describe.remote()

    def _finish_start(self, index: int) -> None:
        """Read the description of a started actor."""
        try:
            self._read_description(self._actors[index], index)
        except self._ray.exceptions.RayError as error:
            self._replace(index, f"is lost ({first_line(error)})", "its start")

    def _read_description(self, actor: _Actor, index: int) -> None:
        found = self._answer(actor.description)
        actor.description, actor.node = None, found["node"]
        actor.name = f"{index} (pid {found['pid']} on {actor.node})"

    def _add_joined(self, actor: _Actor) -> None:
        """Add an actor that has joined, with its hosted objects."""
        indices = [index for index, other in enumerate(self._actors) if other.is_away]
        index = indices[0] if indices else self.n_actors
        try:
            self._read_description(actor, index)
        except self._ray.exceptions.RayError as error:
            logger.warning("An actor that has joined is not used: %s", first_line(error))
            self._kill(actor)
            return
        actor.n_starts = self._actors[index].n_starts if indices else 0
        self._actors[index : index + 1] = [actor]
        self._host(index, self._makers)
        logger.info("Actor %s has joined; the pool has %d actors.", actor.name, self.n_actors)

    def _log_not_started(self, actors: Sequence[_Actor]) -> None:
        """Log the number of actors that have not started yet.

        :raises ConfigError: They have been waiting too long.
        """
        requested = {actor.description: actor.requested_at for actor in actors if actor.description is not None}
        for ref in self._ready(list(requested), len(requested), 0) if requested else ():
            del requested[ref]
        if not requested:
            return
        free, timeout = self._ray.available_resources().get("CPU", 0.0), self._limits.start_timeout
        text = (
            f"{len(requested)} of {len(self._actors)} actors have not started yet; each needs "
            f"{self._limits.cpus_per_actor:g} CPUs, and the Ray cluster has {n_cpus():g} CPUs, of which {free:g} are "
            "free"
        )
        if time.monotonic() - min(requested.values()) > timeout:
            raise ConfigError(
                f"runner.env_groups: {text}. The limit is {timeout:g} seconds (runner.placement.start_timeout). Use "
                "fewer actors, or add machines."
            )
        logger.warning("%s.", text)

    def _host(self, index: int, names: Iterable[str]) -> None:
        """Have an actor make its hosted objects."""
        actor = self._actors[index]
        for name in names:
            make, n_hosts = self._makers[name]
            if n_hosts is None or index < n_hosts:
                actor.handle.host.remote(name, pickled(make(index, actor.n_starts), "env: it"))

    # -- failures --------------------------------------------------------------------------------------

    def _send(self, task: Task) -> None:
        task.host = task.actor % self.n_first if self._actors[task.actor].is_away else task.actor
        actor = self._actors[task.host]
        task.start = actor.n_starts
        task.ref = actor.handle.call.remote(task.name, task.method, *task.arguments)

    def _take(self, task: Task) -> bool:
        """Take the result of a task; False: the task was lost and is repeated."""
        try:
            answer = self._answer(task.ref)
        except self._ray.exceptions.RayTaskError as error:
            raise WorkerError(f"Actor {task.actor} failed during `{task.method}`: {error}") from error
        except self._ray.exceptions.RayError as error:
            self._recover(task, f"is lost ({first_line(error)})")
            return False
        if isinstance(answer, Failure):
            cause, where = exception_of(answer), f" in {answer.place}" if answer.place else ""
            if isinstance(cause, MazeError) and not where and not isinstance(cause, WorkerError):
                raise type(cause)(f"Actor {task.actor}: {cause}")
            if not where and not isinstance(cause, WorkerError):
                raise WorkerError(
                    f"Actor {task.actor} raised {answer.text} during `{task.method}`:\n{answer.traceback}"
                )
            # failures of environments and worker processes: another actor may succeed
            self._recover(task, f"failed{where}: {answer.text}", f"\n{answer.traceback}")
            return False
        actor = self._actors[task.host]
        if actor.description is not None:  # it has replaced a lost actor
            self._finish_start(task.host)
        actor.n_failures = 0
        self._completed(task, task.host, *answer)
        return True

    def _recover(self, task: Task, what: str, details: str = "") -> None:
        """Replace the actor of a task, unless that is done already, and repeat the task."""
        with self._lock:
            if task.start == self._actors[task.host].n_starts:
                self._replace(task.host, what, f"`{task.method}`", details)
            self._send(task)

    def _replace(self, index: int, what: str, during: str, details: str = "") -> None:
        actor = self._actors[index]
        actor.n_failures += 1
        if actor.n_failures > self._limits.max_restarts:
            raise WorkerError(
                f"Actor {index} {what} during {during}. This is consecutive failure {actor.n_failures}, more than "
                f"runner.placement.max_restarts={self._limits.max_restarts}.{details}"
            )
        logger.warning("Actor %s %s during %s; it is replaced.", actor.name or index, what, during)
        if actor.n_failures > 1:
            time.sleep(min(self._limits.restart_pause * 2 ** (actor.n_failures - 2), LONGEST_PAUSE))
        self._kill(actor)
        actor.name = str(index)
        self.n_restarts += 1
        actor.n_starts += 1
        if index >= self.n_first:  # it can join again
            actor.is_away = True
            return
        while self._joining:  # they might take the CPUs of the replacement
            self._kill(self._joining.pop())
        self._start(actor)
        self._host(index, self._makers)

    def _kill(self, actor: _Actor) -> None:
        with suppress(Exception):  # it may have ended
            self._ray.kill(actor.handle, no_restart=True)
