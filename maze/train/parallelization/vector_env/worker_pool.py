"""The worker processes of a vector environment: starting them, asking them, and what happens when one fails."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import select
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from typing import Any

from maze.core.errors import ConfigError, MazeError, NonFiniteError, WorkerError
from maze.core.utils.pickling import pickled
from maze.core.utils.update_profile import TRANSFER, WAITING, timed
from maze.train.parallelization.vector_env import channel as messages
from maze.train.parallelization.vector_env.channel import Channel, Failure, exception_of
from maze.train.parallelization.vector_env.shared_arrays import SharedArrays, env_slices
from maze.train.parallelization.vector_env.worker import run_worker
from maze.train.parallelization.vector_env.worker_failure import EnvWorkerError, describe_exit, describe_failure
from maze.utils.process import preload

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 2.0
"""How long workers may take to close their environments before they are ended by force."""
_GONE = (BrokenPipeError, ConnectionResetError, EOFError)


class Worker:
    """One worker process, seen from outside.

    :param index: Counts the workers.
    :param rows: Its environments.
    :param process: The process.
    :param channel: This end of its pipe.
    """

    def __init__(self, index: int, rows: slice, process: Any, channel: Channel) -> None:
        self.index = index
        self.rows = rows
        self.process = process
        self.channel = channel


class WorkerPool:
    """Worker processes, each with its own environments.

    :param env_factories: Each makes one environment.
    :param start_method: See :class:`SubprocVectorEnv`.
    :param n_workers: Number of processes.
    :param timeout: Seconds that a call may take.
    :param preloads: Modules that the workers will need.
    """

    _worker_main: Callable[..., None] = staticmethod(run_worker)
    """What a worker process runs."""
    _self_explanatory: tuple[type[MazeError], ...] = (NonFiniteError,)
    """Errors of workers that say themselves where they come from, and are raised as what they are."""

    def __init__(
        self,
        env_factories: Sequence[Callable[[], Any]],
        start_method: str | None,
        n_workers: int | None,
        timeout: float | None,
        preloads: Sequence[str] = (),
    ) -> None:
        n_envs = len(env_factories)
        self.workers: list[Worker] = []
        self._finalizer = Finalize(self, _end_workers, args=(self.workers,), exitpriority=10)
        self._n_envs = n_envs
        self._timeout = timeout
        self._call = "start"
        context = _context(start_method, [self._worker_main.__module__, *preloads])
        try:
            for index, rows in enumerate(env_slices(n_envs, _worker_count(n_workers, n_envs))):
                self.workers.append(self._start(context, index, rows, env_factories[rows]))
        except BaseException:
            self.close()
            raise
        self._poll = select.poll()
        self._worker_of: dict[int, Worker] = {}
        for worker in self.workers:
            for fd in (worker.channel.fd, worker.process.sentinel):
                self._worker_of[fd] = worker
                self._poll.register(fd, select.POLLIN)

    def _start(self, context: Any, index: int, rows: slice, factories: Sequence[Callable[[], Any]]) -> Worker:
        ours, theirs = context.Pipe(duplex=True)
        inherited = []
        if context.get_start_method() == "fork":
            inherited = [ours, *(worker.channel.connection for worker in self.workers)]
        process = context.Process(
            target=self._worker_main,
            args=(theirs, pickled(list(factories), "env: it"), rows.start, inherited),
            name=f"maze-env-worker-{index}",
        )
        with _without_main_module():
            process.start()
        theirs.close()
        return Worker(index, rows, process, Channel(ours))

    def share(self, arrays: SharedArrays) -> None:
        """Gives all workers access to the memory that steps are exchanged through.

        :param arrays: The memory.
        """
        for worker in self.workers:
            with self._watching(worker, "start"):
                worker.channel.send(messages.RESULT, (self._n_envs, worker.rows.start, worker.rows.stop))
                arrays.send_to(worker.channel.connection, worker.process.pid)
        self.gather("start")

    def run(self, code: bytes, call: str, payload: Any = None) -> list[Any]:
        """Has all workers do something, at the same time.

        :param code: What.
        :param call: Its name, for error messages.
        :param payload: What belongs to it.
        :return: What each worker reports; None where it has nothing to tell.
        """
        self._check_open()
        content = None if payload is None else messages.dumps(payload)
        for worker in self.workers:
            with self._watching(worker, call):
                worker.channel.send_pickled(code, content)
        return self.gather(call)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of all workers' environment batches.

        :param method: Name of the method.
        :param arguments: Its arguments.
        :return: What each worker returns.
        """
        return self.call_each(method, [arguments] * len(self.workers))

    def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of all workers' environment batches.

        :param method: Name of the method.
        :param arguments: The arguments of each worker's.
        :return: What each worker returns.
        """
        self._check_open()
        for worker, of_worker in zip(self.workers, arguments, strict=True):
            with self._watching(worker, method):
                worker.channel.send(messages.CALL, (method, of_worker))
        return self.gather(method)

    def gather(self, call: str) -> list[Any]:
        """Waits for all workers' answers; the first failure of any of them ends them all and is raised.

        :param call: What they were asked to do.
        """
        try:
            return self._gather(call)
        except BaseException:  # an interrupt leaves answers in the pipes that later calls would take for theirs
            self.close()
            raise

    @timed(WAITING)
    def _events(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """What has come over the pipes.

        :param timeout: Milliseconds to wait for it; `None`: any time.
        """
        try:
            return self._poll.poll(timeout)
        except BaseException:
            self.close()
            raise

    def _gather(self, call: str) -> list[Any]:
        replies: list[Any] = [None] * len(self.workers)
        pending = set(range(len(self.workers)))
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while pending:
            events = self._events(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                self._fail_hanging(self.workers[min(pending)], call)
            for fd, event in events:
                worker = self._worker_of[fd]
                if event & select.POLLIN and fd == worker.channel.fd and worker.index in pending:
                    replies[worker.index] = self._receive(worker, call)
                    pending.remove(worker.index)
                elif worker.index not in pending or not worker.channel.connection.poll(0):
                    self._fail_dead(worker, call)
        return replies

    def close(self) -> None:
        """End all workers, by force where they do not end by themselves; nothing happens the second time."""
        self._finalizer()

    @timed(TRANSFER)
    def _receive(self, worker: Worker, call: str) -> Any:
        with self._watching(worker, call):
            code, payload = worker.channel.receive()
            if code == messages.FAILED:
                self._fail_raised(worker, call, payload)
            return payload

    @contextmanager
    def _watching(self, worker: Worker, call: str) -> Iterator[None]:
        try:
            yield
        except _GONE:
            self._fail_dead(worker, call)

    def _check_open(self) -> None:
        if not self._finalizer.still_active():
            raise WorkerError(
                "This vector environment has been closed (by `close`, or because a worker failed or a call was "
                "interrupted); make a new one."
            )

    def _fail_raised(self, worker: Worker, call: str, failure: Failure) -> None:
        self.close()
        cause = exception_of(failure)
        advice = f"That was in {failure.place}." if failure.place else ""
        error = self._error(describe_failure(failure), worker, call, advice=advice, worker_traceback=failure.traceback)
        if isinstance(cause, self._self_explanatory):
            raise type(cause)(str(cause)) from error
        raise error from cause if isinstance(cause, Exception) else None

    def _fail_dead(self, worker: Worker, call: str) -> None:
        # an exception may have been reported just before the process ended, after other messages nobody has read yet
        with suppress(*_GONE):
            while worker.channel.connection.poll(0):
                code, payload = worker.channel.receive()
                if code == messages.FAILED:
                    self._fail_raised(worker, call, payload)
        worker.process.join(1.0)
        exit_code = worker.process.exitcode
        self.close()
        what, advice = describe_exit(exit_code)
        raise self._error(what, worker, call, exit_code=exit_code, advice=advice)

    def _fail_hanging(self, worker: Worker, call: str) -> None:
        self.close()
        what = f"did not answer within {self._timeout:g} seconds"
        raise self._error(
            what,
            worker,
            call,
            advice="Raise `timeout` (`runner.env_timeout` of a run) if an environment may take that long.",
        )

    @staticmethod
    def _error(what: str, worker: Worker, call: str, **details: Any) -> EnvWorkerError:
        env_indices = range(worker.rows.start, worker.rows.stop)
        return EnvWorkerError(what, worker.index, env_indices, worker.process.pid, call, **details)


def _context(start_method: str | None, modules: Sequence[str]) -> Any:
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
    # The server imports the worker once for all; it must not import the user's script, and torch only if a worker does.
    preload(context, modules)
    return context


def _worker_count(n_workers: int | None, n_envs: int) -> int:
    if n_envs == 0:
        raise ValueError("A vector environment needs at least one environment factory.")
    if n_workers is None:
        affinity = getattr(os, "sched_getaffinity", None)
        n_workers = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    if n_workers < 1:
        raise ConfigError(f"n_workers: expected at least 1, found {n_workers}.")
    return min(n_workers, n_envs)


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Keeps a starting process from importing the user's script again.

    Factories travel by value, so no worker needs it: scripts need no `__main__` guard, and what they import at their
    top (torch, usually) costs the workers nothing.
    """
    main = sys.modules["__main__"]
    stand_in = types.ModuleType("__main__")
    stand_in.__spec__ = None
    sys.modules["__main__"] = stand_in
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _end_workers(workers: list[Worker]) -> None:
    """End processes: ask, then kill. Returns within five seconds."""
    for worker in workers:
        with suppress(*_GONE, BlockingIOError):  # a worker that has stopped reading is ended by force
            os.set_blocking(worker.channel.fd, False)
            worker.channel.send(messages.CLOSE)
    _wait(workers, _CLOSE_SECONDS)
    for worker in workers:
        if worker.process.is_alive():
            worker.process.kill()
    _wait(workers, 1.0)
    for worker in workers:
        _report_late_failure(worker)
        worker.channel.close()


def _wait(workers: list[Worker], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))


def _report_late_failure(worker: Worker) -> None:
    """Logs what went wrong while the environments were being closed."""
    with suppress(OSError, EOFError):  # the last message may have been cut short
        while worker.channel.connection.poll(0):
            code, payload = worker.channel.receive()
            if code == messages.FAILED:
                logger.warning("environment worker %d, while closing: %s", worker.index, payload.text)
