"""Actors of Ray that work for a training: starting them, asking them, and replacing those that vanish."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import cloudpickle
import numpy as np

from maze.core.errors import ConfigError, MazeError, WorkerError, first_line
from maze.core.utils.pickling import pickled
from maze.core.utils.update_profile import TRANSFER, WAITING, timed
from maze.core.utils.worker_process import Failure, exception_of, failure_of
from maze.train.parallelization.distributed_actors.distributed_actors import Work, WorkCounter
from maze.train.parallelization.on_ray.session import n_cpus, require_ray
from maze.utils.process import use_one_thread, version_of

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
    """What an actor of Ray runs: objects that do the work, and calls of their methods.

    Its processes are listed as `ray::Host`.
    """

    def __init__(self) -> None:
        self._subjects: dict[str, Any] = {}
        """What was made, or a :class:`Failure` that says why it could not be."""
        use_one_thread()

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
            self._subjects[name] = failure_of(error, None)

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Calls a method of a subject.

        :return: The result and the seconds that it took, or a :class:`Failure`.
        """
        subject, start = self._subjects[name], time.perf_counter()
        if isinstance(subject, Failure):
            return subject
        try:
            result = getattr(subject, method)(*arguments)
        except BaseException as error:  # SystemExit of an environment included: the driver hears of everything
            return failure_of(error, None)
        return result, time.perf_counter() - start

    def close(self) -> None:
        """Closes all subjects: they may hold processes."""
        for subject in self._subjects.values():
            with suppress(Exception):
                subject.close()
        self._subjects.clear()


class CrewLimits(Protocol):
    """What an actor needs, how long one waits for it, and how often it is replaced; see `OnRay`."""

    cpus_per_actor: int
    max_restarts: int
    restart_pause: float
    start_timeout: float
    max_actors: int


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


@dataclass(eq=False)
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
    is_away: bool = False
    """It had joined and is lost: others do its work."""


