"""Runs the jobs of a sweep on Ray: `hydra/launcher=ray`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import cloudpickle
from hydra.core.utils import JobReturn, JobStatus

from maze.cli.local_launcher import GRACE_PERIOD, FinishedJob, LocalLauncher, run_packed_job
from maze.core.errors import WorkerError
from maze.train.parallelization.on_ray.session import RaySession, require_cpus, require_ray

log = logging.getLogger(__name__)


class RayLauncher(LocalLauncher):
    """Distributes jobs over the machines of a cluster of Ray, one process for each job.

    Run directories are below the sweep's, on a file system that all machines share.

    :param address: Where Ray is: `auto` or `<host>:<port>`; `None`: one is started on this machine.
    :param n_jobs: Number of jobs at a time; -1: as many as there is room for.
    :param cpus_per_job: CPUs that a job needs.
    :param gpus_per_job: GPUs that a job needs; parts are possible.
    :param ray_config: Further arguments of `ray.init`.
    """

    def __init__(
        self,
        address: str | None = None,
        n_jobs: int = -1,
        cpus_per_job: float = 1,
        gpus_per_job: float = 0,
        ray_config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(n_jobs)
        self._is_bounded = n_jobs > 0
        self.cpus_per_job, self.gpus_per_job = cpus_per_job, gpus_per_job
        config = {**(ray_config or {}), "address": address}
        self._session = RaySession(config, cpus_per_job, key="hydra.launcher.address")

    def _open_jobs(self) -> RayJobs:
        self._session.__enter__()
        advice = "Ask for fewer: hydra.launcher.cpus_per_job."
        require_cpus(self.cpus_per_job, "hydra.launcher: a job", advice)
        if not self._is_bounded:
            self.n_jobs = max(1, int(self._session.n_cpus / max(self.cpus_per_job, 0.01)))
        return RayJobs(self)

    def close(self) -> None:
        """Ends Ray, where it was started for the sweep."""
        self._session.__exit__()


class RayJobs:
    """Jobs that run beside each other; leaving the context ends those that still run.

    :param launcher: Describes the jobs.
    """

    def __init__(self, launcher: RayLauncher) -> None:
        self._launcher = launcher
        self._ray = require_ray()
        self._task = self._ray.remote(
            num_cpus=launcher.cpus_per_job, num_gpus=launcher.gpus_per_job, max_retries=0, max_calls=1
        )(run_packed_job)
        self._jobs: dict[Any, tuple[int, float]] = {}

    def __enter__(self) -> RayJobs:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
        self._launcher.close()

    @property
    def n_running(self) -> int:
        return len(self._jobs)

    def start(self, number: int, overrides: list[str]) -> None:
        ref = self._task.remote(self._launcher.payload(number, overrides), os.getcwd())
        self._jobs[ref] = number, time.monotonic()

    def stop(self, number: int) -> None:
        """Asks a job to end."""
        for ref, (other, _) in self._jobs.items():
            if other == number:
                self._ray.cancel(ref, force=False)

    def wait(self, timeout: float | None = None) -> list[FinishedJob]:
        """Waits until at least one of the running jobs has ended, or so many seconds."""
        ready, _ = self._ray.wait(list(self._jobs), timeout=timeout)
        return [self._finish(ref) for ref in ready]

    def close(self) -> None:
        """Asks the running jobs to end, so that trainings save, and ends those that do not."""
        refs = list(self._jobs)
        for is_forced in (False, True):
            for ref in refs:
                with suppress(Exception):  # it may have ended meanwhile
                    self._ray.cancel(ref, force=is_forced)
            if refs and not is_forced:
                _, refs = self._ray.wait(refs, num_returns=len(refs), timeout=GRACE_PERIOD)
        self._jobs.clear()

    def _finish(self, ref: Any) -> FinishedJob:
        number, started = self._jobs.pop(ref)
        try:
            job_return: JobReturn = cloudpickle.loads(self._ray.get(ref))
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().split("\n", 1)[0]
            failure = WorkerError(f"The process of job {number} is lost: {reason}")
            job_return = JobReturn(status=JobStatus.FAILED, _return_value=failure)
        return FinishedJob(number, job_return, time.monotonic() - started)
