"""Runs the jobs of a sweep in processes of this machine."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import cloudpickle
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from maze.core.errors import WorkerError

log = logging.getLogger(__name__)


class LocalLauncher(Launcher):  # type: ignore[misc, unused-ignore]
    """Distributes jobs over worker processes.

    :param n_jobs: Number of jobs at a time; -1: as many as there are CPUs.
    """

    def __init__(self, n_jobs: int = -1) -> None:
        self.n_jobs = n_jobs if n_jobs > 0 else _n_cpus()
        self.config: DictConfig | None = None
        self.hydra_context: HydraContext | None = None
        self.task_function: TaskFunction | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context, self.task_function = config, hydra_context, task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        assert self.config is not None
        assert self.hydra_context is not None
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        n_workers = min(self.n_jobs, len(job_overrides))
        log.info(f"Launching {len(job_overrides)} jobs, {n_workers} at a time")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(n_workers, mp_context=context) as pool:
            futures = []
            for index, overrides in enumerate(job_overrides, start=initial_job_idx):
                log.info(f"\t#{index} : {' '.join(filter_overrides(overrides))}")
                futures.append(pool.submit(_run_job, self._payload(index, list(overrides))))
            return [_result(future, index) for index, future in enumerate(futures, start=initial_job_idx)]

    def _payload(self, index: int, overrides: list[str]) -> bytes:
        assert self.config is not None
        assert self.hydra_context is not None
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{index}"
            config.hydra.job.num = index
        payload: bytes = cloudpickle.dumps((self.hydra_context, config, self.task_function, Singleton.get_state()))
        return payload


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_job(payload: bytes) -> bytes:
    hydra_context, config, task_function, singletons = cloudpickle.loads(payload)
    setup_globals()
    Singleton.set_state(singletons)
    HydraConfig.instance().set_config(config)
    job_return = run_job(
        hydra_context=hydra_context,
        task_function=task_function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    result: bytes = cloudpickle.dumps(job_return)
    return result


def _result(future: Future[bytes], index: int) -> JobReturn:
    try:
        result: JobReturn = cloudpickle.loads(future.result())
    except BrokenProcessPool as error:
        raise WorkerError(
            f"Job {index} of the sweep, or one beside it, lost its process. The operating system may have run out of "
            f"memory; try a smaller hydra.launcher.n_jobs."
        ) from error
    return result
