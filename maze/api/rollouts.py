"""Rollouts of a RunContext, and their statistics as a table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze.api.config_loader import LoadedRun
from maze.api.utils import GlobalGenerators, output
from maze.cli.hydra_setup import hydra_config
from maze.cli.run_directory import claim_directory
from maze.cli.run_summary import write_run_info
from maze.cli.stored_runs import use_stored_run
from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.log_stats.log_stats import LogStats, LogStatsKey, StatsContext
from maze.core.log_stats.stats_format import name_parts, sample_values, scalar_value
from maze.core.rollout.recording import EVENT_LOG_DIR, PAGE_DIR, TRAJECTORY_DIR
from maze.core.utils.factory import Factory
from maze.core.utils.files import inside_directory
from maze.core.utils.import_guard import imports_guarded

if TYPE_CHECKING:
    import pandas as pd

INDEX = ("interface", "event", "statistic")


class Evaluation(dict[LogStatsKey, Any]):
    """Statistics of an evaluation, by their keys; shown as one line of means."""

    @property
    def mean_reward(self) -> float:
        """Mean over the episodes of the sum of their rewards."""
        return float(self[LogStatsKey(BaseEnvEvents.reward, "mean", None)])

    @property
    def kpis(self) -> dict[str, float]:
        """Means of the environment's KPIs over the episodes, by their names; empty where it has none."""
        means = (key for key in self if key.event is BaseEnvEvents.kpi and key.output_name == "mean")
        return {"/".join(map(str, key.group or ())): float(self[key]) for key in means}

    def to_frame(self) -> pd.DataFrame:
        """Return the statistics as a table; see :func:`statistics_frame`."""
        return statistics_frame(self)

    def __repr__(self) -> str:
        kpis = "".join(f", {name}={value:.5g}" for name, value in self.kpis.items())
        return f"Evaluation(mean_reward={self.mean_reward:.5g}{kpis})"


@contextmanager
def inside_run(
    loaded: LoadedRun, directory: Path, silent: bool, generators: GlobalGenerators, stats: StatsContext
) -> Iterator[None]:
    """Return a context with the working directory, Hydra configuration, generators and statistics of a run.

    :param loaded: The configuration.
    :param directory: Directory of the run.
    :param silent: Print nothing.
    :param generators: State of the global random generators.
    :param stats: The run's statistics.
    """
    with (
        output(silent),
        imports_guarded(loaded.guard),
        inside_directory(directory),
        hydra_config(loaded.hydra),
        generators.active(),
        stats,
    ):
        yield


def roll_out(loaded: LoadedRun, project: Path, silent: bool) -> pd.DataFrame:
    """Run the rollout that a configuration describes, in its own directory.

    :param loaded: The configuration.
    :param project: Working directory of the caller.
    :param silent: Print nothing.
    :return: See :func:`statistics_frame`; `attrs` has the directories of the results.
    """
    from maze.core.rollout.rollout_runner import RolloutRunner

    claimed = claim_directory(loaded.workdir)
    directory, cfg = claimed.path, loaded.config
    start = time.perf_counter()
    with inside_run(loaded, directory, silent, GlobalGenerators(), StatsContext()):
        try:
            use_stored_run(cfg, [*loaded.arguments[2:], *loaded.placed])
            write_run_info(directory, cfg, project, loaded.arguments)
            runner = Factory(RolloutRunner).instantiate(cfg.runner, config_path="runner")  # type: ignore[type-abstract]
            runner.setup(cfg)
            runner.run()
        except BaseException:
            claimed.remove_if_worthless()
            raise
    assert runner.stats is not None
    frame = statistics_frame(runner.stats)
    frame.attrs |= {
        "run_dir": str(directory),
        "trajectory_dir": str(directory / TRAJECTORY_DIR) if runner.record_trajectory else None,
        "page_dir": str(directory / PAGE_DIR) if getattr(runner, "record_pages", False) else None,
        "event_log_dir": str(directory / EVENT_LOG_DIR) if runner.record_event_logs else None,
        "n_cut_off": runner.n_cut_off,
        "seconds": time.perf_counter() - start,
    }
    return frame


def statistics_frame(stats: LogStats) -> pd.DataFrame:
    """Return statistics as a table with the column `value`, indexed by interface, event and statistic.

    For distributions, `value` is the array of samples.
    """
    import pandas as pd

    index = list(INDEX)
    rows = [(*name_parts(key), _value(value)) for key, value in stats.items()]
    table: pd.DataFrame = pd.DataFrame(rows, columns=[*index, "value"], dtype=object).set_index(index).sort_index()
    return table


def _value(value: Any) -> Any:
    number = scalar_value(value)
    if number is not None:
        return number
    samples = sample_values(value)
    return value if samples is None or isinstance(value, Mapping) else samples
