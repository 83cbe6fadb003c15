"""Setting up statistics logging."""

from __future__ import annotations

import shlex
import sys
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
    HyperparametersWriter,
    LogStatsWriterTensorboard,
    flat_hyperparameters,
)
from maze.core.log_stats.stats_format import Figures
from maze.core.utils.config_description import config_to_yaml
from maze.core.utils.factory import TARGET_KEY, Factory, plain_container
from maze.tracking.tracker import TrackedRun, Tracker

if TYPE_CHECKING:
    from omegaconf import DictConfig


class SimpleStatsLoggingSetup:
    """Prints the statistics of an environment when the `with` block ends.

    The episode in progress is finished and counted. The block has a statistics context of its own.

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
    """Logs the active context's statistics on the console and for TensorBoard, or with the trackers of a configuration.

    The configuration of a training also fills TensorBoard's HPARAMS tab.

    Called again in the same context it closes the writers that it had set up and starts at log step 1 again.

    :param job_config: Shown in TensorBoard's TEXT tab together with the command line; a configuration or its YAML text.
    :param log_dir: Directory of the event files.
    :param tensorboard_render_figure: Whether to draw the figures of `define_plot`.
    :param verbose: 0: print nothing; 1: a short table for each epoch; 2: every statistic. `None`: as the configuration
        says, or else 2.
    :raises ConfigError: `verbose` is something else.
    """
    context = StatsContext.active()
    _remove_earlier_setup(context)
    register_log_stats_writer(_console(job_config, verbose))
    figures, hyperparameters = Figures(), _hyperparameters(job_config)
    for writer in _trackers(job_config, log_dir, tensorboard_render_figure):
        if isinstance(writer, LogStatsWriterTensorboard):
            writer.figures = figures
            _begin_tensorboard(writer, job_config, hyperparameters)
            continue
        register_log_stats_writer(writer)
        if isinstance(writer, Tracker):
            context.guarded(writer, partial(writer.begin, _tracked_run(job_config, hyperparameters), figures))


def _begin_tensorboard(
    tensorboard: LogStatsWriterTensorboard,
    job_config: DictConfig | Mapping[str, Any] | str | None,
    hyperparameters: Mapping[str, bool | float | str],
) -> None:
    context = StatsContext.active()
    if hyperparameters:
        results = HyperparametersWriter(tensorboard, hyperparameters)
        register_log_stats_writer(results)  # first: what it adds to the event file is flushed with the rest
        context.guarded(results, results.start)
    register_log_stats_writer(tensorboard)
    if job_config is not None:
        texts = {"job_config": _as_yaml(job_config), "command": shlex.join(sys.argv)}
        for tag, text in texts.items():
            context.guarded(tensorboard, partial(tensorboard.write_text, tag, _as_code_block(text)))
        context.guarded(tensorboard, tensorboard.on_log_step_increment)


def _trackers(
    job_config: DictConfig | Mapping[str, Any] | str | None, log_dir: str | Path, draws_figures: bool
) -> Iterator[LogStatsWriter]:
    """The trackers that a configuration names in `tracking`; TensorBoard where it does not say."""
    configured = None if job_config is None or isinstance(job_config, str) else job_config.get("tracking")
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


def _tracked_run(
    job_config: DictConfig | Mapping[str, Any] | str | None, hyperparameters: Mapping[str, bool | float | str]
) -> TrackedRun:
    place = StatsContext.active().place or RunPlace(Path.cwd(), Path.cwd())
    resumed = None
    if job_config is not None and not isinstance(job_config, str):
        resumed = job_config.get("input_dir") if job_config.get("resume") else None
    return TrackedRun(place, hyperparameters, Path(str(resumed)) if resumed else None)


def clear_global_state() -> None:
    """Closes all writers of the active context, forgets its hooks and sets its log step back to 1."""
    StatsContext.active().reset()


def _remove_earlier_setup(context: StatsContext) -> None:
    kinds = (LogStatsWriterConsole, RunConsole, HyperparametersWriter, LogStatsWriterTensorboard, Tracker)
    earlier: list[LogStatsWriter] = [
        writer
        for writer in context.writers
        if isinstance(writer, kinds) and getattr(writer, "output", None) is None  # that of a front door stays
    ]
    for writer in earlier:
        context.writers.remove(writer)
        context.guarded(writer, writer.close)
    if earlier:
        context.step = 1


def _console(job_config: DictConfig | Mapping[str, Any] | str | None, verbose: int | None) -> LogStatsWriter:
    settings: Mapping[str, Any] = {}
    if isinstance(job_config, Mapping) or (job_config is not None and not isinstance(job_config, str)):
        settings = job_config
    verbose = checked_verbosity(settings.get("verbose", EVERYTHING) if verbose is None else verbose)
    if verbose == EVERYTHING:
        return LogStatsWriterConsole()
    console = settings.get("console") or {}
    return RunConsole(verbose, console.get("rows") or (), float(console.get("interval", INTERVAL)))


def _as_yaml(job_config: DictConfig | Mapping[str, Any] | str) -> str:
    if isinstance(job_config, str):
        return job_config
    return config_to_yaml(job_config)


def _hyperparameters(job_config: DictConfig | Mapping[str, Any] | str | None) -> dict[str, bool | float | str]:
    """Those of a training; empty for other jobs, whose results depend on more than their configuration."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if job_config is None:
        return {}
    described = OmegaConf.create(_as_yaml(job_config))  # objects among the values are plain data in it
    try:
        config = OmegaConf.to_container(described, resolve=True)
    except OmegaConfBaseException:  # refers to what only the command line knows
        config = OmegaConf.to_container(described)
    if not isinstance(config, dict) or not config.get("algorithm"):
        return {}
    return flat_hyperparameters({str(key): value for key, value in config.items()})


def _as_code_block(text: str) -> str:
    """Markdown that shows the text as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
