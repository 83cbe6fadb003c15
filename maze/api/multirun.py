"""Several runs of a RunContext, sequentially or by a launcher of Hydra."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from maze.api.config_loader import LoadedRun
from maze.api.training_run import RunResult, TrainingRun
from maze.api.utils import RunContextError, hydra_session, output
from maze.cli.launchers import outcome
from maze.cli.run_directory import claim_directory
from maze.core.utils.files import write_whole
from maze.report.run_page import RESULTS_FILE

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

# Fields of a result that are the index of its row, separate columns, or a table.
_NO_COLUMNS = ("number", "overrides", "epochs")

_IN_PROCESS = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def train_all(
    runs: Sequence[TrainingRun],
    launcher: Launcher | None,
    keeps_directory: bool,
    n_epochs: int | None,
    train_kwargs: Mapping[str, Any],
) -> None:
    """Train all runs; failed runs do not stop the others.

    :param runs: The runs.
    :param launcher: Starts them; `None`: the configured one.
    :param keeps_directory: Work in the configured directory, even if an earlier multirun has used it.
    :param n_epochs: Number of epochs of each; `None`: as configured.
    :param train_kwargs: Further arguments of `train`.
    :raises RunContextError: Runs have failed; the others have been trained.
    """
    for run in runs:
        run.require_trainable()
    base = runs[0].loaded.workdir.parent
    if not keeps_directory:
        base = claim_directory(base).path
        for run in runs:
            run.loaded = dataclasses.replace(run.loaded, workdir=base / run.loaded.workdir.name)
    target = OmegaConf.select(runs[0].loaded.hydra, "hydra.launcher._target_")
    first_error: BaseException | None = None
    if launcher is not None or target != _IN_PROCESS:
        first_error = _launch(runs, launcher, base, n_epochs, train_kwargs)
    else:
        for run in runs:
            try:
                run.train(n_epochs, **train_kwargs)
            except Exception as error:  # noqa: PERF203 (the other runs are trained)
                logger.error("Run %d failed: %s", run.loaded.number, error)
                run.note_failure(error)
                first_error = first_error or error
            finally:
                run.release()
    _report(base, [run.result for run in runs], runs[0].silent)
    if failed := [str(run.loaded.number) for run in runs if run.result.status == "failed"]:
        raise RunContextError(
            f"{len(failed)} of {len(runs)} runs failed ({', '.join(failed)}); see `results`. The first "
            f"error: {first_error}"
        ) from first_error


def _report(directory: Path, results: Sequence[RunResult], silent: bool) -> None:
    """Write and print the table of results."""
    frame = results_frame(results)
    write_whole(directory / RESULTS_FILE, frame.to_csv())
    with output(silent):
        print(frame.to_string(), flush=True)


def results_frame(results: Sequence[RunResult]) -> pd.DataFrame:
    """Return a row for each run, indexed by its number; values that distinguish the runs come first."""
    import pandas as pd

    swept = list(dict.fromkeys(key for result in results for key in result.overrides))
    others = [field.name for field in dataclasses.fields(RunResult) if field.name not in _NO_COLUMNS]
    rows = [
        {**{key: result.overrides.get(key) for key in swept}, **{name: getattr(result, name) for name in others}}
        for result in results
    ]
    index = pd.Index([result.number for result in results], name="run")
    frame: pd.DataFrame = pd.DataFrame(rows, index=index, columns=[*swept, *others])
    return frame


def _launch(
    runs: Sequence[TrainingRun],
    launcher: Launcher | None,
    base: Path,
    n_epochs: int | None,
    train_kwargs: Mapping[str, Any],
) -> BaseException | None:
    """Run the jobs with a launcher of Hydra.

    :return: The first error.
    """
    from hydra._internal.callbacks import Callbacks

    master: DictConfig = runs[0].loaded.hydra
    with read_write(master.hydra), open_dict(master.hydra):
        master.hydra.sweep.dir = str(base)
        master.hydra.hydra_logging = {"version": 1, "root": None}  # the process keeps its own
    job = partial(_train_job, [run.loaded for run in runs], runs[0].project, runs[0].silent, n_epochs, train_kwargs)
    with hydra_session():
        context = HydraContext(GlobalHydra.instance().config_loader(), Callbacks())
        if launcher is None:
            launcher = Plugins.instance().instantiate_launcher(context, job, master)
        else:
            launcher.setup(hydra_context=context, task_function=job, config=master)
        HydraConfig.instance().set_config(master)
        texts = [[text for text in run.loaded.arguments[2:] if not text.startswith("hydra/launcher=")] for run in runs]
        returns = launcher.launch(texts, initial_job_idx=0)
    first_error: BaseException | None = None
    for run, returned in zip(runs, returns, strict=True):
        if isinstance(found := outcome(returned), BaseException):
            run.note_failure(found)
            first_error = first_error or found
        else:
            run.take_over(found)
    return first_error


def _train_job(
    runs: Sequence[LoadedRun], project: Path, silent: bool, n_epochs: int | None, kwargs: Mapping[str, Any], cfg: Any
) -> RunResult:
    """Train the run with Hydra's job number, possibly in another process, as the task of a launcher.

    The configuration that Hydra composes there is not used: it lacks the inserted objects.
    """
    run = TrainingRun(runs[int(HydraConfig.get().job.num)], project, keeps_directory=True, silent=silent)
    with closing(run):
        run.train(n_epochs, **kwargs)
        return run.result
