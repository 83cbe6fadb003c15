"""Child processes that return the result or the exception of their function."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.process import BaseProcess
from typing import Any

from maze.console.streams import let_console_last
from maze.core.errors import WorkerError
from maze.utils.exception_report import ExceptionReport


def depend_on_parent() -> None:
    """Leave signals and closed consoles to the parent; call it in a worker process.

    Signals often reach the whole process group. The parent may finish an update first, for which it needs its workers.
    It ends them by `kill`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    let_console_last()


def use_one_thread() -> None:
    """Set one thread for torch and NumPy; call it in a worker process, where threads of several processes compete."""
    if set_num_threads := getattr(sys.modules.get("torch"), "set_num_threads", None):  # None: another thread imports it
        set_num_threads(1)
    _openblas_with_one_thread()


def one_numpy_thread() -> AbstractContextManager[Any]:
    """Return a context in which NumPy multiplies matrices with one thread.

    Threads of OpenBLAS wait for each other actively: beside other work, the products of an acting policy take several
    times the CPU time. The environment variables `OMP_NUM_THREADS` and `OPENBLAS_NUM_THREADS` decide where they are
    set.
    """
    is_set = not {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}.isdisjoint(os.environ)
    return nullcontext() if is_set else _openblas_with_one_thread()


def _openblas_with_one_thread() -> AbstractContextManager[Any]:
    """Limit OpenBLAS at once, and until the end of the context."""
    from threadpoolctl import ThreadpoolController

    limited: AbstractContextManager[Any] = ThreadpoolController().select(internal_api="openblas").limit(limits=1)
    return limited


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Return a context that restores the handlers of SIGINT and SIGTERM at its end."""
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)


def version_of(package: str) -> str | None:
    """Return the version of a package; `None`: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Process(multiprocessing.Process):
    """Run a function in a child process and return its result or exception.

    :param target: The function.
    :param args: Its positional arguments.
    :param kwargs: Its keyword arguments.
    """

    def __init__(
        self, target: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(target=target, args=tuple(args), kwargs=dict(kwargs or {}))
        self._receiver, self._sender = multiprocessing.Pipe(duplex=False)
        self._outcome: tuple[bool, Any] | None = None

    def start(self) -> None:
        super().start()
        # Only the child may hold the sending end, or its death would not be seen.
        self._sender.close()

    def run(self) -> None:
        try:
            target: Callable[..., Any] = self._target  # type: ignore[attr-defined]
            result = target(*self._args, **self._kwargs)  # type: ignore[attr-defined]
            outcome = pickle.dumps((True, result))
        except Exception as exception:
            outcome = pickle.dumps((False, ExceptionReport(exception)))
        self._sender.send_bytes(outcome)
        self._sender.close()

    def result(self) -> Any:
        """Wait for the function to finish and return its result.

        :raises BaseException: The exception of the function; its original traceback is the cause.
        :raises WorkerError: The process ended without result or exception.
        """
        has_returned, value = self._wait()
        if has_returned:
            return value
        raise value.exception from WorkerError(f"Traceback of process {self.pid}:\n{value.traceback}")

    def exception(self) -> BaseException | None:
        """Wait for the function to finish and return its exception; `None` if it returned."""
        has_returned, value = self._wait()
        return None if has_returned else value.exception

    def _wait(self) -> tuple[bool, Any]:
        if self._outcome is None:
            try:
                # Before joining: a child that has much to send ends only when it is read.
                self._outcome = pickle.loads(self._receiver.recv_bytes())
            except EOFError:
                self.join()
                error = WorkerError(f"Process {self.pid} {exit_text(self.exitcode)} before its function finished.")
                self._outcome = (False, ExceptionReport(error))
            self._receiver.close()
            self.join()
        assert self._outcome is not None
        return self._outcome


def end(process: BaseProcess, timeout: float) -> None:
    """Wait for a process; kill it after a timeout, and wait for its end.

    :param process: The process.
    :param timeout: Seconds; at most 0: it is killed at once if it is still running.
    """
    process.join(max(0.0, timeout))
    if process.is_alive():
        process.kill()
        process.join()


def exit_text(exit_code: int | None) -> str:
    """Describe how a process ended, as the predicate of a sentence.

    :param exit_code: The exit code; a negative one is the number of the signal that killed the process.
    """
    if exit_code is not None and exit_code < 0:
        name = next((known.name for known in signal.Signals if known == -exit_code), "unknown")
        return f"was killed by signal {-exit_code} ({name})"
    return f"exited with code {exit_code}"


def preload(context: Any, modules: Iterable[str]) -> None:
    """Import modules once in the fork server, and make it ignore signals to its process group.

    A signal to the whole group would end the fork server, and multiprocessing would then regard its processes as dead.
    The parent ends them, after the update that it may have to finish first.

    :param context: A multiprocessing context.
    :param modules: Modules to import.
    """
    context.set_forkserver_preload([__name__, *modules])


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # processes of this server may belong to other code, which expects the default handler
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
