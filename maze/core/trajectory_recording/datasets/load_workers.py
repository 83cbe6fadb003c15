"""Processes that load trajectories, one pipe each."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle

from maze.core.errors import MazeError, WorkerError
from maze.core.utils.pickling import pickled
from maze.core.utils.safe_pickle import register_safe_types, registered_safe_types
from maze.utils.exception_report import ExceptionReport
from maze.utils.process import become_worker, end, exit_text

CLOSE_TIMEOUT = 5.0
"""Seconds that a worker gets to leave."""


@dataclass
class _Worker:
    """The parent's view of a worker process."""

    index: int
    process: BaseProcess
    connection: Connection
    sources: Sequence[Any]
    n_done: int = 0

    def receive(self) -> Any:
        """What the worker made of its next source; a worker that failed or died raises."""
        place = f"Data loading worker {self.index} (pid {self.process.pid})"
        source = _name(self.sources[self.n_done])
        try:
            is_result, value = cloudpickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.process.join(CLOSE_TIMEOUT)
            how = exit_text(self.process.exitcode)
            raise WorkerError(f"{place} {how} while it loaded {source}. Out of memory, perhaps?") from error
        if not is_result:
            if isinstance(value.exception, MazeError):
                raise value.exception
            raise WorkerError(f"{place} failed while it loaded {source}:\n{value.traceback}")
        self.n_done += 1
        return value


class _Pipe:
    """A pipe that looks like a queue; unlike a shared one, it cannot be left locked by a dying neighbour."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, item: Any) -> None:
        self._connection.send_bytes(cloudpickle.dumps((True, item)))


def load_in_processes(
    run: Callable[..., None],
    sources: Sequence[Any],
    n_workers: int,
    env_factory: Callable[[], Any] | None,
    trajectory_processor: Any,
    reader: Any,
) -> Iterator[Any]:
    """Has the sources loaded by several processes; the results come in the order of the sources.

    :param run: What a worker runs: `DataLoadWorker.run`.
    :param sources: Files or trajectories, dealt out in turn.
    """
    context = multiprocessing.get_context("fork" if _can_fork() else "spawn")
    workers: list[_Worker] = []
    try:
        for index in range(min(n_workers, len(sources))):
            share = sources[index::n_workers]
            arguments = (env_factory, share, trajectory_processor, reader, registered_safe_types())
            workers.append(_start(context, index, share, run, arguments))
        for position in range(len(sources)):
            yield workers[position % len(workers)].receive()
    finally:
        _close(workers)


def _can_fork() -> bool:
    """Forking is a matter of milliseconds, but not safe beside other threads."""
    return sys.platform == "linux" and threading.active_count() == 1


def _start(context: Any, index: int, share: Sequence[Any], run: Callable[..., None], arguments: Any) -> _Worker:
    payload = pickled((run, arguments), "`conversion_env_factory` or trajectories: it")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(payload, sender), daemon=True)
    with warnings.catch_warnings():
        # Python counts the idle threads of numerical libraries, which survive a fork well.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        process.start()
    sender.close()
    return _Worker(index, process, receiver, share)


def _work(payload: bytes, sender: Connection) -> None:
    become_worker()
    try:
        run, (env_factory, share, processor, reader, safe_types) = cloudpickle.loads(payload)
        register_safe_types(*safe_types)
        run(env_factory, share, _Pipe(sender), processor, reader)
    except Exception as error:
        sender.send_bytes(cloudpickle.dumps((False, ExceptionReport(error))))


def _close(workers: Sequence[_Worker]) -> None:
    """Ends all workers, whatever state they are in."""
    for worker in workers:
        if worker.n_done < len(worker.sources):
            worker.process.kill()
    for worker in workers:
        end(worker.process, CLOSE_TIMEOUT)
        worker.connection.close()


def _name(source: Any) -> str:
    return str(getattr(source, "id", source))
