"""Pools of actors: objects in this process, in worker processes or on Ray, and calls of their methods.

The learner calls methods of the hosted objects by name. :class:`LocalPool` calls them in this process,
:class:`ProcessPool` in worker processes, :class:`~maze.train.parallelization.on_ray.cluster.ActorPool` on Ray.
Starts, failures, replacements and shutdown are the pool's.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import types
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.reduction import send_handle
from multiprocessing.util import Finalize
from typing import Any, ClassVar

import cloudpickle
import numpy as np

from maze.core.annotations import override
from maze.core.errors import ConfigError, MazeError, WorkerError
from maze.core.log_stats.event_decorators import define_epoch_stats, define_mean_by
from maze.core.log_stats.log_stats import LogStatsAggregator
from maze.core.utils import worker_process
from maze.core.utils.update_profile import TRANSFER, WAITING, timed
from maze.utils.exception_report import ExceptionReport
from maze.utils.process import exit_text, preload

logger = logging.getLogger(__name__)

# Seconds that workers may take to close their environments before they are killed.
_CLOSE_SECONDS = 2.0
# Seconds after the time limit of an environment within which native code has to return.
_HANG_SECONDS = 5.0
_ADVICE_FOR_SIGNALS = {
    -signal.SIGKILL: "The operating system may have run out of memory; fewer environments or workers need less of it.",
    -signal.SIGSEGV: "Native code of an environment crashed.",
}

Maker = Callable[[int, int], Callable[..., Any]]
"""Map the index of an actor and its number of earlier starts to a function that makes the hosted object there."""


@dataclass(eq=False)
class Task:
    """A call of an actor; pools that replace actors repeat it if the actor is lost."""

    actor: int
    name: str
    method: str
    arguments: tuple[Any, ...]
    is_done: bool = False
    result: Any = None
    ref: Any = None
    """Reference of Ray to the result."""
    host: int = 0
    """Index of the actor that runs the call; it differs from `actor` if that one had joined later and is lost."""
    start: int = 0
    """Number of earlier starts of that actor."""


class TaskPool(ABC):
    """Actors that host the same objects; the learner calls their methods. The owner of a pool has to close it."""

    n_first: int = 1
    """Number of actors at the start."""
    n_ahead: ClassVar[int] = 1
    """Number of calls of an actor in :meth:`hand_out` that are in progress or queued."""

    def __init__(self) -> None:
        self.n_restarts = 0
        """Number of actors that were replaced."""
        self._under_way: weakref.WeakSet[Task] = weakref.WeakSet()
        self._since, self._n_reported = time.monotonic(), 0
        self._n_calls: Counter[int] = Counter()
        self._busy = self._waited = 0.0

    @property
    def n_actors(self) -> int:
        """Number of actors, including those that joined later."""
        return self.n_first

    @property
    def n_there(self) -> int:
        """Number of actors that are not lost."""
        return self.n_actors

    @abstractmethod
    def host(self, name: str, maker: Maker, n_hosts: int | None = None, fd: int | None = None) -> None:
        """Have actors make and host an object.

        :param name: Name of the object in :meth:`submit`.
        :param maker: Makes the object of each actor.
        :param n_hosts: Number of actors that host it, the first ones; `None`: all actors, also those that join later.
        :param fd: File descriptor that is the last argument of the made functions; only for worker processes.
        :raises ConfigError: The function cannot be pickled.
        """

    @abstractmethod
    def submit(self, actor: int, name: str, method: str, *arguments: Any) -> Task:
        """Submit a call of a method of a hosted object; results of :meth:`put` arrive as their values.

        :param actor: Index of the actor.
        :param name: Name of the object, see :meth:`host`.
        :param method: Name of its method.
        :param arguments: Arguments of the method; they are pickled.
        """

    @abstractmethod
    def finished(self, tasks: Sequence[Task], n_wanted: int = 1, wait: bool = True) -> list[Task]:
        """Return the completed tasks, in the order given; lost tasks are repeated.

        :param tasks: The tasks.
        :param n_wanted: Number of tasks to wait for.
        :param wait: Whether to wait.
        :raises MazeError: A task failed too often, or with an error that a repetition does not change.
        """

    def put(self, value: Any) -> Any:
        """Store an array for the arguments of calls; worker processes keep the last ones of each size."""
        return value

    def publish(self, policy: Any) -> Any:
        """Put a pickled policy, uint8 `[n_bytes]`, for the arguments of calls; :func:`unpublished` reads it.

        :param policy: The policy, or a tuple with the policy and further objects.
        """
        return self.put(np.frombuffer(worker_process.pickled(policy, "policy: it"), np.uint8))

    def call(self, name: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of the first actors in parallel.

        :param name: Name of the hosted object.
        :param method: Name of the method.
        :param arguments: Arguments by actor.
        :return: The results by actor.
        """
        tasks = [self.submit(index, name, method, *of_actor) for index, of_actor in enumerate(arguments)]
        self.finished(tasks, len(tasks))
        return [task.result for task in tasks]

    def hand_out(
        self, name: str, method: str, next_piece: Callable[[], tuple[Any, ...] | None]
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Distribute calls over the actors, the next one to the first free actor; actors that join take part.

        :param name: Name of the hosted object.
        :param method: Name of the method.
        :param next_piece: Returns the arguments of the next call; `None`: there is none now.
        :return: Arguments and result of each call, in the order of completion, until no call is left.
        """
        under_way: list[Task] = []
        while True:
            self.join_new()
            n_pieces = Counter(task.actor for task in under_way)
            for n_before in range(self.n_ahead):
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
        """Add actors if machines have joined the cluster."""

    def report_work(self, statistics: LogStatsAggregator) -> ClusterEvents:
        """Add the work of the actors since the last call to the statistics of an epoch.

        :param statistics: Statistics of the epoch.
        :return: The event topic, for further events.
        """
        events = statistics.create_event_topic(ClusterEvents)
        now = time.monotonic()
        seconds, self._since = max(now - self._since, 1e-9), now
        events.actor_restarts(value=self.n_restarts - self._n_reported)
        events.actors_there(value=self.n_there)
        events.actors_busy(value=self._busy / max(self.n_actors, 1) / seconds)
        events.learner_waiting(value=self._waited / seconds)
        events.calls_under_way(value=len(self._under_way))
        for actor in range(self.n_actors):
            events.calls_per_second(value=self._n_calls[actor] / seconds, actor=actor)
        self._n_reported, self._busy, self._waited = self.n_restarts, 0.0, 0.0
        self._n_calls.clear()
        return events

    def _completed(self, task: Task, actor: int, result: Any, seconds: float) -> None:
        """Store the result of a task and count the task.

        :param actor: Index of the actor that has performed it.
        """
        task.result, task.is_done = result, True
        self._under_way.discard(task)
        self._n_calls[actor] += 1
        self._busy += seconds

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Return a context in which the learner waits for actors."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - start

    @abstractmethod
    def close(self) -> None:
        """End all actors; a second call does nothing."""


class LocalPool(TaskPool):
    """Actors in this process. They perform a call when the result is requested.

    :param n_actors: Number of actors.
    """

    def __init__(self, n_actors: int = 1) -> None:
        super().__init__()
        self.n_first = n_actors
        self._hosted: dict[tuple[int, str], Any] = {}

    @override(TaskPool)
    def host(self, name: str, maker: Maker, n_hosts: int | None = None, fd: int | None = None) -> None:
        for index in range(self.n_actors):
            self._hosted[index, name] = maker(index, 0)()

    @override(TaskPool)
    def publish(self, policy: Any) -> Any:
        return policy

    @override(TaskPool)
    def submit(self, actor: int, name: str, method: str, *arguments: Any) -> Task:
        return Task(actor, name, method, arguments)

    @override(TaskPool)
    def finished(self, tasks: Sequence[Task], n_wanted: int = 1, wait: bool = True) -> list[Task]:
        for task in tasks[:n_wanted]:
            task.result = getattr(self._hosted[task.actor, task.name], task.method)(*task.arguments)
        return list(tasks[:n_wanted])

    @override(TaskPool)
    def close(self) -> None:
        for hosted in self._hosted.values():
            hosted.close()
        self._hosted.clear()


class EnvWorkerError(WorkerError):
    """A worker process failed.

    :param text: The message.
    :param worker_index: Index of the worker.
    :param env_indices: The environments it stepped.
    :param pid: Its process id.
    :param call: The call it was in.
    """

    def __init__(self, text: str, worker_index: int, env_indices: list[int], pid: int | None, call: str) -> None:
        super().__init__(text)
        self.worker_index, self.env_indices, self.pid, self.call = worker_index, env_indices, pid, call

    def __reduce__(self) -> tuple[type[EnvWorkerError], tuple[object, ...]]:
        return type(self), (str(self), self.worker_index, self.env_indices, self.pid, self.call)


@dataclass(eq=False)
class Worker:
    """One worker process, in the parent."""

    index: int
    rows: slice
    """Indices of its environments among all."""
    process: Any
    """The process, which it may share with other workers."""
    channel: worker_process.Channel
    """The parent's end of its pipe."""
    alarm: Any
    """Pipe that shows that a time limit of its environments has passed, see `Timeout`; `None`: they have none."""
    n_starts: int = 0
    """Number of earlier starts."""
    n_failures: int = 0
    """Number of consecutive failures."""
    tasks: deque[Task] = field(default_factory=deque)
    """Tasks in progress."""

    def fds(self) -> list[int]:
        """Return the file descriptors that show its answers, its end and its alarms."""
        return [self.channel.fd, self.process.sentinel, *([] if self.alarm is None else [self.alarm.fileno()])]


class ProcessPool(TaskPool):
    """Actors in worker processes. The first failure of one of them is raised, with its name, and ends all.

    With `max_restarts`, a failed process is replaced by a new one, which repeats its calls; errors that a repetition
    does not change are raised.

    :param n_actors: Number of processes.
    :param start_method: `forkserver`, `spawn` or `fork`; `None`: `forkserver` if available.
    :param rows: The environments of each worker among all, for messages; empty: they are not numbered.
    :param timeout: Seconds that a call may take; `None`: no limit; infinite: environments have time limits of steps,
        after which native code has to return.
    :param n_slots: Number of stored arrays of each size; calls that use earlier ones must be completed.
    :param in_background: Whether workers send results in a thread and work on while they are not received.
    :param modules: Modules that the fork server imports once for all workers.
    :param noun: Name of a worker in messages.
    :param item: Names the work of a call, from its arguments, in messages (` of episode 3`).
    :param max_restarts: Maximum number of consecutive replacements of a process.
    :param n_threads: Number of workers in a process, each in a thread; they are replaced together.
    """

    def __init__(
        self,
        n_actors: int,
        start_method: str | None = None,
        rows: Sequence[slice] = (),
        timeout: float | None = None,
        *,
        n_slots: int = 2,
        in_background: bool = False,
        modules: Sequence[str] = (),
        noun: str = "environment worker",
        item: Callable[[tuple[Any, ...]], str] = lambda arguments: "",
        max_restarts: int = 0,
        n_threads: int = 1,
    ) -> None:
        super().__init__()
        self.n_first = n_actors
        self.workers: list[Worker] = []
        self._finalizer = Finalize(self, _end_workers, args=(self.workers,), exitpriority=10)
        self._timeout, self._n_slots, self._in_background = timeout, n_slots, in_background
        self._noun, self._item, self._max_restarts = noun, item, max_restarts
        self._makers: dict[str, tuple[Maker, int | None]] = {}
        self._last_slots: dict[int, int] = {}
        # Latest time of the next answer of workers.
        self._deadlines: dict[int, float] = {}
        self.memory: dict[int, worker_process.SharedMemory] = {}
        """Shared memory of the stored arrays by their size."""
        self._short_calls = {
            method: [Task(index, "", method, ()) for index in range(n_actors)] for method in worker_process.SHORT_CALLS
        }
        self._context = process_context(start_method, [worker_process.__name__, *modules])
        self._poll = select.poll()
        self._worker_of: dict[int, Worker] = {}
        of_workers = rows or [slice(0, 0)] * n_actors
        try:
            for first in range(0, n_actors, n_threads):
                self._start(dict(enumerate(of_workers[first : first + n_threads], first)))
        except BaseException:
            self.close()
            raise

    def _start(self, rows: Mapping[int, slice]) -> None:
        """Start the process of some workers.

        :param rows: Index of each worker -> its environments.
        """
        is_fork = self._context.get_start_method() == "fork"
        ends = [self._context.Pipe(duplex=True) for _ in rows]
        alarm, their_alarm = self._context.Pipe(duplex=False) if self._timeout == math.inf else (None, None)
        inherited = [*(ours for ours, _ in ends), *(worker.channel.connection for worker in self.workers)] * is_fork
        theirs = [end for _, end in ends]
        process = self._context.Process(
            target=worker_process.run_worker,
            args=(theirs, their_alarm, self._in_background, inherited, dict(os.environ)),
            name=f"maze-worker-{min(rows)}",
        )
        with _starting(is_fork):
            process.start()
        if their_alarm is not None:
            their_alarm.close()
        for (index, of_worker), (ours, their_end) in zip(rows.items(), ends, strict=True):
            their_end.close()
            worker = Worker(index, of_worker, process, worker_process.Channel(ours), alarm)
            self.workers[index : index + 1] = [worker]
            for fd in worker.fds():
                self._worker_of[fd] = worker
                self._poll.register(fd, select.POLLIN)

    @override(TaskPool)
    def host(self, name: str, maker: Maker, n_hosts: int | None = None, fd: int | None = None) -> None:
        self._makers[name] = maker, fd
        makers = [worker_process.pickled(maker(index, 0), "env: it") for index in range(self.n_actors)]
        tasks = [self.submit(index, "", "host", name, make, fd=fd) for index, make in enumerate(makers)]
        self.finished(tasks, len(tasks))

    @override(TaskPool)
    @timed(TRANSFER)
    def put(self, value: Any) -> worker_process.Stored:
        n_bytes = value.nbytes
        if n_bytes not in self.memory:
            memory = self.memory[n_bytes] = worker_process.map_memory(n_bytes * self._n_slots)
            for index in range(self.n_actors):
                self.submit(index, "", "receive", n_bytes, self._n_slots, fd=memory.fd)
        arguments = [each for task in self._under_way for each in task.arguments]
        in_use = {each.slot for each in arguments if isinstance(each, worker_process.Stored)}
        following = [(self._last_slots.get(n_bytes, -1) + 1 + n) % self._n_slots for n in range(self._n_slots)]
        slot = self._last_slots[n_bytes] = next((slot for slot in following if slot not in in_use), following[0])
        stored = worker_process.Stored(slot, value.shape, value.dtype.str)
        stored.of(self.memory)[...] = value
        return stored

    @override(TaskPool)
    def submit(self, actor: int, name: str, method: str, *arguments: Any, fd: int | None = None) -> Task:
        """Submit a call; see :meth:`TaskPool.submit`.

        :param fd: A file descriptor that is the last argument.
        """
        self._check_open()
        task = Task(actor, name, method, arguments)
        self._send(task, worker_process.CALL, worker_process.dumps((name, method, arguments, fd is not None)), fd)
        self._under_way.add(task)
        return task

    def call_short(self, method: str) -> list[Any]:
        """Call `step` or `reset` of the first object of all actors in parallel and return the results."""
        self._check_open()
        tasks, code = self._short_calls[method], worker_process.SHORT_CALLS[method]
        for task in tasks:
            task.is_done = False
            self._send(task, code)
        self.finished(tasks, len(tasks))
        return [task.result for task in tasks]

    @override(TaskPool)
    def finished(self, tasks: Sequence[Task], n_wanted: int = 1, wait: bool = True) -> list[Task]:
        self._check_open()
        n_wanted = min(n_wanted, len(tasks))
        try:
            while True:
                n_done = [task.is_done for task in tasks].count(True)
                if n_done == len(tasks):
                    return list(tasks)
                is_waiting = wait and n_done < n_wanted
                seconds = None if is_waiting else 0.0
                if is_waiting and self._deadlines:
                    seconds = max(0.0, min(self._deadlines.values()) - time.monotonic())
                events = self._events(seconds)
                self._take(events)
                if not events and is_waiting:
                    late = self.workers[min(self._deadlines, key=self._deadlines.__getitem__)]
                    self._replace(late, self._late(late))
                elif not events:
                    return [task for task in tasks if task.is_done]
        except BaseException:  # after an interrupt, later calls would read the remaining answers
            self.close()
            raise

    def _take(self, events: Sequence[tuple[int, int]]) -> None:
        """Take answers, alarms and failures, up to the first failure: a new process may have its file descriptors."""
        for fd, event in events:
            worker, n_restarts = self._worker_of[fd], self.n_restarts
            if fd == worker.channel.fd and event & select.POLLIN:
                self._receive(worker)
            elif worker.alarm is not None and fd == worker.alarm.fileno() and event & select.POLLIN:
                numbers = os.read(fd, 4096)
                is_late = numbers.rfind(signal.SIGALRM) > numbers.rfind(0)
                self._limit(worker, _HANG_SECONDS if is_late else math.inf)
            elif not worker.channel.connection.poll(0):
                self._replace(worker, self._ended(worker))
            if self.n_restarts > n_restarts:
                return

    def _limit(self, worker: Worker, seconds: float) -> None:
        """Set the time in which a worker has to answer; infinite: there is no limit."""
        self._deadlines.pop(worker.index, None)
        if seconds < math.inf and worker.tasks:
            self._deadlines[worker.index] = time.monotonic() + seconds

    @override(TaskPool)
    def close(self) -> None:
        """End all workers, by force where they do not end by themselves; a second call does nothing."""
        self._finalizer()

    def _send(self, task: Task, code: bytes, content: bytes = b"", fd: int | None = None) -> None:
        worker = self.workers[task.actor]
        worker.tasks.append(task)
        if self._timeout is not None and len(worker.tasks) == 1:
            self._limit(worker, self._timeout)
        try:
            worker.channel.send_pickled(code, content)
            if fd is not None:
                send_handle(worker.channel.connection, fd, worker.process.pid)
        except worker_process.GONE:
            self._replace(worker, self._ended(worker))

    @timed(WAITING)
    def _events(self, seconds: float | None) -> list[tuple[int, int]]:
        """Wait for messages and return the events of the pipes.

        :param seconds: Time limit; `None`: none.
        """
        start = time.monotonic()
        events = self._poll.poll(None if seconds is None else seconds * 1000)
        self._waited += time.monotonic() - start
        return events

    @timed(TRANSFER)
    def _receive(self, worker: Worker) -> None:
        try:
            code, payload = worker.channel.receive()
        except worker_process.GONE:
            self._replace(worker, self._ended(worker))
            return
        if code == worker_process.FAILED:
            self._replace(worker, self._raised(worker, payload))
            return
        result, duration = payload or (None, 0.0)
        task = worker.tasks.popleft()
        task.result, task.is_done = result, True
        if task.name:
            worker.n_failures = 0
            self._completed(task, worker.index, result, duration)
        if self._timeout is not None:
            self._limit(worker, self._timeout)

    def _check_open(self) -> None:
        if not self._finalizer.still_active():
            raise WorkerError(
                f"{self._noun}: the processes have ended (by `close`, or because a worker failed or a call was "
                "interrupted). Make new ones: a new vector environment, or a new run."
            )

    def _raised(self, worker: Worker, failure: ExceptionReport) -> EnvWorkerError:
        """Return the error for an exception in a worker; raise it itself if a repetition does not change it."""
        cause = failure.original
        where = f" in {failure.place}" if failure.place else ""
        error = self._error(f"raised {failure.text.rstrip('.')}{where}", worker, trace=failure.traceback)
        if isinstance(cause, MazeError) and not failure.place:  # its message names its origin
            self.close()
            raise cause from error
        error.__cause__ = cause if isinstance(cause, Exception) else None
        return error

    def _ended(self, worker: Worker) -> EnvWorkerError:
        # the process may have reported an exception before it ended, after messages that are not read yet
        with suppress(*worker_process.GONE):
            while worker.channel.connection.poll(0):
                code, payload = worker.channel.receive()
                if code == worker_process.FAILED:
                    return self._raised(worker, payload)
        worker.process.join(1.0)
        exit_code = worker.process.exitcode
        if exit_code is None:
            return self._error("closed its pipe but is still running", worker)
        advice = "An environment, or a library it uses, ended the process."
        if exit_code < 0:
            advice = _ADVICE_FOR_SIGNALS.get(exit_code, "")
        return self._error(exit_text(exit_code), worker, advice)

    def _late(self, worker: Worker) -> EnvWorkerError:
        advice = "Raise `timeout` (`runner.env_timeout` of a run) if an environment may take that long."
        what = f"did not answer within {self._timeout:g} seconds"
        if self._timeout == math.inf:
            what = f"did not return from native code within {_HANG_SECONDS:g} seconds after `runner.env_timeout`"
        return self._error(what, worker, advice)

    def _replace(self, worker: Worker, error: EnvWorkerError) -> None:
        """Replace a failed worker by a new process, which repeats its calls.

        :raises EnvWorkerError: It has failed too often; all workers are ended.
        """
        worker.n_failures += 1
        if worker.n_failures > self._max_restarts:
            self.close()
            raise error
        logger.warning("%s\nThe process is replaced.", error)
        ended = self._beside(worker)
        for fd in {fd for each in ended for fd in each.fds()}:
            self._poll.unregister(fd)
            del self._worker_of[fd]
        for each in ended:
            each.channel.close()
        if worker.index not in self._deadlines:
            worker.process.join(_CLOSE_SECONDS)  # it closes its environments after an exception
        worker.process.kill()
        if worker.alarm is not None:
            worker.alarm.close()
        self.n_restarts += 1
        self._start({each.index: each.rows for each in ended})
        for each in ended:
            index, new = each.index, self.workers[each.index]
            self._deadlines.pop(index, None)
            new.n_starts, new.n_failures = each.n_starts + 1, each.n_failures
            for n_bytes, memory in self.memory.items():
                self.submit(index, "", "receive", n_bytes, self._n_slots, fd=memory.fd)
            for name, (maker, maker_fd) in self._makers.items():
                make = worker_process.pickled(maker(index, new.n_starts), "env: it")
                self.submit(index, "", "host", name, make, fd=maker_fd)
            for task in each.tasks:
                task.is_done = not task.name  # otherwise, it is prepared already
                if task.name:
                    self._send(
                        task, worker_process.CALL, worker_process.dumps((task.name, task.method, task.arguments, False))
                    )

    def _beside(self, worker: Worker) -> list[Worker]:
        """Return the workers of the process of a worker."""
        return [each for each in self.workers if each.process is worker.process]

    def _error(self, what: str, worker: Worker, advice: str = "", trace: str = "") -> EnvWorkerError:
        """Return the error that names a failed worker.

        :param what: The event, for the message.
        :param worker: The worker.
        :param advice: Remedy, for the message.
        :param trace: The original traceback, if there is one.
        """
        call, during, n_beside = "", "", len(self._beside(worker))
        if worker.tasks:
            task = worker.tasks[0]
            call = "building the environments" if task.method == "host" else task.method
            during = f" during `{call}`{self._item(task.arguments) if task.name else ''}"
        indices, pid = list(range(worker.rows.start, worker.rows.stop)), worker.process.pid
        envs = f"environment {indices[0]}, " if len(indices) == 1 else ""
        if len(indices) > 1:
            envs = f"environments {indices[0]} to {indices[-1]}, "
        where = f"{envs}pid {pid}" + (f", a thread of {n_beside}" if n_beside > 1 else "")
        text = f"{self._noun} {worker.index} ({where}) {what}{during}."
        lines = [text, advice, trace and f"Traceback in the worker:\n{trace}"]
        return EnvWorkerError("\n".join(filter(None, lines)), worker.index, indices, pid, call)


class ClusterEvents(ABC):
    """Statistics of the actors in worker processes or on a cluster, per epoch."""

    @define_epoch_stats(sum)
    def actor_restarts(self, value: int) -> None:
        """Number of actors that were replaced after the actor was lost or one of its environments failed."""

    @define_epoch_stats(np.mean)
    def actors_busy(self, value: float) -> None:
        """Share of the time in which actors worked; the rest is time waiting for the learner or other actors."""

    @define_epoch_stats(np.mean)
    def actors_there(self, value: int) -> None:
        """Number of actors at the end of the epoch; it changes when machines join or leave."""

    @define_epoch_stats(np.mean)
    def learner_waiting(self, value: float) -> None:
        """Share of the time in which the learner waited for actors."""

    @define_epoch_stats(np.mean)
    def calls_under_way(self, value: int) -> None:
        """Number of rollout fragments or population slices in progress or queued at the end of the epoch."""

    @define_epoch_stats(np.mean)
    def object_store_megabytes(self, value: float) -> None:
        """Memory in use for weights and fragments at the end of the epoch, summed over all machines."""

    @define_mean_by("actor")
    def calls_per_second(self, value: float, actor: int) -> None:
        """Rollout fragments or population slices that an actor completed per second."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_epoch_stats(max, output_name="max")
    def fragment_age(self, value: float) -> None:
        """Number of updates that the policy of a fragment had missed on arrival, if updates do not wait for all."""

    @define_epoch_stats(sum)
    def fragments_dropped(self, value: int) -> None:
        """Number of fragments that were dropped because they were too old."""


def unpublished(policy: Any) -> Any:
    """Return the value of a result of :meth:`TaskPool.publish`."""
    return cloudpickle.loads(policy.tobytes()) if isinstance(policy, np.ndarray) else policy


def n_available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def env_slices(n_envs: int, n_workers: int) -> list[slice]:
    """Return consecutive environments for each worker, as even as possible.

    :param n_envs: Number of environments.
    :param n_workers: Maximum number of workers.
    """
    n_workers = min(n_workers, n_envs)
    bounds = [index * n_envs // n_workers for index in range(n_workers + 1)]
    return [slice(*ends) for ends in pairwise(bounds)]


def quick_start_method() -> str | None:
    """Return the start method that takes milliseconds (`fork`) where it is safe: in a process without other threads.

    Otherwise return the default: with `spawn`, each worker of each rollout in a notebook would import everything again.
    """
    return "fork" if sys.platform == "linux" and threading.active_count() == 1 else None


def process_context(start_method: str | None, modules: Sequence[str] = ()) -> Any:
    """Return the context that starts worker processes.

    :param start_method: `forkserver`, `spawn` or `fork`; `None`: `forkserver` if available.
    :param modules: Modules that the fork server imports once for all workers.
    :raises ConfigError: The operating system does not support this start method.
    """
    if not hasattr(select, "poll"):
        raise ConfigError(
            "Worker processes need a POSIX system (Linux, macOS). Use SequentialVectorEnv (runner=dev) instead."
        )
    available = multiprocessing.get_all_start_methods()
    if start_method is None:
        start_method = "forkserver" if "forkserver" in available else "spawn"
    if start_method not in available:
        raise ConfigError(f"start_method: expected one of {', '.join(available)}, found {start_method!r}.")
    context = multiprocessing.get_context(start_method)
    # The server must not import the user's script, and torch only if a worker needs it.
    preload(context, modules)
    return context


@contextmanager
def _starting(is_fork: bool) -> Iterator[None]:
    """Prevent a starting process from importing the user's script again.

    Hosts are pickled by value, so no worker needs the script: scripts need no `__main__` guard, and workers do not
    import the modules of the script (usually torch). A forked process imports nothing.
    """
    if is_fork:
        with warnings.catch_warnings():
            # Python counts the idle threads of numerical libraries, which are safe to fork.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            yield
        return
    main = sys.modules["__main__"]
    stand_in = types.ModuleType("__main__")
    stand_in.__spec__ = None
    sys.modules["__main__"] = stand_in
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _end_workers(workers: list[Worker]) -> None:
    """Request the end of processes, and kill those that do not end. Takes at most five seconds."""
    for worker in workers:
        with suppress(*worker_process.GONE, BlockingIOError):  # a worker that does not read is killed below
            os.set_blocking(worker.channel.fd, False)
            worker.channel.send(worker_process.CLOSE)
    for seconds in (_CLOSE_SECONDS, 1.0):
        deadline = time.monotonic() + seconds
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            worker.process.kill()
    for worker in workers:
        worker.channel.close()
