"""Launchers that run the jobs of a sweep in local processes (`hydra/launcher=local`) or on Ray (`=ray`)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from maze.cli.hydra_setup import apply_overrides, for_hydra
from maze.console.streams import let_console_last
from maze.core.annotations import override
from maze.core.errors import WorkerError, first_line
from maze.core.utils.worker_pool import n_available_cores
from maze.train.parallelization.on_ray.cluster import n_cpus, ray_session, require_cpus, require_ray
from maze.utils.exception_report import ExceptionReport
from maze.utils.process import end, exit_text, preload

CONSOLE_FILE = "console.log"
"""File with the console output of a job, in its run directory."""
GRACE_PERIOD = 5.0
"""Seconds that a job has to save and close after SIGTERM."""
MOST_JOBS = 10_000
"""Largest number of awaited jobs: more than any machine runs at once; threads are started on demand."""
TRAINING_MODULE = "maze.train.trainers.common.training_runner"


def outcome(job_return: JobReturn) -> Any:
    """Return the value that a job returned, or its error."""
    return replace(job_return, status=JobStatus.COMPLETED).return_value


@dataclass(frozen=True)
class FinishedJob:
    """A job that has ended.

    :param number: The job's number in the sweep.
    :param job_return: Status, and returned value or error.
    :param duration: Seconds.
    """

    number: int
    job_return: JobReturn
    duration: float


class LocalLauncher(Launcher):  # type: ignore[misc, unused-ignore]
    """Distribute jobs over processes, one for each job, so that a killed job does not affect the others.

    The console output of a job goes to `console.log` in its run directory.

    :param n_jobs: Number of concurrent jobs; -1: the number of CPUs.
    """

    def __init__(self, n_jobs: int = -1) -> None:
        self.n_jobs = n_jobs if n_jobs > 0 else n_available_cores()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context, self.task_function = config, hydra_context, task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        waiting = list(enumerate(job_overrides, start=initial_job_idx))
        returns: dict[int, JobReturn] = {}
        with closing(self.open()) as jobs:
            while waiting or jobs.n_running:
                while waiting and jobs.n_running < self.n_jobs:
                    number, overrides = waiting.pop(0)
                    jobs.start(number, list(overrides))
                returns.update((job.number, job.job_return) for job in jobs.wait())
        return [returns[number] for number in sorted(returns)]

    def open(self) -> Jobs:
        """Return the running jobs, for sweepers that start a job whenever a slot is free."""
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        with ExitStack() as session:
            self.begin(session)
            return Jobs(self, session.pop_all())

    def begin(self, session: ExitStack) -> None:
        """Prepare the start of jobs.

        :param session: Is closed after the last job.
        """
        self._context: Any = multiprocessing.get_context("forkserver")
        preload(self._context, [__name__, *([TRAINING_MODULE] if "algorithm" in self.config else [])])

    def start(self, payload: bytes) -> Any:
        """Start a job; return its handle."""
        ours, theirs = self._context.Pipe(duplex=True)
        # Not daemonic: jobs start processes of their own.
        process = self._context.Process(target=_serve_job, args=(payload, theirs, dict(os.environ), os.getcwd()))
        process.start()
        theirs.close()  # only the job holds it, so that its end is detected
        return process, ours

    def result(self, handle: Any) -> JobReturn:
        """Wait for the end of a job; return its result."""
        process, connection = handle
        try:
            job_return: JobReturn = cloudpickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            process.join()
            end_text = exit_text(process.exitcode)
            job_return = lost_job(f"The process of the job (pid {process.pid}) {end_text} before the job ended.")
        connection.close()
        end(process, GRACE_PERIOD)  # the job's own threads may delay its end; its result has arrived
        return job_return

    def stop(self, handle: Any, is_forced: bool) -> None:
        """Terminate a job, which may save first unless it is forced."""
        process, _ = handle
        if is_forced:
            process.kill()
        else:
            process.terminate()

    def payload(self, number: int, overrides: list[str]) -> bytes:
        """Return the job, pickled for its process."""
        config = self.hydra_context.config_loader.load_sweep_config(self.config, for_hydra(overrides))
        apply_overrides(config)
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{number}"
            config.hydra.job.num = number
        job = (self.hydra_context, config, self.task_function, Singleton.get_state())
        return bytes(cloudpickle.dumps(job))


class Jobs:
    """Concurrent jobs, each awaited by a thread; :meth:`close` ends those that still run.

    :param launcher: The launcher of the jobs.
    :param session: Is closed after the last job.
    """

    def __init__(self, launcher: LocalLauncher, session: ExitStack) -> None:
        self._launcher, self._session = launcher, session
        self._pool = ThreadPoolExecutor(max_workers=MOST_JOBS)
        # Number, start and handle of each running job.
        self._jobs: dict[Future[JobReturn], tuple[int, float, Any]] = {}

    @property
    def n_running(self) -> int:
        return len(self._jobs)

    def start(self, number: int, overrides: list[str]) -> None:
        """Start a job."""
        handle = self._launcher.start(self._launcher.payload(number, overrides))
        self._jobs[self._pool.submit(self._launcher.result, handle)] = (number, time.monotonic(), handle)

    def stop(self, number: int) -> None:
        """Terminate a job; it may save first."""
        for known, _, handle in self._jobs.values():
            if known == number:
                self._launcher.stop(handle, is_forced=False)

    def wait(self, timeout: float | None = None) -> list[FinishedJob]:
        """Wait until at least one running job has ended, or until the timeout (seconds)."""
        finished = []
        for future in wait(self._jobs, timeout, FIRST_COMPLETED).done:
            number, started, _ = self._jobs.pop(future)
            finished.append(FinishedJob(number, future.result(), time.monotonic() - started))
        return finished

    def close(self) -> None:
        """Terminate the running jobs, so that training runs save; kill jobs that do not end."""
        for is_forced in (False, True):
            for future, (_, _, handle) in self._jobs.items():
                if not future.done():
                    self._launcher.stop(handle, is_forced)
            wait(self._jobs, GRACE_PERIOD)
        self._jobs.clear()
        self._pool.shutdown()
        self._session.close()


def lost_job(text: str) -> JobReturn:
    """Return the result of a job whose process is lost.

    :param text: The reason.
    """
    return JobReturn(status=JobStatus.FAILED, _return_value=WorkerError(text))


def _serve_job(payload: bytes, connection: Connection, environment: Mapping[str, str], directory: str) -> None:
    """Run the main function of a job's process."""

    def end_with_parent() -> None:
        with suppress(EOFError, OSError):
            connection.recv_bytes()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_PERIOD)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    connection.send_bytes(run_packed_job(payload, directory))