class Crew:
    """A number of actors, each of which hosts the same subjects.

    An actor that vanishes, for whatever reason, is replaced by a new one, and what it was asked to do is asked again.
    An environment that fails is treated alike: its actor is replaced. Errors that say themselves that repeating is of
    no use are raised. Whoever makes a crew closes it, also where :meth:`grow` finds no place.

    :param limits: What an actor needs, how long one waits for it, and how often it is replaced.
    """

    def __init__(self, limits: CrewLimits) -> None:
        self._ray = require_ray()
        self._limits = limits
        self._subjects: dict[str, tuple[Maker, int | None]] = {}
        """What makes each, and how many of the first actors host it; `None`: all, those too that join."""
        self._lock = threading.RLock()
        self._actors: list[_Actor] = []
        self.n_first = 0
        """How many there were at the start."""
        self._joining: list[_Actor] = []  # they are not there yet
        self._next_look = 0.0
        self._under_way: weakref.WeakSet[Task] = weakref.WeakSet()
        self.work = WorkCounter()
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
        new = [_Actor() for _ in range(n_actors - len(self._actors))]
        self._actors += new
        self.n_first = len(self._actors)
        for actor in new:
            self._start(actor)
        while waiting := {actor.place: actor for actor in new if actor.place is not None}:
            for ref in self._ready(list(waiting), len(waiting), _LOOK_SECONDS):
                self._meet(self._actors.index(waiting[ref]))
            self._tell_homeless(new)

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
        self._subjects[name] = maker, n_hosts
        for index in range(self.n_actors):
            self._place(index, [name])

    @timed(TRANSFER)
    def put(self, value: Any) -> Any:
        """Stores a value once for all who are given its reference; flat arrays are fastest."""
        return self._ray.put(value)

    def publish(self, policy: Any) -> Any:
        """Stores a policy, pickled, uint8 `[n_bytes]`, once for all who are given its reference.

        :param policy: The policy, and what belongs to it.
        """
        return self.put(np.frombuffer(pickled(policy, "policy: it"), np.uint8))

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
        while (n_missing := min(n_wanted, len(tasks)) - len(done)) > 0:
            by_ref = {task.ref: task for task in tasks if task not in done}
            ready = self._ready(list(by_ref), n_missing, _LOOK_SECONDS if wait else 0)
            done += [by_ref[ref] for ref in ready if self._take(by_ref[ref])]
            if not ready and not wait:
                break
            if not ready:
                indices = sorted({task.host for task in by_ref.values()})
                self._tell_homeless([self._actors[index] for index in indices])
                seconds = time.monotonic() - since
                logger.info("Waiting for %s of actors %s since %.0f s.", tasks[0].method, indices, seconds)
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
        n_more = self._limits.max_actors - self.n_actors + away - len(self._joining)
        if n_more <= 0 or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        if any(actor.place is not None for actor in self._actors):
            return  # those that were lost come first
        free = self._resources[1].get("CPU", 0.0)
        for _ in range(min(n_more, int(free / self._limits.cpus_per_actor))):
            self._joining.append(_Actor())
            self._start(self._joining[-1])

    def take_work(self) -> Work:
        """What the actors have done since the last call."""
        total, free = (of_kind.get("object_store_memory", 0.0) for of_kind in self._resources)
        n_there = sum(not actor.is_away for actor in self._actors)
        nodes = [actor.node for actor in self._actors]
        return self.work.take(nodes, n_there, len(self._under_way), max(0.0, total - free) / 2**20)

    def close(self) -> None:
        """Ends all actors; nothing happens the second time."""
        self._is_closed.set()
        self._looking.join(1.0)  # what it asks Ray for should not outlive Ray
        actors, self._actors, self._joining = [*self._actors, *self._joining], [], []
        if self._ray.is_initialized() and actors:
            with suppress(Exception):
                self._ready([actor.handle.close.remote() for actor in actors], len(actors), _CLOSE_SECONDS)
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
        with self.work.waiting():
            ready: list[Any] = self._ray.wait(refs, num_returns=n_wanted, timeout=timeout)[0]
        return ready

    @timed(TRANSFER)
    def _answer(self, ref: Any) -> Any:
        return self._ray.get(ref)

    # -- starting --------------------------------------------------------------------------------------

    def _start(self, actor: _Actor) -> None:
        host = self._ray.remote(num_cpus=self._limits.cpus_per_actor, max_restarts=0, max_task_retries=0)(Host)
        actor.handle, actor.asked_at = host.remote(), time.monotonic()
        actor.place = actor.handle.describe.remote()

    def _meet(self, index: int) -> None:
        """Takes notice of where an actor is.

        :raises ConfigError: It has other versions of Python or Maze.
        """
        try:
            self._read_place(self._actors[index], index)
        except self._ray.exceptions.RayError as error:
            self._replace(index, f"is lost ({first_line(error)})", "its start")

    def _read_place(self, actor: _Actor, index: int) -> None:
        found = self._answer(actor.place)
        for name, value in _versions().items():
            if found.get(name) != value:
                raise ConfigError(
                    f"runner.address: actor {index} runs with {name} {found.get(name) or 'of no known version'}, this "
                    f"process with {value}. All machines of a cluster need the same."
                )
        actor.place, actor.node = None, found["node"]
        actor.name = f"{index} (pid {found['pid']} on {actor.node})"

    def _take_in(self, actor: _Actor) -> None:
        """Gives an actor that has joined a number and its subjects; one that is of no use is let go."""
        indices = [index for index, other in enumerate(self._actors) if other.is_away]
        index = indices[0] if indices else self.n_actors
        try:
            self._read_place(actor, index)
        except (ConfigError, self._ray.exceptions.RayError) as error:
            logger.warning("An actor that has joined is not used: %s", first_line(error))
            self._kill(actor)
            return
        actor.n_starts = self._actors[index].n_starts if indices else 0
        self._actors[index : index + 1] = [actor]
        self._place(index, self._subjects)
        logger.info("Actor %s has joined; there are %d.", actor.name, self.n_actors)

    def _tell_homeless(self, actors: Sequence[_Actor]) -> None:
        """Says which actors have no place yet.

        :raises ConfigError: They have been waiting too long.
        """
        asked = {actor.place: actor.asked_at for actor in actors if actor.place is not None}
        for ref in self._ready(list(asked), len(asked), 0) if asked else ():
            del asked[ref]
        if not asked:
            return
        free, timeout = self._ray.available_resources().get("CPU", 0.0), self._limits.start_timeout
        told = (
            f"{len(asked)} of {len(self._actors)} actors are not there yet; each needs {self._limits.cpus_per_actor:g} "
            f"CPUs, and the Ray cluster has {n_cpus():g} CPUs, of which {free:g} are free"
        )
        if time.monotonic() - min(asked.values()) > timeout:
            raise ConfigError(
                f"runner.env_groups: {told} and did not get a place within {timeout:g} seconds. Ask for fewer actors, "
                "or add machines."
            )
        logger.warning("%s.", told)

    def _place(self, index: int, names: Iterable[str]) -> None:
        """Gives an actor those subjects that it hosts."""
        actor = self._actors[index]
        for name in names:
            make, n_hosts = self._subjects[name]
            if n_hosts is None or index < n_hosts:
                actor.handle.place.remote(name, pickled(make(index, actor.n_starts), "env: it"))

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
            self._recover(task, f"is lost ({first_line(error)})")
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
        self.work.done(task.host, seconds)
        return True

    def _judge(self, task: Task, failure: Failure) -> None:
        """Raises what repeating does not change; environments and worker processes get another chance."""
        cause = exception_of(failure)
        if failure.place or isinstance(cause, WorkerError):
            where = f" in {failure.place}" if failure.place else ""
            self._recover(task, f"failed{where}: {failure.text}", f"\n{failure.traceback}")
        elif isinstance(cause, MazeError):
            raise type(cause)(f"Actor {task.actor}: {cause}")
        else:
            raise WorkerError(f"Actor {task.actor} raised {failure.text} during `{task.method}`:\n{failure.traceback}")

    def _recover(self, task: Task, what: str, details: str = "") -> None:
        """Replaces the actor of a task, if nobody has done so before, and asks again."""
        with self._lock:
            if task.start == self._actors[task.host].n_starts:
                self._replace(task.host, what, f"`{task.method}`", details)
            self._send(task)

    def _replace(self, index: int, what: str, during: str, details: str = "") -> None:
        actor = self._actors[index]
        actor.n_failures += 1
        if actor.n_failures > self._limits.max_restarts:
            raise WorkerError(
                f"Actor {index} {what}, for the {actor.n_failures}th time in a row during {during}; that is more than "
                f"runner.placement.max_restarts={self._limits.max_restarts}.{details}"
            )
        logger.warning("Actor %s %s during %s; another one takes its place.", actor.name or index, what, during)
        if actor.n_failures > 1:
            time.sleep(min(self._limits.restart_pause * 2 ** (actor.n_failures - 2), LONGEST_PAUSE))
        self._kill(actor)
        actor.name = str(index)
        self.work.n_restarts += 1
        actor.n_starts += 1
        if index >= self.n_first:  # it comes back where there is room
            actor.is_away = True
            return
        while self._joining:  # they might take its place
            self._kill(self._joining.pop())
        self._start(actor)
        self._place(index, self._subjects)

    def _kill(self, actor: _Actor) -> None:
        with suppress(Exception):  # it may be gone
            self._ray.kill(actor.handle, no_restart=True)


def _versions() -> dict[str, str | None]:
    """What has to be the same everywhere."""
    return {"Python": platform.python_version(), "maze-rl": version_of("maze-rl")}
