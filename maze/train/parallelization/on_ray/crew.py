"""Actors of Ray that work for a training: starting them, asking them, and replacing those that vanish."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from maze.core.errors import ConfigError, MazeError, WorkerError
from maze.core.utils.pickling import pickled
from maze.core.utils.update_profile import TRANSFER, WAITING, timed
from maze.train.parallelization.on_ray.session import require_ray
from maze.train.parallelization.vector_env.channel import Failure, exception_of, failure_of

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0
"""After so long without an answer there is a word about who is waited for."""
_SAMPLE_SECONDS = 1.0
"""Pause between two looks at the resources of the cluster."""
_CLOSE_SECONDS = 2.0
LONGEST_PAUSE = 30.0
"""Seconds before a replacement, at most."""

N_AHEAD = 2
"""Pieces of work that an actor has before it: one is done, the other one waits."""

Maker = Callable[[int, int], Callable[[], Any]]
"""From an actor, and how often it was started before, to what makes its subject there, which travels by value."""


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
    host: int = 0
    """The actor that does it: another one, where its own had joined and is lost."""
    start: int = 0
    """Which start of that actor."""
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
    is_away: bool = False
    """It had joined and is lost: others do its work."""


@dataclass
class _Subject:
    maker: Maker
    n_hosts: int | None
    """How many of the first actors host it; `None`: all, those too that join."""


class Work(NamedTuple):
    """What actors have done in some time; `ClusterEvents` says what each is."""

    actor_restarts: int
    actors_there: int
    actors_busy: float
    learner_waiting: float
    calls_under_way: int
    object_store_megabytes: float
    calls_per_second: list[float]
    calls_per_second_of_node: dict[str, float]


class Crew:
    """A number of actors, each of which hosts the same subjects.

    An actor that vanishes, for whatever reason, is replaced by a new one, and what it was asked to do is asked again.
    An environment that fails is treated alike: its actor is replaced. Errors that say themselves that repeating is of
    no use are raised.

    :param cpus_per_actor: CPUs that each needs.
    :param max_restarts: How often in a row an actor is replaced without having completed anything in between.
    :param restart_pause: Seconds before the second replacement in a row, then twice as many each time, up to 30.
    :param start_timeout: Seconds that actors may wait for a place.
    :param max_actors: Up to so many there are, where machines join that have room for more than at the start.
    """

    def __init__(
        self,
        cpus_per_actor: float = 1,
        max_restarts: int = 3,
        restart_pause: float = 1.0,
        start_timeout: float = 120.0,
        max_actors: int = 0,
    ) -> None:
        self._ray = require_ray()
        self._cpus_per_actor = cpus_per_actor
        self._max_restarts = max_restarts
        self._restart_pause = restart_pause
        self._start_timeout = start_timeout
        self._max_actors = max_actors
        self._subjects: dict[str, _Subject] = {}
        self._lock = threading.RLock()
        self.n_restarts = 0
        """How often an actor was replaced."""
        self._actors: list[_Actor] = []
        self.n_first = 0
        """How many there were at the start."""
        self._joining: list[_Actor] = []  # they are not there yet
        self._next_look = 0.0
        self._under_way: weakref.WeakSet[Task] = weakref.WeakSet()
        self._waited = 0.0
        self._since, self._n_reported = time.monotonic(), 0
        self._is_closed = threading.Event()
        self._resources: tuple[dict[str, float], dict[str, float]] = {}, {}
        """Those of the cluster, and which of them are free."""
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()

    def grow(self, n_actors: int) -> None:
        """Waits for more actors, where there are fewer than that; who hosts what does not change.

        :param n_actors: Number of actors.
        :raises ConfigError: There is no place for them, or they have other versions of Python or Maze.
        """
        first = len(self._actors)
        self._actors += [_Actor() for _ in range(n_actors - first)]
        self.n_first = len(self._actors)
        try:
            for actor in self._actors[first:]:
                self._start(actor)
            self._await_start(first)
        except BaseException:
            self.close()
            raise

    @property
    def n_actors(self) -> int:
        """Number of actors, those included that have joined."""
        return len(self._actors)

    def place(self, name: str, maker: Maker, n_hosts: int | None = None) -> None:
        """Gives actors a subject.

        :param name: Its name in :meth:`submit`.
        :param maker: Makes it, for each actor.
        :param n_hosts: Number of actors, the first ones; `None`: all, those too that join.
        :raises ConfigError: It cannot be sent to other processes.
        """
        self._subjects[name] = _Subject(maker, n_hosts)
        for index in range(self.n_actors if n_hosts is None else n_hosts):
            self._place(index, name)

    @timed(TRANSFER)
    def put(self, value: Any) -> Any:
        """Stores a value once for all who are given its reference; flat arrays are fastest."""
        return self._ray.put(value)

    def submit(self, actor: int, name: str, method: str, *arguments: Any) -> Task:
        """Asks an actor to call a method of a subject; references among the arguments arrive as their values."""
        task = Task(actor, name, method, arguments)
        with self._lock:
            self._under_way.add(task)
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
            ready = self._ready(list(by_ref), n_missing, _LOOK_SECONDS if wait else 0)
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

    def hand_out(
        self, name: str, method: str, next_piece: Callable[[], tuple[Any, ...] | None]
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Has actors work off pieces, whoever is free first; those that join meanwhile take part.

        :param name: The subject that does it.
        :param method: Its method.
        :param next_piece: The arguments of the next call; `None`: there is none now.
        :return: The arguments and the result of each call, as they come, until there is nothing left to do.
        """
        under_way: list[Task] = []
        while True:
            self.join_new()
            n_pieces = Counter(task.actor for task in under_way)
            for n_before in range(N_AHEAD):
                for actor in range(self.n_actors):
                    if n_pieces[actor] <= n_before and (arguments := next_piece()) is not None:
                        n_pieces[actor] += 1
                        under_way.append(self.submit(actor, name, method, *arguments))
            if not under_way:
                return
            for task in self.finished(under_way):
                under_way.remove(task)
                yield task.arguments, task.result

    def join_new(self) -> None:
        """Takes in further actors, up to `max_actors`, where machines have joined; it looks every few seconds."""
        for actor in [actor for actor in self._joining if self._ready([actor.place], 1, 0)]:
            self._joining.remove(actor)
            self._take_in(actor)
        away = sum(actor.is_away for actor in self._actors)
        n_more = self._max_actors - self.n_actors + away - len(self._joining)
        if n_more <= 0 or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        if any(actor.place is not None for actor in self._actors):
            return  # those that were lost come first
        free = self._resources[1].get("CPU", 0.0)
        for _ in range(min(n_more, int(free / self._cpus_per_actor))):
            self._joining.append(_Actor())
            self._start(self._joining[-1])

    def take_work(self) -> Work:
        """What the actors have done since the last call."""
        now = time.monotonic()
        seconds, self._since = max(now - self._since, 1e-9), now
        n_restarts, self._n_reported = self.n_restarts - self._n_reported, self.n_restarts
        waited, self._waited = self._waited, 0.0
        calls = [actor.n_calls / seconds for actor in self._actors]
        by_node = Counter[str]()
        for actor, rate in zip(self._actors, calls, strict=True):
            by_node[actor.node] += rate  # type: ignore[assignment]  # it counts parts as well
        busy = sum(actor.busy for actor in self._actors) / len(self._actors) / seconds
        for actor in self._actors:
            actor.busy, actor.n_calls = 0.0, 0
        key = "object_store_memory"
        used = self._resources[0].get(key, 0.0) - self._resources[1].get(key, 0.0)
        n_actors = sum(not actor.is_away for actor in self._actors)
        n_calls, store = len(self._under_way), max(0.0, used) / 2**20
        return Work(n_restarts, n_actors, busy, waited / seconds, n_calls, store, calls, dict(by_node))

    def close(self) -> None:
        """Ends all actors; nothing happens the second time."""
        self._is_closed.set()
        self._looking.join(1.0)  # what it asks Ray for should not outlive Ray
        actors, self._actors, self._joining = [*self._actors, *self._joining], [], []
        if self._ray.is_initialized() and actors:
            with suppress(Exception):
                self._ray.wait(
                    [actor.handle.close.remote() for actor in actors], num_returns=len(actors), timeout=_CLOSE_SECONDS
                )
            for actor in actors:
                self._kill(actor)

    def _look(self) -> None:
        """Looks after the resources of the cluster, in a thread: without a head such calls do not return."""
        while not self._is_closed.is_set():
            with suppress(Exception):  # it may be gone
                self._resources = self._ray.cluster_resources(), self._ray.available_resources()
            self._is_closed.wait(_SAMPLE_SECONDS)

    @timed(WAITING)
    def _ready(self, refs: list[Any], n_wanted: int, timeout: float) -> list[Any]:
        start = time.monotonic()
        ready: list[Any] = self._ray.wait(refs, num_returns=n_wanted, timeout=timeout)[0]
        self._waited += time.monotonic() - start
        return ready

    @timed(TRANSFER)
    def _answer(self, ref: Any) -> Any:
        return self._ray.get(ref)

    # -- starting --------------------------------------------------------------------------------------

    def _start(self, actor: _Actor) -> None:
        host = self._ray.remote(num_cpus=self._cpus_per_actor, max_restarts=0, max_task_retries=0)(Host)
        actor.handle, actor.asked_at = host.remote(), time.monotonic()
        actor.place = actor.handle.describe.remote()

    def _meet(self, index: int) -> None:
        """Takes notice of where an actor is.

        :raises ConfigError: It has other versions of Python or Maze.
        """
        try:
            self._read_place(self._actors[index], index)
        except self._ray.exceptions.RayError as error:
            self._replace(index, f"is lost ({_first_line(error)})", "its start", "")

    def _read_place(self, actor: _Actor, index: int) -> None:
        found = self._answer(actor.place)
        _check_versions(found, index)
        actor.place, actor.node = None, found["node"]
        actor.name = f"{index} (pid {found['pid']} on {actor.node})"

    def _take_in(self, actor: _Actor) -> None:
        """Gives an actor that has joined a number and its subjects; one that is of no use is let go."""
        indices = [index for index, other in enumerate(self._actors) if other.is_away]
        index = indices[0] if indices else self.n_actors
        try:
            self._read_place(actor, index)
        except (ConfigError, self._ray.exceptions.RayError) as error:
            logger.warning("An actor that has joined is not used: %s", _first_line(error))
            self._kill(actor)
            return
        if indices:
            actor.n_starts = self._actors[index].n_starts
            self._actors[index] = actor
        else:
            self._actors.append(actor)
        self._place_all(index)
        logger.info("Actor %s has joined; there are %d.", actor.name, self.n_actors)

    def _await_start(self, first: int) -> None:
        """Waits until new actors have a place, and have the versions of this process."""
        new = range(first, len(self._actors))
        while waiting := {self._actors[i].place: i for i in new if self._actors[i].place is not None}:
            for ref in self._ready(list(waiting), len(waiting), _LOOK_SECONDS):
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
        waiting = set(places) - set(self._ready(places, len(places), 0)) if places else set()
        if not waiting:
            return
        if time.monotonic() - min(actor.asked_at for actor in actors if actor.place in waiting) > self._start_timeout:
            raise ConfigError(
                f"runner.env_groups: {self._waiting(len(waiting))} and did not get a place within "
                f"{self._start_timeout:g} seconds. Ask for fewer actors, or add machines."
            )
        logger.warning("%s.", self._waiting(len(waiting)))

    def _tell_waiting(self, tasks: Sequence[Task], seconds: float) -> None:
        indices = sorted({task.host for task in tasks})
        self._tell_homeless([self._actors[index] for index in indices])
        logger.info("Waiting for %s of actors %s since %.0f s.", tasks[0].method, indices, seconds)

    def _place(self, index: int, name: str) -> None:
        actor = self._actors[index]
        maker = self._subjects[name].maker(index, actor.n_starts)
        actor.handle.place.remote(name, pickled(maker, "env: it"))

    def _place_all(self, index: int) -> None:
        for name, subject in self._subjects.items():
            if subject.n_hosts is None or index < subject.n_hosts:
                self._place(index, name)

    # -- failures --------------------------------------------------------------------------------------

    def _send(self, task: Task) -> None:
        task.host = task.actor % self.n_first if self._actors[task.actor].is_away else task.actor
        actor = self._actors[task.host]
        task.start = actor.n_starts
        task.ref = actor.handle.call.remote(task.name, task.method, *task.arguments)

    def _take(self, task: Task) -> bool:
        """Takes the answer of a task; False: it was lost, and is asked again."""
        try:
            answer = self._answer(task.ref)
        except self._ray.exceptions.RayTaskError as error:
            raise WorkerError(f"Actor {task.actor} failed during `{task.method}`: {error}") from error
        except self._ray.exceptions.RayError as error:
            self._recover(task, f"is lost ({_first_line(error)})", None)
            return False
        if isinstance(answer, Failure):
            self._judge(task, answer)
            return False
        actor = self._actors[task.host]
        if actor.place is not None:  # it came after another one
            self._meet(task.host)
        self._under_way.discard(task)
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
            if task.start == self._actors[task.host].n_starts:
                details = f"\n{failure.traceback}" if failure is not None else ""
                self._replace(task.host, what, f"`{task.method}`", details)
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
        if index >= self.n_first:  # it comes back where there is room
            actor.is_away = True
            return
        while self._joining:  # they might take its place
            self._kill(self._joining.pop())
        self._start(actor)
        self._place_all(index)

    def _kill(self, actor: _Actor) -> None:
        with suppress(Exception):  # it may be gone
            self._ray.kill(actor.handle, no_restart=True)


class Published:
    """An object that actors get once, until another one takes its place.

    :param crew: The actors.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._value: Any = None
        self._ref: Any = None
        self._token = 0

    def of(self, value: Any, content: Callable[[], Any]) -> tuple[int, Any]:
        """What tells it apart from those before, and the reference of what was pickled, uint8 `[n_bytes]`.

        :param value: The object.
        :param content: Gives what is sent for it.
        """
        if value is not self._value:
            array = np.frombuffer(pickled(content(), "policy: it"), np.uint8)
            self._value, self._ref = value, self._crew.put(array)
            self._token += 1
        return self._token, self._ref


def _versions() -> dict[str, str]:
    """What has to be the same everywhere."""
    with suppress(PackageNotFoundError):
        return {"Python": platform.python_version(), "maze-rl": version("maze-rl")}
    return {"Python": platform.python_version()}


def _check_versions(found: dict[str, Any], actor: int) -> None:
    for name, value in _versions().items():
        if found.get(name) != value:
            raise ConfigError(
                f"runner.address: actor {actor} runs with {name} {found.get(name, 'of no known version')}, this "
                f"process with {value}. All machines of a cluster need the same."
            )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
