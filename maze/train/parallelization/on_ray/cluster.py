"""Ray clusters: the connection for the duration of a run, and pools of actors with calls, failures and replacements."""

from __future__ import annotations

import logging
import math
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from maze.core.annotations import override
from maze.core.errors import ConfigError, MazeError, WorkerError, first_line, optional_package
from maze.core.log_stats.log_stats import LogStatsAggregator
from maze.core.utils import worker_process
from maze.core.utils.update_profile import TRANSFER, WAITING, timed
from maze.core.utils.worker_pool import ClusterEvents, Maker, Task, TaskPool
from maze.core.utils.worker_process import failure_of, pickled
from maze.utils.exception_report import ExceptionReport
from maze.utils.process import handlers_kept, use_one_thread

logger = logging.getLogger(__name__)

# -- connection ------------------------------------------------------------------------------------

_ADDRESS, _LOCAL, _PATH = "RAY_ADDRESS", "local", "PYTHONPATH"
_CONNECT_SECONDS = 5.0
# Seconds between two checks of the head node of a cluster.
_HEAD_SECONDS = 5.0
# Number of consecutive failed checks after which the head node counts as lost.
_HEAD_FAILURES = 3
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # send no usage statistics
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


@contextmanager
def ray_session(
    ray_config: Mapping[str, Any] | None, n_cpus: float, log_level: str = "WARN", key: str = "runner.ray_config"
) -> Iterator[None]:
    """Return a context in which Ray runs: this process' instance, the cluster of an address, or a local instance.

    A cluster is joined only if its address is given, here or in the environment variable RAY_ADDRESS. On exit, only
    what this context has started is shut down.

    :param ray_config: Arguments of `ray.init`, such as `address`, `num_cpus` or `object_store_memory`.
    :param n_cpus: Number of CPUs needed; a local instance offers at least this number, whatever the machine has.
    :param log_level: Level of the loggers of Ray and RLlib.
    :param key: Configuration key of the arguments, for messages.
    :raises ConfigError: Ray cannot be reached, or an argument is wrong.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield
        return
    config = {name: value for name, value in (ray_config or {}).items() if value is not None}
    address = config.get("address") or os.environ.get(_ADDRESS) or _LOCAL
    level = "WARNING" if log_level == "WARN" else log_level
    os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
    logging.getLogger("ray").setLevel(level)
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    # the traceback of a failed worker is in its output only
    arguments: dict[str, Any] = {"logging_level": getattr(logging, level, logging.WARNING), "log_to_driver": True}
    if address == _LOCAL:
        arguments.update(include_dashboard=False, num_cpus=max(os.cpu_count() or 1, math.ceil(n_cpus)))
    _check_address(address, key)
    path_before = os.environ.get(_PATH)
    # workers of a local instance import the user's modules as well
    os.environ[_PATH] = os.pathsep.join(filter(None, sys.path))
    try:
        with handlers_kept():  # Ray ends the process at SIGTERM; a run has to save its state first
            ray.init(**{**arguments, **config, "address": address})
    except Exception as error:  # a node that does not start in time is a plain Exception
        advice = "Check the arguments of `ray.init` and the memory of this machine."
        if address != _LOCAL:
            advice = (
                "Is the cluster running (`ray status`), and does this machine reach it? All machines of a cluster need "
                "the same versions of Python, Ray and Maze. A cluster that was started with a token requires it: set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or the file ~/.ray/auth_token."
            )
        raise ConfigError(_unreachable(error, address, key, advice)) from error
    finally:
        os.environ.pop(_PATH)
        os.environ.update({} if path_before is None else {_PATH: path_before})
    ended = threading.Event()
    if address != _LOCAL:
        gcs = str(ray.get_runtime_context().gcs_address)
        threading.Thread(target=_watch_head, args=(gcs, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        ray.shutdown()


def _check_address(address: str, key: str) -> None:
    """Raise an error unless the address accepts connections; only for addresses with host and port."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"{key}: {address} is an address of Ray Client, which makes calls 7 to 12 times slower. Start the run on "
            "a machine of the cluster (as a job: `ray job submit -- maze-run ...`) with `auto` or <host>:<port> "
            "instead."
        )
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            _connect(address)  # Ray itself would retry for a minute
        except OSError as error:
            advice = "`ray start --head` prints the address of its cluster, usually with port 6379."
            raise ConfigError(_unreachable(error, address, key, f"No server listens there: {advice}")) from error


def _watch_head(address: str, ended: threading.Event) -> None:
    """Terminate the run properly if the head node is lost: Ray would end this process after a minute, unlogged."""
    n_failures = 0
    while n_failures < _HEAD_FAILURES:
        if ended.wait(_HEAD_SECONDS):
            return
        try:
            _connect(address)
            n_failures = 0
        except OSError:
            n_failures += 1
    logger.error(
        "The head node of the Ray cluster at %s does not respond. The run saves its state and ends after the current "
        "update. Resume it with input_dir=<its directory> resume=true.",
        address,
    )
    os.kill(os.getpid(), signal.SIGTERM)


def _unreachable(error: Exception, address: str, key: str, advice: str) -> str:
    return f"{key}: Ray at {address} could not be reached: {' '.join(str(error).split())}. {advice}"


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()


def n_cpus() -> float:
    """Return the number of CPUs of the cluster."""
    return float(require_ray().cluster_resources().get("CPU", 0.0))


def require_cpus(n_needed: float, what: str, advice: str) -> None:
    """Check the number of CPUs of the cluster: Ray itself would wait forever.

    :param n_needed: Number of CPUs needed.
    :param what: The processes that need them, for the message.
    :param advice: Remedy that uses fewer CPUs, for the message.
    :raises ConfigError: The cluster has fewer CPUs.
    """
    if n_needed > n_cpus():
        raise ConfigError(f"{what} need {n_needed:g} CPUs, but the Ray cluster has {n_cpus():g}. {advice}")


def require_ray() -> Any:
    """Return the package `ray`, which is installed with an extra.

    :raises ConfigError: Ray is not installed.
    """
    return optional_package("ray", "ray", "Ray is not installed")


# -- pool of actors --------------------------------------------------------------------------------

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
        if isinstance(failure := self.hosted[name], ExceptionReport):
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

        :raises ConfigError: They have waited longer than the limit.
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
        if isinstance(answer, ExceptionReport):
            cause, where = answer.original, f" in {answer.place}" if answer.place else ""
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
