"""How the jobs of a sweep are run: one interface for all launchers."""

from __future__ import annotations

import time
from typing import Protocol

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher

from maze.cli.local_launcher import FinishedJob, LocalLauncher
from maze.cli.wrapper_overrides import for_hydra
from maze.core.errors import WorkerError


class Jobs(Protocol):
    """Runs jobs."""

    @property
    def n_running(self) -> int:
        """Number of jobs that were started and whose end was not reported yet."""

    def start(self, number: int, overrides: list[str]) -> None:
        """Starts a job; numbers go up."""

    def wait(self, timeout: float | None = None) -> list[FinishedJob]:
        """Waits for jobs to end.

        :param timeout: Seconds, at most; `None`: any time.
        """

    def stop(self, number: int) -> None:
        """Asks a job to end; a training saves, and its end is reported as usual."""

    def close(self) -> None:
        """Ends the jobs that still run."""


class BatchedJobs:
    """Jobs of launchers that know batches only: started jobs wait for :meth:`wait`, which runs them all.

    :param launcher: Any launcher of Hydra.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._waiting: list[tuple[int, list[str]]] = []

    @property
    def n_running(self) -> int:
        return len(self._waiting)

    def start(self, number: int, overrides: list[str]) -> None:
        self._waiting.append((number, overrides))

    def stop(self, number: int) -> None:
        """They end before anything is heard of them."""

    def wait(self, timeout: float | None = None) -> list[FinishedJob]:
        batch, self._waiting = self._waiting, []
        job_overrides = [for_hydra(overrides) for _, overrides in batch]
        start = time.monotonic()
        try:
            returns = self._launcher.launch(job_overrides, initial_job_idx=batch[0][0])
        except Exception as error:
            failure = WorkerError(f"{type(self._launcher).__name__}: {type(error).__name__}: {error}")
            returns = [JobReturn(status=JobStatus.FAILED, _return_value=failure)] * len(batch)
        duration = time.monotonic() - start
        return [FinishedJob(number, result, duration) for (number, _), result in zip(batch, returns, strict=True)]

    def close(self) -> None:
        self._waiting.clear()


def open_jobs(launcher: Launcher, batch_size: int | None) -> tuple[Jobs, int]:
    """The jobs of a launcher, and how many of them should be started before waiting.

    :param batch_size: For launchers that know batches only.
    """
    if isinstance(launcher, LocalLauncher):
        jobs: Jobs = launcher.open()
        return jobs, launcher.n_jobs
    is_sequential = type(launcher).__module__.startswith("hydra._internal.")
    return BatchedJobs(launcher), 1 if is_sequential else (batch_size or 10**9)
