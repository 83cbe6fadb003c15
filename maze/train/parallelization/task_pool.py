"""Pools of actors: objects in this process, in worker processes or on Ray, and calls of their methods."""

from __future__ import annotations

import copy
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import torch

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping
from maze.core.log_stats.log_stats import LogStatsAggregator
from maze.core.utils.pickling import pickled
from maze.core.utils.update_profile import TRANSFER, timed
from maze.core.utils.worker_pool import SharedMemory, WorkerPool, map_memory
from maze.core.utils.worker_process import Host

T = TypeVar("T")

Maker = Callable[[int, int], Callable[..., Any]]
"""Maps the index of an actor and its number of earlier starts to a function that makes the hosted object there."""


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
        """Submit a call of a method of a hosted object; results of :meth:`put` arrive as their values."""

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
        return self.put(np.frombuffer(pickled(policy, "policy: it"), np.uint8))

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
        return

    def report_work(self, statistics: LogStatsAggregator) -> ClusterEvents:
        """Add what the actors have done since the last call to the statistics of an epoch.

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
    """A single actor in this process. It performs a call when the result is requested."""

    def __init__(self) -> None:
        super().__init__()
        self._hosted: dict[str, Any] = {}

    @override(TaskPool)
    def host(self, name: str, maker: Maker, n_hosts: int | None = None, fd: int | None = None) -> None:
        self._hosted[name] = maker(0, 0)()

    @override(TaskPool)
    def publish(self, policy: Any) -> Any:
        return policy

    @override(TaskPool)
    def submit(self, actor: int, name: str, method: str, *arguments: Any) -> Task:
        return Task(actor, name, method, arguments)

    @override(TaskPool)
    def finished(self, tasks: Sequence[Task], n_wanted: int = 1, wait: bool = True) -> list[Task]:
        for task in tasks[:n_wanted]:
            task.result = getattr(self._hosted[task.name], task.method)(*task.arguments)
        return list(tasks[:n_wanted])

    @override(TaskPool)
    def close(self) -> None:
        for hosted in self._hosted.values():
            hosted.close()
        self._hosted.clear()


class Stored(NamedTuple):
    """Position and type of an array in shared memory.

    :param slot: Index of the array among those of its size.
    :param shape: Its shape.
    :param dtype: Its type.
    """

    slot: int
    shape: tuple[int, ...]
    dtype: str

    def of(self, memory: Mapping[int, SharedMemory]) -> np.ndarray:
        """Return the array; it is valid until its slot is used again.

        :param memory: Shared memory by size of the arrays.
        """
        n_bytes = int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize
        array: np.ndarray = np.ndarray(self.shape, self.dtype, memory[n_bytes].map, self.slot * n_bytes)
        return array


class TaskHost(Host):
    """Host objects in a worker process and report the results of calls."""

    sends_in_background: ClassVar[bool] = True

    def __init__(self) -> None:
        self._hosted: dict[str, Any] = {}
        self._memory: dict[int, SharedMemory] = {}

    def host(self, name: str, maker: bytes, *fd: int) -> None:
        """Make an object; the arguments are those of :meth:`TaskPool.host`."""
        self._hosted[name] = cloudpickle.loads(maker)(*fd)

    def receive(self, n_bytes: int, n_slots: int, fd: int) -> None:
        """Receive shared memory.

        :param n_bytes: Size of the arrays in it.
        :param n_slots: Number of arrays in it.
        :param fd: Its file descriptor.
        """
        self._memory[n_bytes] = map_memory(n_bytes * n_slots, fd)

    def run(self, name: str, method: str, *arguments: Any) -> None:
        """Call a method of a hosted object and report result and duration."""
        given = [each.of(self._memory) if isinstance(each, Stored) else each for each in arguments]
        start = time.perf_counter()
        result = getattr(self._hosted[name], method)(*given)
        self.report((result, time.perf_counter() - start))

    @override(Host)
    def close(self) -> None:
        for hosted in self._hosted.values():
            hosted.close()
        self._hosted.clear()


class ProcessPool(TaskPool):
    """Actors in worker processes. A failure of one of them ends all, with an error that names it.

    :param n_actors: Number of processes.
    :param start_method: `forkserver`, `spawn` or `fork`; `None`: `forkserver` if available.
    :param rows: Environments of each actor, for messages.
    :param n_slots: Number of stored arrays of each size; calls that use earlier ones must be completed.
    """

    def __init__(
        self,
        n_actors: int,
        start_method: str | None = None,
        rows: Sequence[slice] | None = None,
        n_slots: int = 2,
    ) -> None:
        super().__init__()
        self.n_first = n_actors
        self.workers = WorkerPool([TaskHost() for _ in range(n_actors)], rows, start_method)
        self.workers.gather("start")
        self._queues: list[deque[Task]] = [deque() for _ in range(n_actors)]
        self._n_slots, self._n_stored = n_slots, Counter[int]()
        self._memory: dict[int, SharedMemory] = {}

    @override(TaskPool)
    def host(self, name: str, maker: Maker, n_hosts: int | None = None, fd: int | None = None) -> None:
        makers = [(name, pickled(maker(index, 0), "env: it")) for index in range(self.n_actors)]
        self.workers.call_each("host", makers, "building the environments", fd)

    @override(TaskPool)
    @timed(TRANSFER)
    def put(self, value: Any) -> Stored:
        n_bytes = value.nbytes
        if n_bytes not in self._memory:
            self._memory[n_bytes] = map_memory(n_bytes * self._n_slots)
            self.workers.tell("receive", n_bytes, self._n_slots, fd=self._memory[n_bytes].fd)
        stored = Stored(self._n_stored[n_bytes] % self._n_slots, value.shape, value.dtype.str)
        stored.of(self._memory)[...] = value
        self._n_stored[n_bytes] += 1
        return stored

    @override(TaskPool)
    def submit(self, actor: int, name: str, method: str, *arguments: Any) -> Task:
        task = Task(actor, name, method, arguments)
        self._under_way.add(task)
        self._queues[actor].append(task)
        self.workers.tell("run", name, method, *arguments, workers=[self.workers.workers[actor]])
        return task

    @override(TaskPool)
    def finished(self, tasks: Sequence[Task], n_wanted: int = 1, wait: bool = True) -> list[Task]:
        while True:
            n_missing = min(n_wanted, len(tasks)) - sum(task.is_done for task in tasks)
            with self._waiting():
                reports = self.workers.reports(wait and n_missing > 0)
            for worker, (result, seconds) in reports:
                self._completed(self._queues[worker.index].popleft(), worker.index, result, seconds)
            if not reports:
                return [task for task in tasks if task.is_done]

    @override(TaskPool)
    def close(self) -> None:
        self.workers.close()


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

    @define_epoch_stats(np.mean)
    @define_stats_grouping("actor")
    def calls_per_second(self, value: float, actor: int) -> None:
        """Rollout fragments or population slices that an actor completed per second."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_epoch_stats(max, output_name="max")
    def fragment_age(self, value: float) -> None:
        """Number of updates that the policy of a fragment had missed on arrival, if updates do not wait for all."""

    @define_epoch_stats(sum)
    def fragments_dropped(self, value: int) -> None:
        """Number of fragments that were dropped because they were too old."""


