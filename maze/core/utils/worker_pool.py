"""Worker processes, seen from their parent: start, calls, reports, failures and shutdown.

Vector environments, IMPALA's actors, evolution strategies and parallel rollouts use it, each with a
:class:`~maze.core.utils.worker_process.Host` of its own.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.reduction import send_handle
from multiprocessing.util import Finalize
from typing import Any, NoReturn

from maze.core.annotations import override
from maze.core.errors import ConfigError, MazeError, NonFiniteError, WorkerError
from maze.core.utils import worker_process as messages
from maze.core.utils.pickling import pickled
from maze.core.utils.update_profile import TRANSFER, WAITING, timed
from maze.core.utils.worker_process import GONE, Channel, Failure, Host, exception_of, run_worker
from maze.utils.process import exit_text, preload

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 2.0
"""Seconds that workers may take to close their environments before they are killed."""
_ADVICE_FOR_SIGNALS = {
    -signal.SIGKILL: "The operating system may have run out of memory; fewer environments or workers need less of it.",
    -signal.SIGSEGV: "Native code of an environment crashed.",
}


class EnvWorkerError(WorkerError):
    """A worker process failed.

    :param text: The message.
    :param worker_index: Which worker.
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
    """Its environments among all."""
    process: Any
    channel: Channel
    """The parent's end of its pipe."""


