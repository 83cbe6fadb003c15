"""Actors of Ray that work for a training: starting them, asking them, and replacing those that vanish."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle

from maze.core.errors import ConfigError, MazeError, WorkerError
from maze.train.parallelization.on_ray.session import require_ray
from maze.train.parallelization.vector_env.channel import Failure, exception_of, failure_of

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0
"""After so long without an answer there is a word about who is waited for."""
_CLOSE_SECONDS = 2.0
LONGEST_PAUSE = 30.0
"""Seconds before a replacement, at most."""

Maker = Callable[[int], Callable[[], Any]]
"""From how often an actor was started before to what makes its subject there; all of it travels by value."""


class Host:
    """What an actor of Ray runs: objects that do the work, and calls of their methods."""

    def __init__(self) -> None:
        import sys

        self._subjects: dict[str, Any] = {}
        self._broken: dict[str, Failure] = {}
        if "torch" in sys.modules:  # several processes with several threads each get in one another's way
            sys.modules["torch"].set_num_threads(1)

    def describe(self) -> dict[str, Any]:
        """Where it is, and what has to be the same everywhere."""
        node_id = require_ray().get_runtime_context().get_node_id()
        return {"pid": os.getpid(), "node": f"{platform.node()}/{node_id[:6]}", **_versions()}

    def place(self, name: str, maker: bytes) -> None:
        """Makes a subject; calls of one that cannot be made say why."""
        if name in self._subjects:
            self._subjects.pop(name).close()
        try:
            self._subjects[name] = cloudpickle.loads(maker)()
        except BaseException as error:
            self._broken[name] = failure_of(error, None)

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Calls a method of a subject.

        :return: The result and the seconds that it took, or a :class:`Failure`.
        """
        if name in self._broken:
            return self._broken[name]
        start = time.perf_counter()
        try:
            result = getattr(self._subjects[name], method)(*arguments)
        except BaseException as error:  # SystemExit of an environment included: the driver hears of everything
            return failure_of(error, None)
        return result, time.perf_counter() - start

    def close(self) -> None:
        """Closes all subjects: they may hold processes."""
        for subject in self._subjects.values():
            with suppress(Exception):
                subject.close()
        self._subjects.clear()


@dataclass(eq=False)
class Task:
    """A call of an actor's method, which is repeated where the actor is lost."""

    actor: int
    name: str
    method: str
    arguments: tuple[Any, ...]
    ref: Any = None
    start: int = 0
    """The start of the actor that it was given to."""
    result: Any = None


@dataclass
class _Actor:
    handle: Any = None
    place: Any = None
    """Where it is, once it is anywhere; `None`: that is known already."""
    asked_at: float = 0.0
    name: str = ""
    node: str = ""
    n_starts: int = 0
    n_failures: int = 0
    """Failures in a row."""
    n_calls: int = 0
    busy: float = 0.0
    """Seconds that the calls took."""


class Work(NamedTuple):
    """What actors have done in some time."""

    n_restarts: int
    busy_share: float
    """Share of the time in which they worked, on average."""
    calls_per_second: list[float]
    by_node: dict[str, float]
    """Calls per second of the actors of each machine."""