def run_packed_job(payload: bytes, directory: str) -> bytes:
    """Run a job in the process that was started for it.

    :param payload: The job as pickled by :meth:`LocalLauncher.payload`.
    :param directory: The sweep's working directory.
    :return: The pickled `JobReturn`.
    """
    os.chdir(directory)
    n_threads = os.environ.setdefault("OMP_NUM_THREADS", "1")  # the CPUs are shared by all jobs
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(n_threads) if n_threads.isdecimal() else 1)
    hydra_context, config, task_function, singletons = cloudpickle.loads(payload)
    setup_globals()
    Singleton.set_state(singletons)
    HydraConfig.instance().set_config(config)
    _redirect_output(Path(str(config.hydra.sweep.dir)) / str(OmegaConf.select(config, "hydra.sweep.subdir")))
    job_return = run_job(task_function, config, "hydra.sweep.dir", "hydra.sweep.subdir", hydra_context=hydra_context)
    if job_return.status is JobStatus.FAILED:
        traceback.print_exception(outcome(job_return))
        job_return.return_value = ExceptionReport(outcome(job_return)).exception
    packed: bytes = cloudpickle.dumps(job_return)
    return packed


def _redirect_output(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with open(directory / CONSOLE_FILE, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    let_console_last()


class RayLauncher(LocalLauncher):
    """Distribute jobs over the machines of a Ray cluster, one process for each job.

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
    def begin(self, session: ExitStack) -> None:
        session.enter_context(ray_session(self._ray_config, self.cpus_per_job, key="hydra.launcher.address"))
        require_cpus(self.cpus_per_job, "hydra.launcher: a job", "Reduce hydra.launcher.cpus_per_job.")
        if not self._is_bounded:
            self.n_jobs = max(1, int(n_cpus() / max(self.cpus_per_job, 0.01)))
        self._ray = require_ray()
        self._task = self._ray.remote(
            num_cpus=self.cpus_per_job, num_gpus=self.gpus_per_job, max_retries=0, max_calls=1
        )(run_packed_job)

    @override(LocalLauncher)
    def start(self, payload: bytes) -> Any:
        return self._task.remote(payload, os.getcwd())

    @override(LocalLauncher)
    def result(self, handle: Any) -> JobReturn:
        try:
            job_return: JobReturn = cloudpickle.loads(self._ray.get(handle))
        except self._ray.exceptions.RayError as error:
            return lost_job(f"The process of the job is lost: {first_line(error)}")
        return job_return

    @override(LocalLauncher)
    def stop(self, handle: Any, is_forced: bool) -> None:
        with suppress(Exception):  # it may have ended meanwhile
            self._ray.cancel(handle, force=is_forced)
