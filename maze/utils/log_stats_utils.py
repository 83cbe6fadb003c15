"""Set-up of statistics logging."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze.console.runs import EVERYTHING, INTERVAL, RunConsole, checked_verbosity
from maze.core.log_events.log_events_writer_registry import LogEventsWriterRegistry
from maze.core.log_stats.log_stats import LogStatsWriter, RunPlace, StatsContext, register_log_stats_writer
from maze.core.log_stats.log_stats_env import LogStatsEnv
from maze.core.log_stats.log_stats_writer_console import LogStatsWriterConsole
from maze.core.log_stats.log_stats_writer_tensorboard import (
    LogStatsWriterTensorboard,
    flat_hyperparameters,
)
from maze.core.log_stats.stats_format import Figures
from maze.core.utils.config_utils import described_config, duration
from maze.core.utils.factory import TARGET_KEY, Factory, plain_container
from maze.tracking.tracker import TrackedRun, Tracker

if TYPE_CHECKING:
    from omegaconf import DictConfig


class SimpleStatsLoggingSetup:
    """Print the statistics of an environment when the `with` block ends.

    The episode in progress is finished and counted. The block has its own statistics context.

    :param env: The environment, wrapped in a `LogStatsWrapper` with a logging prefix.
    :param log_dir: Directory for TensorBoard event files; `None`: console only.
    """

    def __init__(self, env: LogStatsEnv, log_dir: str | Path | None = None) -> None:
        self.env = env
        self.log_dir = log_dir
        self._context = StatsContext()

    def __enter__(self) -> SimpleStatsLoggingSetup:
        event_writers = LogEventsWriterRegistry.writers
        self._context.__enter__()
        self._context.event_writers.extend(event_writers)
        register_log_stats_writer(LogStatsWriterConsole())
        if self.log_dir is not None:
            register_log_stats_writer(LogStatsWriterTensorboard(self.log_dir, tensorboard_render_figure=True))
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            if exc_info[0] is None:
                publish_episode = getattr(self.env, "publish_episode", None)
                if publish_episode is not None:
                    publish_episode()
                self.env.write_epoch_stats()
                self._context.finish_step()
        finally:
            self._context.__exit__(*exc_info)


def setup_logging(
    job_config: DictConfig | Mapping[str, Any] | str | None,
    log_dir: str | Path = ".",
    tensorboard_render_figure: bool = True,
    verbose: int | None = None,
) -> None:
    """Log the statistics of the active context on the console and with TensorBoard, or with the configured trackers.

    The configuration of a training run also fills TensorBoard's HPARAMS tab.

    A second call in the same context closes the writers of the first one and restarts at log step 1.

    :param job_config: Shown in TensorBoard's TEXT tab together with the command line; a configuration or its YAML text.
    :param log_dir: Directory of the event files.
    :param tensorboard_render_figure: Whether to draw the figures of `define_plot`.
    :param verbose: 0: print nothing; 1: a short table for each epoch; 2: every statistic. `None`: the value of the
        configuration, by default 2.
    :raises ConfigError: `verbose` has another value.
    """
    from omegaconf import OmegaConf

    context = StatsContext.active()
    kinds = (LogStatsWriterConsole, RunConsole, LogStatsWriterTensorboard, Tracker)
    for earlier in [writer for writer in context.writers if isinstance(writer, kinds)]:
        if getattr(earlier, "output", None) is None:  # not of `maze-run`
            context.writers.remove(earlier)
            context.guarded(earlier, earlier.close)
            context.step = 1
    settings: Mapping[str, Any] = {} if job_config is None or isinstance(job_config, str) else job_config
    config = OmegaConf.create(job_config) if isinstance(job_config, str) else described_config(job_config or {})
    texts = {}
    if job_config is not None:
        text = job_config if isinstance(job_config, str) else OmegaConf.to_yaml(config)
        code = {"job_config": text.rstrip("\n"), "command": shlex.join(sys.argv)}
        texts = {tag: textwrap.indent(each, "    ", lambda line: True) for tag, each in code.items()}  # in Markdown
    register_log_stats_writer(_console(settings, verbose))
    figures, hyperparameters = Figures(), _hyperparameters(config)
    for writer in _trackers(settings.get("tracking"), log_dir, tensorboard_render_figure):
        register_log_stats_writer(writer)
        if isinstance(writer, LogStatsWriterTensorboard):
            writer.figures = figures
            context.guarded(writer, partial(writer.begin, hyperparameters, texts))
        elif isinstance(writer, Tracker):
            place = context.place or RunPlace(Path.cwd(), Path.cwd())
            resumed = settings.get("input_dir") if settings.get("resume") else None
            run = TrackedRun(place, hyperparameters, Path(str(resumed)) if resumed else None)
            context.guarded(writer, partial(writer.begin, run, figures))


def _trackers(configured: Any, log_dir: str | Path, draws_figures: bool) -> Iterator[LogStatsWriter]:
    """Yield the trackers that a configuration names in `tracking`; TensorBoard if it has no such key."""
    if configured is None:
        yield LogStatsWriterTensorboard(log_dir, draws_figures)
        return
    for name, config in plain_container(configured, "tracking").items():
        if isinstance(config, Mapping) and not config:
            continue  # progress.csv is written anyway
        path = f"tracking.{name}"
        arguments: dict[str, Any] = {}
        factory = Factory(LogStatsWriter)  # type: ignore[type-abstract]  # a subclass
        if isinstance(config, Mapping) and issubclass(
            factory.type_from_name(config.get(TARGET_KEY, ""), config_path=path), LogStatsWriterTensorboard
        ):
            arguments = {"log_dir": config.get("log_dir", log_dir)}
        yield factory.instantiate(config, config_path=path, **arguments)


def clear_global_state() -> None:
    """Close all writers of the active context, remove its hooks and reset its log step to 1."""
    StatsContext.active().reset()


def _console(settings: Mapping[str, Any], verbose: int | None) -> LogStatsWriter:
    verbose = checked_verbosity(settings.get("verbose", EVERYTHING) if verbose is None else verbose)
    if verbose == EVERYTHING:
        return LogStatsWriterConsole()
    console = settings.get("console") or {}
    interval = console.get("interval", INTERVAL)
    return RunConsole(verbose, console.get("rows") or (), duration("console.interval", interval) if interval else 0.0)


def _hyperparameters(described: Any) -> dict[str, bool | float | str]:
    """Return the hyperparameters of a training run; empty for other jobs.

    :param described: The configuration; objects among the values are plain data.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.to_container(described, resolve=True)
    except OmegaConfBaseException:  # refers to values that only the command line has
        config = OmegaConf.to_container(described)
    if not isinstance(config, dict) or not config.get("algorithm"):
        return {}
    return flat_hyperparameters({str(key): value for key, value in config.items()})