class WorkerPool:
    """Worker processes, each of which serves a host. The first failure of a worker is raised and ends all workers.

    After the start, each worker answers to `open`: :meth:`gather` waits for it.

    :param hosts: What each worker serves.
    :param rows: The environments of each worker among all, for messages; `None`: one each.
    :param start_method: `forkserver`, `spawn` or `fork`; `None`: `forkserver` if available.
    :param timeout: Seconds that a call may take; `None`: no limit.
    """

    self_explanatory: tuple[type[MazeError], ...] = (NonFiniteError,)
    """Errors of workers whose messages name their origin; they are raised unchanged."""

    def __init__(
        self,
        hosts: Sequence[Host],
        rows: Sequence[slice] | None = None,
        start_method: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self.workers: list[Worker] = []
        self._finalizer = Finalize(self, _end_workers, args=(self.workers,), exitpriority=10)
        self._timeout = timeout
        context = process_context(start_method, [messages.__name__, type(hosts[0]).__module__])
        try:
            for host, of_worker in zip(hosts, rows or env_slices(len(hosts), len(hosts)), strict=True):
                self.workers.append(self._start(context, host, of_worker))
        except BaseException:
            self.close()
            raise
        self._poll = select.poll()
        self._worker_of: dict[int, Worker] = {}
        for worker in self.workers:
            for fd in (worker.channel.fd, worker.process.sentinel):
                self._worker_of[fd] = worker
                self._poll.register(fd, select.POLLIN)

    def _start(self, context: Any, host: Host, rows: slice) -> Worker:
        index = len(self.workers)
        is_fork = context.get_start_method() == "fork"
        ours, theirs = context.Pipe(duplex=True)
        inherited = [ours, *(worker.channel.connection for worker in self.workers)] if is_fork else []
        process = context.Process(
            target=run_worker,
            args=(theirs, host if is_fork else pickled(host, "env: it"), inherited),
            name=f"maze-worker-{index}",
        )
        with _starting(is_fork):
            process.start()
        theirs.close()
        return Worker(index, rows, process, Channel(ours))

    @property
    def is_open(self) -> bool:
        """Whether the workers are running."""
        return bool(self._finalizer.still_active())

    def call(self, method: str, *arguments: Any, name: str = "", fd: int | None = None) -> list[Any]:
        """Call a method of all hosts with the same arguments, at the same time.

        :param method: Name of the method.
        :param arguments: Its arguments.
        :param name: Name of the call in messages; by default that of the method.
        :param fd: A file descriptor that follows the arguments.
        :return: Results by worker.
        """
        self._check_open()
        code, content = messages.SHORT_CALLS.get(method), None
        if code is None:
            code, content = messages.CALL, messages.dumps((method, arguments, fd is not None))
        for worker in self.workers:
            self._send(worker, code, content, name or method, fd)
        return self.gather(name or method)

    def call_each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], name: str = "", fd: int | None = None
    ) -> list[Any]:
        """Call a method of all hosts, at the same time.

        :param method: Name of the method.
        :param arguments: Arguments by host.
        :param name: Name of the call in messages.
        :param fd: A file descriptor that follows the arguments.
        :return: Results by worker.
        """
        self._check_open()
        contents = [messages.dumps((method, of_worker, fd is not None)) for of_worker in arguments]
        for worker, content in zip(self.workers, contents, strict=True):
            self._send(worker, messages.CALL, content, name or method, fd)
        return self.gather(name or method)

    def tell(
        self, method: str, *arguments: Any, workers: Sequence[Worker] | None = None, fd: int | None = None
    ) -> None:
        """Call a method of hosts without waiting for them; it is not answered.

        :param method: Name of the method.
        :param arguments: Its arguments.
        :param workers: The workers of the hosts; `None`: all.
        :param fd: A file descriptor that follows the arguments.
        """
        self._check_open()
        content = messages.dumps((method, arguments, fd is not None))
        for worker in self.workers if workers is None else workers:
            self._send(worker, messages.TELL, content, method, fd)

    def gather(self, call: str) -> list[Any]:
        """Wait for an answer of each worker.

        :param call: The call that they answer, for messages.
        """
        try:
            return self._gather(call)
        except BaseException:  # after an interrupt, later calls would read the remaining answers
            self.close()
            raise

    def reports(self, wait: bool, call: str = "rollout") -> list[tuple[Worker, Any]]:
        """Return what hosts have reported, in the order in which it arrived.

        :param wait: Whether to wait for a report if there is none.
        :param call: Work of the hosts, for messages.
        """
        self._check_open()
        received: list[tuple[Worker, Any]] = []
        timeout = None if wait else 0
        while events := self._events(timeout):
            for fd, _ in events:
                worker = self._worker_of[fd]
                if fd == worker.channel.fd:
                    received.append((worker, self._receive(worker, call)))
                elif not worker.channel.connection.poll(0):
                    self._fail_dead(worker, call)
            timeout = 0
        return received

    def close(self) -> None:
        """End all workers, by force where they do not end by themselves; a second call does nothing."""
        self._finalizer()

    def _send(self, worker: Worker, code: bytes, content: bytes | None, call: str, fd: int | None) -> None:
        try:
            worker.channel.send_pickled(code, content)
            if fd is not None:
                send_handle(worker.channel.connection, fd, worker.process.pid)
        except GONE:
            self._fail_dead(worker, call)

    @timed(WAITING)
    def _events(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """Wait for messages and return the events of the pipes.

        :param timeout: Milliseconds; `None`: no limit.
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

    @timed(TRANSFER)
    def _receive(self, worker: Worker, call: str) -> Any:
        try:
            code, payload = worker.channel.receive()
        except GONE:
            self._fail_dead(worker, call)
        if code == messages.FAILED:
            self._fail_raised(worker, call, payload)
        return payload

    def _check_open(self) -> None:
        if not self.is_open:
            raise WorkerError(
                "This vector environment is closed (by `close`, or because a worker failed or a call was interrupted). "
                "Make a new one."
            )

    def _fail_raised(self, worker: Worker, call: str, failure: Failure) -> NoReturn:
        self.close()
        cause = exception_of(failure)
        where = f" in {failure.place}" if failure.place else ""
        what = f"raised {failure.text.rstrip('.')}{where}"
        error = self.error(what, worker, call, trace=failure.traceback)
        if isinstance(cause, self.self_explanatory):
            raise cause from error
        raise error from cause if isinstance(cause, Exception) else None

    def _fail_dead(self, worker: Worker, call: str) -> NoReturn:
        # the process may have reported an exception before it ended, after messages that are not read yet
        with suppress(*GONE):
            while worker.channel.connection.poll(0):
                code, payload = worker.channel.receive()
                if code == messages.FAILED:
                    self._fail_raised(worker, call, payload)
        worker.process.join(1.0)
        exit_code = worker.process.exitcode
        self.close()
        if exit_code is None:
            raise self.error("closed its pipe but is still running", worker, call)
        advice = "An environment, or a library it uses, ended the process."
        if exit_code < 0:
            advice = _ADVICE_FOR_SIGNALS.get(exit_code, "")
        raise self.error(exit_text(exit_code), worker, call, advice)

    def _fail_hanging(self, worker: Worker, call: str) -> NoReturn:
        self.close()
        what = f"did not answer within {self._timeout:g} seconds"
        advice = "Raise `timeout` (`runner.env_timeout` of a run) if an environment may take that long."
        raise self.error(what, worker, call, advice)

    def error(self, what: str, worker: Worker, call: str, advice: str = "", trace: str = "") -> WorkerError:
        """Return the error that names a failed worker.

        :param what: What happened to it.
        :param worker: The worker.
        :param call: The call it was in.
        :param advice: What to do about it.
        :param trace: The original traceback, if there is one.
        """
        indices = list(range(worker.rows.start, worker.rows.stop))
        envs = f"environments {indices[0]} to {indices[-1]}" if len(indices) > 1 else f"environment {indices[0]}"
        pid = worker.process.pid
        text = f"environment worker {worker.index} ({envs}, pid {pid}) {what} during `{call}`."
        lines = [text, advice, trace and f"Traceback in the worker:\n{trace}"]
        return EnvWorkerError("\n".join(filter(None, lines)), worker.index, indices, pid, call)


class ShareWorkers(WorkerPool):
    """Worker processes that share items: each worker reports a result for every n-th item.

    :param noun: Name of the workers in messages.
    :param hosts: Host of each worker.
    :param n_items: Number of items.
    :param item: Text that names an item by its number, for messages (`in episode 3`).
    """

    self_explanatory = (MazeError,)

    def __init__(self, noun: str, hosts: Sequence[Host], n_items: int, item: Callable[[int], str]) -> None:
        self._noun, self._n_items, self._item = noun, n_items, item
        self._n_done = [0] * len(hosts)
        # Forking takes milliseconds and needs no pickling, but it is not safe with other threads.
        can_fork = sys.platform == "linux" and threading.active_count() == 1
        super().__init__(hosts, start_method="fork" if can_fork else "spawn")

    def results(self, method: str) -> Iterator[tuple[int, Any]]:
        """Yield the number and the result of each item in the order of arrival; then end the workers.

        :param method: Method of the hosts that reports the results of its items in their order.
        """
        try:
            self.gather("start")
            self.tell(method)
            while sum(self._n_done) < self._n_items:
                for worker, result in self.reports(wait=True):
                    number = self._number(worker)
                    self._n_done[worker.index] += 1
                    yield number, result
        finally:
            self.close()

    def _number(self, worker: Worker) -> int:
        return worker.index + len(self._n_done) * self._n_done[worker.index]

    @override(WorkerPool)
    def error(self, what: str, worker: Worker, call: str, advice: str = "", trace: str = "") -> WorkerError:
        item = self._item(min(self._number(worker), self._n_items - 1))
        n_done = self._n_done[worker.index]
        text = f"{self._noun} {worker.index} (pid {worker.process.pid}) {what} {item} (after {n_done} finished)."
        return WorkerError("\n".join(filter(None, (text, advice, trace))))


class SharedMemory:
    """A mapped file without a name, so it cannot remain on disk; the mapping ends with the last array on it."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.map = mmap.mmap(fd, size)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when the interpreter ends
        close(self.fd)


def map_memory(size: int, fd: int | None = None) -> SharedMemory:
    """Map memory that other processes can map as well. It is zero-initialised, and pages are allocated on first access.

    :param size: Number of bytes.
    :param fd: Memory of another process; `None`: create new memory.
    """
    size = max(size, mmap.PAGESIZE)
    if fd is None:
        fd = _anonymous_file()
        os.ftruncate(fd, size)
    return SharedMemory(fd, size)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("maze")
    fd, path = tempfile.mkstemp(prefix="maze-")
    os.unlink(path)
    return fd


def n_available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def env_slices(n_envs: int, n_workers: int) -> Iterator[slice]:
    """Yield consecutive environments for each worker, as even as possible.

    :param n_envs: Number of environments.
    :param n_workers: Number of workers, at most `n_envs`.
    """
    bounds = [index * n_envs // n_workers for index in range(n_workers + 1)]
    for start, stop in pairwise(bounds):
        yield slice(start, stop)


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
    """End processes: ask, then kill. Returns within five seconds."""
    for worker in workers:
        with suppress(*GONE, BlockingIOError):  # a worker that does not read is killed below
            os.set_blocking(worker.channel.fd, False)
            worker.channel.send(messages.CLOSE)
    _wait(workers, _CLOSE_SECONDS)
    for worker in workers:
        if worker.process.is_alive():
            worker.process.kill()
    _wait(workers, 1.0)
    for worker in workers:
        worker.channel.close()


def _wait(workers: list[Worker], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