class Crew:
    """A number of actors, each of which hosts the same subjects.

    An actor that vanishes, for whatever reason, is replaced by a new one, and what it was asked to do is asked again.
    An environment that fails is treated alike: its actor is replaced. Errors that say themselves that repeating is of
    no use are raised.

    :param cpus_per_actor: CPUs that each needs.
    :param max_restarts: How often in a row an actor is replaced without having completed anything in between.
    :param restart_pause: Seconds before the second replacement in a row, then twice as many each time, up to 30.
    :param start_timeout: Seconds that actors may wait for a place.
    """

    def __init__(
        self,
        cpus_per_actor: float = 1,
        max_restarts: int = 3,
        restart_pause: float = 1.0,
        start_timeout: float = 120.0,
    ) -> None:
        self._ray = require_ray()
        self._cpus_per_actor = cpus_per_actor
        self._max_restarts = max_restarts
        self._restart_pause = restart_pause
        self._start_timeout = start_timeout
        self._makers: dict[str, Sequence[Maker]] = {}
        self._lock = threading.RLock()
        self.n_restarts = 0
        """How often an actor was replaced."""
        self._actors: list[_Actor] = []
        self._since, self._n_reported = time.monotonic(), 0

    def grow(self, n_actors: int) -> None:
        """Waits for more actors, where there are fewer than that; who hosts what does not change.

        :param n_actors: Number of actors.
        :raises ConfigError: There is no place for them, or they have other versions of Python or Maze.
        """
        first = len(self._actors)
        self._actors += [_Actor() for _ in range(n_actors - first)]
        try:
            for actor in self._actors[first:]:
                self._start(actor)
            self._await_start(first)
        except BaseException:
            self.close()
            raise

    @property
    def n_actors(self) -> int:
        """Number of actors."""
        return len(self._actors)

    def place(self, name: str, makers: Sequence[Maker]) -> None:
        """Gives each of the first actors a subject.

        :param name: Its name in :meth:`submit`.
        :param makers: Makes it, for each of these actors.
        :raises ConfigError: It cannot be sent to other processes.
        """
        self._makers[name] = makers
        for index in range(len(makers)):
            self._place(index, name)

    def put(self, value: Any) -> Any:
        """Stores a value once for all who are given its reference; flat arrays are fastest."""
        return self._ray.put(value)

    def submit(self, actor: int, name: str, method: str, *arguments: Any) -> Task:
        """Asks an actor to call a method of a subject; references among the arguments arrive as their values."""
        task = Task(actor, name, method, arguments)
        with self._lock:
            self._send(task)
        return task

    def finished(self, tasks: Sequence[Task], n_wanted: int = 1, wait: bool = True) -> list[Task]:
        """The tasks that are done, in the order given; lost ones are repeated.

        :param tasks: The tasks.
        :param n_wanted: Number of tasks to wait for.
        :param wait: Whether to wait.
        :raises MazeError: A task failed in a way that repeating does not change, or too often.
        """
        done: list[Task] = []
        since = time.monotonic()
        while True:
            by_ref = {task.ref: task for task in tasks if task not in done}
            n_missing = min(n_wanted - len(done), len(by_ref))
            if n_missing <= 0:
                break
            timeout = _LOOK_SECONDS if wait else 0
            ready, _ = self._ray.wait(list(by_ref), num_returns=n_missing, timeout=timeout)
            done += [by_ref[ref] for ref in ready if self._take(by_ref[ref])]
            if not ready:
                if not wait:
                    break
                self._tell_waiting(list(by_ref.values()), time.monotonic() - since)
        return [task for task in tasks if task in done]

    def call(self, name: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Has the first actors call a method at the same time.

        :param arguments: Those of each actor.
        :return: What each returns.
        """
        tasks = [self.submit(index, name, method, *of_actor) for index, of_actor in enumerate(arguments)]
        self.finished(tasks, len(tasks))
        return [task.result for task in tasks]

    def take_work(self) -> Work:
        """What the actors have done since the last call."""
        now = time.monotonic()
        seconds, self._since = max(now - self._since, 1e-9), now
        n_restarts, self._n_reported = self.n_restarts - self._n_reported, self.n_restarts
        work = [(actor.busy / seconds, actor.n_calls / seconds) for actor in self._actors]
        for actor in self._actors:
            actor.busy, actor.n_calls = 0.0, 0
        busy, calls = zip(*work, strict=True)
        by_node: dict[str, float] = {}
        for actor, rate in zip(self._actors, calls, strict=True):
            by_node[actor.node] = by_node.get(actor.node, 0.0) + rate
        return Work(n_restarts, sum(busy) / len(busy), list(calls), by_node)

    def close(self) -> None:
        """Ends all actors; nothing happens the second time."""
        actors, self._actors = self._actors, []
        if self._ray.is_initialized() and actors:
            with suppress(Exception):
                self._ray.wait(
                    [actor.handle.close.remote() for actor in actors], num_returns=len(actors), timeout=_CLOSE_SECONDS
                )
            for actor in actors:
                self._kill(actor)

    # -- starting --------------------------------------------------------------------------------------

    def _start(self, actor: _Actor) -> None:
        host = self._ray.remote(num_cpus=self._cpus_per_actor, max_restarts=0, max_task_retries=0)(Host)
        actor.handle, actor.asked_at = host.remote(), time.monotonic()
        actor.place = actor.handle.describe.remote()

    def _meet(self, index: int) -> None:
        """Takes notice of where an actor is.

        :raises ConfigError: It has other versions of Python or Maze.
        """
        actor = self._actors[index]
        try:
            found = self._ray.get(actor.place)
        except self._ray.exceptions.RayError as error:
            self._replace(index, f"is lost ({_first_line(error)})", "its start", "")
            return
        actor.place = None
        _check_versions(found, index)
        actor.node = found["node"]
        actor.name = f"{index} (pid {found['pid']} on {actor.node})"

    def _await_start(self, first: int) -> None:
        """Waits until new actors have a place, and have the versions of this process."""
        new = range(first, len(self._actors))
        while waiting := {self._actors[i].place: i for i in new if self._actors[i].place is not None}:
            ready, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=_LOOK_SECONDS)
            for ref in ready:
                self._meet(waiting[ref])
            self._tell_homeless(self._actors[first:])

    def _waiting(self, n_waiting: int) -> str:
        total = self._ray.cluster_resources().get("CPU", 0.0)
        free = self._ray.available_resources().get("CPU", 0.0)
        return (
            f"{n_waiting} of {len(self._actors)} actors are not there yet; each needs {self._cpus_per_actor:g} CPUs, "
            f"and the Ray cluster has {total:g} CPUs, of which {free:g} are free"
        )

    def _tell_homeless(self, actors: Sequence[_Actor]) -> None:
        """Says which actors have no place yet.

        :raises ConfigError: They have been waiting too long.
        """
        places = [actor.place for actor in actors if actor.place is not None]
        if not places:
            return
        _, waiting = self._ray.wait(places, num_returns=len(places), timeout=0)
        if not waiting:
            return
        if time.monotonic() - min(actor.asked_at for actor in actors if actor.place in waiting) > self._start_timeout:
            raise ConfigError(
                f"runner.env_groups: {self._waiting(len(waiting))} and did not get a place within "
                f"{self._start_timeout:g} seconds. Ask for fewer actors, or add machines."
            )
        logger.warning("%s.", self._waiting(len(waiting)))

    def _tell_waiting(self, tasks: Sequence[Task], seconds: float) -> None:
        indices = sorted({task.actor for task in tasks})
        self._tell_homeless([self._actors[index] for index in indices])
        logger.info("Waiting for %s of actors %s since %.0f s.", tasks[0].method, indices, seconds)

    def _place(self, index: int, name: str) -> None:
        actor = self._actors[index]
        maker = self._makers[name][index](actor.n_starts)
        try:
            pickled = cloudpickle.dumps(maker)
        except Exception as error:  # pickling runs code of the objects, which may raise anything
            raise ConfigError(
                f"env: it cannot be sent to other machines: {unpicklable(maker)} ({type(error).__name__}: {error}). "
                "Make it in the environment's constructor, or leave it out in `__getstate__`."
            ) from error
        actor.handle.place.remote(name, pickled)

    # -- failures --------------------------------------------------------------------------------------

    def _send(self, task: Task) -> None:
        actor = self._actors[task.actor]
        task.start = actor.n_starts
        task.ref = actor.handle.call.remote(task.name, task.method, *task.arguments)

    def _take(self, task: Task) -> bool:
        """Takes the answer of a task; False: it was lost, and is asked again."""
        try:
            answer = self._ray.get(task.ref)
        except self._ray.exceptions.RayTaskError as error:
            raise WorkerError(f"Actor {task.actor} failed during `{task.method}`: {error}") from error
        except self._ray.exceptions.RayError as error:
            self._recover(task, f"is lost ({_first_line(error)})", None)
            return False
        if isinstance(answer, Failure):
            self._judge(task, answer)
            return False
        actor = self._actors[task.actor]
        if actor.place is not None:  # it came after another one
            self._meet(task.actor)
        task.result, seconds = answer
        actor.n_failures = 0
        actor.n_calls += 1
        actor.busy += seconds
        return True

    def _judge(self, task: Task, failure: Failure) -> None:
        """Raises what repeating does not change; environments and worker processes get another chance."""
        cause = exception_of(failure)
        is_of_environment = bool(failure.place) or isinstance(cause, WorkerError)
        if not is_of_environment:
            if isinstance(cause, MazeError):
                raise type(cause)(f"Actor {task.actor}: {cause}")
            raise WorkerError(f"Actor {task.actor} raised {failure.text} during `{task.method}`:\n{failure.traceback}")
        where = f" in {failure.place}" if failure.place else ""
        self._recover(task, f"failed{where}: {failure.text}", failure)

    def _recover(self, task: Task, what: str, failure: Failure | None) -> None:
        """Replaces the actor of a task, if nobody has done so before, and asks again."""
        with self._lock:
            if task.start == self._actors[task.actor].n_starts:
                details = f"\n{failure.traceback}" if failure is not None else ""
                self._replace(task.actor, what, f"`{task.method}`", details)
            self._send(task)

    def _replace(self, index: int, what: str, during: str, details: str) -> None:
        actor = self._actors[index]
        actor.n_failures += 1
        if actor.n_failures > self._max_restarts:
            raise WorkerError(
                f"Actor {index} {what}, for the {actor.n_failures}th time in a row during {during}; that is more than "
                f"runner.placement.max_restarts={self._max_restarts}.{details}"
            )
        logger.warning("Actor %s %s during %s; another one takes its place.", actor.name or index, what, during)
        if actor.n_failures > 1:
            time.sleep(min(self._restart_pause * 2 ** (actor.n_failures - 2), LONGEST_PAUSE))
        self._kill(actor)
        actor.name = str(index)
        self.n_restarts += 1
        actor.n_starts += 1
        self._start(actor)
        for name, makers in self._makers.items():
            if index < len(makers):
                self._place(index, name)

    def _kill(self, actor: _Actor) -> None:
        with suppress(Exception):  # it may be gone
            self._ray.kill(actor.handle, no_restart=True)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"Python": platform.python_version()}
    for package in ("maze-rl", "torch", "numpy"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _check_versions(found: dict[str, Any], actor: int) -> None:
    here = _versions()
    for name, value in here.items():
        if name in ("Python", "maze-rl") and found.get(name) != value:
            raise ConfigError(
                f"runner.address: actor {actor} runs with {name} {found.get(name, 'of no known version')}, this "
                f"process with {value}. All machines of a cluster need the same."
            )


def unpicklable(value: Any, path: str = "") -> str:
    """Names the innermost attribute that cannot be pickled.

    :param value: An object that cannot be pickled.
    :param path: How it was reached.
    """
    name = f"{path} ({type(value).__name__})" if path else type(value).__name__
    parts: dict[str, Any] = {}
    if isinstance(value, dict):
        parts = {f"{path}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"{path}[{index}]": part for index, part in enumerate(value)}
    elif getattr(value, "__closure__", None):
        names = value.__code__.co_freevars
        parts = {f"{path}.{key}": cell.cell_contents for key, cell in zip(names, value.__closure__, strict=True)}
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        parts = {f"{path}.{key}": part for key, part in vars(value).items()}
    for part_path, part in parts.items():
        if not _is_picklable(part):
            return unpicklable(part, part_path.lstrip("."))
    return name


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # pickling runs code of the objects, which may raise anything
        return False
    return True


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
