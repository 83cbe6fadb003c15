"""What a vector environment raises when a worker process fails."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from maze.core.errors import WorkerError
from maze.train.parallelization.vector_env.channel import Failure


class EnvWorkerError(WorkerError):
    """A worker process of a vector environment failed.

    :param what: What happened to it.
    :param worker_index: Which worker.
    :param env_indices: The environments it stepped.
    :param pid: Its process id.
    :param call: The call it was in.
    :param exit_code: Exit code of the process; negative: the signal that killed it; None: still running.
    :param advice: What to do about it.
    :param worker_traceback: The original traceback, if there is one.
    """

    def __init__(
        self,
        what: str,
        worker_index: int,
        env_indices: Sequence[int],
        pid: int | None,
        call: str,
        exit_code: int | None = None,
        advice: str = "",
        worker_traceback: str | None = None,
    ) -> None:
        self.what = what
        self.worker_index = worker_index
        self.env_indices = list(env_indices)
        self.pid = pid
        self.call = call
        self.exit_code = exit_code
        self.advice = advice
        self.worker_traceback = worker_traceback
        super().__init__(self._message())

    def __reduce__(self) -> tuple[type[EnvWorkerError], tuple[object, ...]]:
        arguments = (self.what, self.worker_index, self.env_indices, self.pid, self.call, self.exit_code)
        return type(self), (*arguments, self.advice, self.worker_traceback)

    def _message(self) -> str:
        first, last = self.env_indices[0], self.env_indices[-1]
        envs = f"environment {first}" if first == last else f"environments {first} to {last}"
        lines = [f"environment worker {self.worker_index} ({envs}, pid {self.pid}) {self.what} during `{self.call}`."]
        if self.advice:
            lines.append(self.advice)
        if self.worker_traceback:
            lines.append(f"Traceback in the worker:\n{self.worker_traceback}")
        return "\n".join(lines)


def describe_exit(exit_code: int | None) -> tuple[str, str]:
    """How a process ended, in words, and what may be behind it.

    :param exit_code: Exit code; negative: the signal that killed the process.
    """
    if exit_code is None:
        return "closed its pipe but still runs", ""
    if exit_code >= 0:
        return f"exited with code {exit_code}", "An environment, or a library it uses, ended the process."
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "unknown"
    advice = {
        "SIGKILL": "The operating system may have run out of memory; fewer environments or workers need less of it.",
        "SIGSEGV": "Native code of an environment crashed.",
    }.get(name, "")
    return f"was killed by signal {-exit_code} ({name})", advice


def describe_failure(failure: Failure) -> str:
    """What went wrong, for :class:`EnvWorkerError`.

    :param failure: What the worker reported.
    """
    where = "" if failure.env_index is None else f" in environment {failure.env_index}"
    return f"raised {failure.text.rstrip('.')}{where}"