def tensors_of(state_dict: Mapping[Any, Any]) -> Iterator[torch.Tensor]:
    """Yield all tensors of a nested state dictionary, in its order, each in its own shape `[...]`."""
    for value in state_dict.values():
        if isinstance(value, Mapping):
            yield from tensors_of(value)
        else:
            yield value


class MadeOnce(Generic[T]):
    """Cache of a value made from an object, until another object is given."""

    def __init__(self) -> None:
        self._value: Any = None
        self._made: Any = None
        self.n_made = 0
        """Number of values made so far, which identifies the current one."""

    def of(self, value: Any, make: Callable[[], T]) -> T:
        """Return the value of an object.

        :param value: The object.
        :param make: Makes the value of a new object.
        """
        if value is not self._value:
            self._value, self._made = value, make()
            self.n_made += 1
        made: T = self._made
        return made


def copied_to_cpu(policy: TorchPolicy) -> TorchPolicy:
    """Return a copy of a policy on the CPU that acts in evaluation mode."""
    portable = copy.deepcopy(policy)
    portable.to("cpu")
    portable.eval()
    return portable


def packed_weights(state_dict: Mapping[Any, Any]) -> np.ndarray:
    """Return all weights as one flat array, uint8 `[n_bytes]`, the fastest form for transfers between machines."""
    rows = [
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in tensors_of(state_dict)
    ]
    return np.concatenate(rows) if rows else np.zeros(0, np.uint8)


def unpack_weights(packed: np.ndarray, state_dict: Mapping[Any, Any]) -> None:
    """Copy the result of :func:`packed_weights` into live tensors.

    :param packed: Weights, uint8 `[n_bytes]`; not modified.
    :param state_dict: The tensors to overwrite.
    """
    offset = 0
    for target in tensors_of(state_dict):
        n_bytes = target.numel() * target.element_size()
        source = torch.from_numpy(packed[offset : offset + n_bytes].copy())
        target.copy_(source.view(target.dtype).view(target.shape))
        offset += n_bytes


def unpublished(policy: Any) -> Any:
    """Return the value of a result of :meth:`TaskPool.publish`."""
    return cloudpickle.loads(policy.tobytes()) if isinstance(policy, np.ndarray) else policy
