"""Runs the jobs of a sweep in processes of this machine."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from typing_extensions import Self

from maze.cli.wrapper_overrides import apply_overrides, for_hydra
from maze.console.streams import let_console_last
from maze.core.annotations import override
from maze.core.errors import WorkerError
from maze.utils.exception_report import ExceptionReport
from maze.utils.process import end, exit_text, preload

log = logging.getLogger(__name__)

CONSOLE_FILE = "console.log"
"""What a job prints, in its run directory."""
GRACE_PERIOD = 5.0
"""Seconds that a job has for saving and closing when it is asked to end."""
TRAINING_MODULE = "maze.train.trainers.common.training_runner"


def outcome(job_return: JobReturn) -> Any:
    """The returned value of a job, or the error it failed with."""
    return replace(job_return, status=JobStatus.COMPLETED).return_value


@dataclass(frozen=True)
class FinishedJob:
    """What became of a job.

    :param number: The job's number in the sweep.
    :param job_return: What Hydra says about it.
    :param duration: Seconds that it ran.
    """

    number: int
    job_return: JobReturn
    duration: float


class LocalLauncher(Launcher):  # type: ignore[misc, unused-ignore]
    """Distributes jobs over processes, one for each job: a job that is killed takes no other one with it.

    What a job prints goes to `console.log` in its run directory.

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
        waiting = list(enumerate(job_overrides, start=initial_job_idx))
        returns: dict[int, JobReturn] = {}
        with self.open() as jobs:
            log.info(f"Launching {len(job_overrides)} jobs, {min(self.n_jobs, len(job_overrides))} at a time")
            while waiting or jobs.n_running:
                while waiting and jobs.n_running < self.n_jobs:
                    number, overrides = waiting.pop(0)
                    log.info(f"\t#{number} : {' '.join(filter_overrides(overrides))}")
                    jobs.start(number, list(overrides))
                returns.update((job.number, job.job_return) for job in jobs.wait())
        return [returns[number] for number in sorted(returns)]

    def open(self) -> Any:
        """For sweepers that start a job whenever there is room for one."""
        assert self.config is not None
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        return self._open_jobs()

    def _open_jobs(self) -> Any:
        return LocalJobs(self)

    def close(self) -> None:
        """Ends what was started for all jobs."""

    def payload(self, number: int, overrides: list[str]) -> bytes:
        """All that a process needs to run a job."""
        assert self.config is not None
        assert self.hydra_context is not None
        config = self.hydra_context.config_loader.load_sweep_config(self.config, for_hydra(overrides))
        apply_overrides(config)
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{number}"
            config.hydra.job.num = number
        job = (self.hydra_context, config, self.task_function, Singleton.get_state())
        payload: bytes = cloudpickle.dumps(job)
        return payload


@dataclass
class Job:
    """A job that runs."""

    number: int
    started: float
    process: Any = None
    """Its process, where it is one of this machine."""


