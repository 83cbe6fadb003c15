"""Launcher that runs the jobs of a sweep on Ray: `hydra/launcher=ray`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import cloudpickle
from hydra.core.utils import JobReturn

from maze.cli.local_launcher import GRACE_PERIOD, Job, Jobs, LocalLauncher, lost_job, run_packed_job
from maze.core.annotations import override
from maze.train.parallelization.on_ray.session import n_cpus, ray_session, require_cpus, require_ray

log = logging.getLogger(__name__)


class RayLauncher(LocalLauncher):
    """Distributes jobs over the machines of a Ray cluster, one process for each job.

    Run directories are below the sweep's, on a file system that all machines share.

    :param address: Address of the cluster: `auto` or `<host>:<port>`; `None`: start Ray on this machine.
    :param n_jobs: Number of concurrent jobs; -1: as many as the cluster's CPUs allow.
    :param cpus_per_job: CPUs per job.
    :param gpus_per_job: GPUs per job; may be fractional.
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
        self._ray_config = {**(ray_config or {}), "address": address}

    @override(LocalLauncher)
    def _open_jobs(self) -> RayJobs:
        with ExitStack() as session:
            session.enter_context(ray_session(self._ray_config, self.cpus_per_job, key="hydra.launcher.address"))
            require_cpus(self.cpus_per_job, "hydra.launcher: a job", "Reduce hydra.launcher.cpus_per_job.")
            if not self._is_bounded:
                self.n_jobs = max(1, int(n_cpus() / max(self.cpus_per_job, 0.01)))
            return RayJobs(self, session.pop_all())


class RayJobs(Jobs):
    """Jobs in processes started by Ray.

    :param launcher: The launcher of the jobs.
    :param session: Closes the connection to Ray.
    """

    def __init__(self, launcher: RayLauncher, session: ExitStack) -> None:
        super().__init__(launcher)
        self._ray, self._session = require_ray(), session
        self._task = self._ray.remote(
            num_cpus=launcher.cpus_per_job, num_gpus=launcher.gpus_per_job, max_retries=0, max_calls=1
        )(run_packed_job)

    @override(Jobs)
    def close(self) -> None:
        refs = list(self._jobs)
        for is_forced in (False, True):
            for ref in refs:
                with suppress(Exception):  # it may have ended meanwhile
                    self._ray.cancel(ref, force=is_forced)
            if refs and not is_forced:
                _, refs = self._ray.wait(refs, num_returns=len(refs), timeout=GRACE_PERIOD)
        self._jobs.clear()
        self._session.close()

    @override(Jobs)
    def _begin(self, payload: bytes) -> tuple[Any, Any]:
        return self._task.remote(payload, os.getcwd()), None

    @override(Jobs)
    def _terminate(self, handle: Any) -> None:
        self._ray.cancel(handle, force=False)

    @override(Jobs)
    def _ended(self, timeout: float | None) -> list[Any]:
        return list(self._ray.wait(list(self._jobs), timeout=timeout)[0])

    @override(Jobs)
    def _returned(self, handle: Any, job: Job) -> JobReturn:
        try:
            job_return: JobReturn = cloudpickle.loads(self._ray.get(handle))
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().split("\n", 1)[0]
            return lost_job(f"The process of job {job.number} is lost: {reason}")
        return job_return
