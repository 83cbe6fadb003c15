"""A launcher that does not give up."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict


class PatientLauncher(Launcher):
    """Runs the jobs of a sweep one after the other, goes on when one fails, and keeps a list of what became of them.

    :param list_file: Name of the list, in the directory of the sweep.
    """

    def __init__(self, list_file: str) -> None:
        self.list_file = list_file

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        sweep_dir = Path(str(self.config.hydra.sweep.dir))
        sweep_dir.mkdir(parents=True, exist_ok=True)
        returns = []
        with (sweep_dir / self.list_file).open("a", newline="") as file:
            writer = csv.writer(file)
            for number, overrides in enumerate(job_overrides, start=initial_job_idx):
                job = self._run(number, list(overrides))
                result = job.return_value if job.status is JobStatus.COMPLETED else repr(job._return_value)
                writer.writerow([number, job.status.name, result, " ".join(filter_overrides(overrides))])
                file.flush()
                returns.append(job)
        return returns

    def _run(self, number: int, overrides: list[str]) -> JobReturn:
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{number}"
            config.hydra.job.num = number
        return run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