class Jobs(ABC):
    """Jobs that run beside each other; leaving the context ends those that still run.

    :param launcher: Describes the jobs.
    """

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher
        self._jobs: dict[Any, Job] = {}
        """Those that run, by what one waits for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
        self._launcher.close()

    @property
    def n_running(self) -> int:
        return len(self._jobs)

    def start(self, number: int, overrides: list[str]) -> None:
        """Starts a job."""
        awaited, process = self._begin(self._launcher.payload(number, overrides))
        self._jobs[awaited] = Job(number, time.monotonic(), process)

    def stop(self, number: int) -> None:
        """Asks a job to end."""
        for awaited, job in self._jobs.items():
            if job.number == number:
                self._ask_to_end(awaited)

    def wait(self, timeout: float | None = None) -> list[FinishedJob]:
        """Waits until at least one of the running jobs has ended, or so many seconds."""
        finished = []
        for awaited in self._ended(timeout):
            job = self._jobs.pop(awaited)
            duration = time.monotonic() - job.started
            finished.append(FinishedJob(job.number, self._returned(awaited, job), duration))
        return finished

    @abstractmethod
    def close(self) -> None:
        """Asks the running jobs to end, so that trainings save, and ends those that do not."""

    @abstractmethod
    def _begin(self, payload: bytes) -> tuple[Any, Any]:
        """Starts a job; what one waits for, and its process."""

    @abstractmethod
    def _ask_to_end(self, awaited: Any) -> None: ...

    @abstractmethod
    def _ended(self, timeout: float | None) -> list[Any]:
        """Waits for at least one job."""

    @abstractmethod
    def _returned(self, awaited: Any, job: Job) -> JobReturn:
        """What came of a job that has ended."""


class LocalJobs(Jobs):
    """Jobs in processes of this machine."""

    def __init__(self, launcher: LocalLauncher) -> None:
        super().__init__(launcher)
        self._context = _context(preload_torch=launcher.config is not None and "algorithm" in launcher.config)

    @override(Jobs)
    def close(self) -> None:
        processes = [job.process for job in self._jobs.values()]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + GRACE_PERIOD
        for process in processes:
            end(process, deadline - time.monotonic())
        for connection in self._jobs:
            connection.close()
        self._jobs.clear()

    @override(Jobs)
    def _begin(self, payload: bytes) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe(duplex=True)
        # Not daemonic: jobs start processes of their own.
        process = self._context.Process(target=_serve_job, args=(payload, theirs, dict(os.environ), os.getcwd()))
        process.start()
        theirs.close()  # only the job may hold it, or its death would not be seen
        return ours, process

    @override(Jobs)
    def _ask_to_end(self, awaited: Any) -> None:
        self._jobs[awaited].process.terminate()

    @override(Jobs)
    def _ended(self, timeout: float | None) -> list[Any]:
        return wait(list(self._jobs), timeout)

    @override(Jobs)
    def _returned(self, awaited: Any, job: Job) -> JobReturn:
        try:
            job_return: JobReturn = cloudpickle.loads(awaited.recv_bytes())
        except (EOFError, OSError):
            job.process.join()
            job_return = _lost(job)
        awaited.close()
        end(job.process, GRACE_PERIOD)  # a thread of the job's own may hold it back; its result is there
        return job_return


def _context(preload_torch: bool) -> Any:
    """How processes are started: from a server that has imported what all jobs need, where the system has that."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    preload(context, [__name__, *([TRAINING_MODULE] if preload_torch else [])])
    return context


def _lost(job: Job) -> JobReturn:
    code = job.process.exitcode
    is_killed = code is not None and code < 0
    hint = " The operating system may have run out of memory; try a smaller hydra.launcher.n_jobs." if is_killed else ""
    return lost_job(
        f"The process of job {job.number} (pid {job.process.pid}) {exit_text(code)} before the job ended.{hint}"
    )


def lost_job(text: str) -> JobReturn:
    """What comes of a job whose process is lost.

    :param text: How that happened.
    """
    return JobReturn(status=JobStatus.FAILED, _return_value=WorkerError(text))


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve_job(payload: bytes, connection: Connection, environment: Mapping[str, str], directory: str) -> None:
    """Main function of a job's process."""
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    connection.send_bytes(run_packed_job(payload, directory))


def run_packed_job(payload: bytes, directory: str) -> bytes:
    """Runs a job in the process that was started for it.

    :param payload: As :meth:`LocalLauncher.payload` packed it.
    :param directory: The sweep's working directory.
    :return: The packed `JobReturn`.
    """
    os.chdir(directory)
    _use_one_thread()
    hydra_context, config, task_function, singletons = cloudpickle.loads(payload)
    setup_globals()
    Singleton.set_state(singletons)
    HydraConfig.instance().set_config(config)
    _redirect_output(Path(str(config.hydra.sweep.dir)) / str(OmegaConf.select(config, "hydra.sweep.subdir")))
    job_return = run_job(
        hydra_context=hydra_context,
        task_function=task_function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    if job_return.status is JobStatus.FAILED:
        traceback.print_exception(outcome(job_return))
    return _packed(job_return)


def _packed(job_return: JobReturn) -> bytes:
    if job_return.status is JobStatus.FAILED:
        job_return.return_value = ExceptionReport(outcome(job_return)).exception
    try:
        packed: bytes = cloudpickle.dumps(job_return)
    except Exception:  # what the job returned runs code of its class when it is pickled
        job_return.return_value = ExceptionReport(TypeError("What the job returned cannot be pickled.")).exception
        job_return.status = JobStatus.FAILED
        packed = cloudpickle.dumps(job_return)
    return packed


def _use_one_thread() -> None:
    """Several processes with several threads each get in one another's way."""
    n_threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(n_threads) if n_threads.isdecimal() else 1)


def _redirect_output(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with open(directory / CONSOLE_FILE, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    let_console_last()


def _end_with_parent(connection: Connection) -> None:
    """Ends this process in order when the sweep's process is gone."""
    with suppress(EOFError, OSError):
        connection.recv_bytes()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_PERIOD)
    os._exit(1)
